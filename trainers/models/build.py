"""The module that is trained: embeddings on ``meta`` until they are sharded, network, loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedTensor, PoolingType
from torchrec.modules.embedding_configs import DataType

from planner.specs.model import ModelSpec, Table
from planner.specs.units import Dtype
from trainers.counter_rng import normal, text_counter
from trainers.data.batch import Batch
from trainers.models.networks import build_network
from trainers.policy import ComputePolicy
from trainers.recompute import switch_recompute

EMBEDDINGS = "embeddings"
"""Name of the embedding module inside ``TrainModel`` (the sharding plan's key)."""

_DATA_TYPES = {
    Dtype.FP32: DataType.FP32,
    Dtype.FP16: DataType.FP16,
    Dtype.BF16: DataType.BF16,
}


class Head(nn.Module):
    """Network and loss under the pool's compute precision."""

    def __init__(self, network: nn.Module, features: list[str], policy: ComputePolicy) -> None:
        super().__init__()
        self.network = network
        self.features = features
        self.policy = policy

    def forward(
        self, dense: torch.Tensor, embeddings: KeyedTensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean binary cross entropy over the rank's samples (fp32) and the logits [batch]."""
        with self.policy.autocast(dense.device):
            logits = self.network(dense, partial(self._pooled, embeddings))
        logits = logits.float()
        return nn.functional.binary_cross_entropy_with_logits(logits, labels), logits

    def _pooled(self, embeddings: KeyedTensor) -> torch.Tensor:
        # Each sharding returns features in an order of its own; the network wants the model's.
        if embeddings.keys() == self.features:
            pooled = embeddings.values()
        else:
            pooled = KeyedTensor.regroup([embeddings], [self.features])[0]
        return self.policy.unscale_gradient(pooled)


class TrainModel(nn.Module):
    """What TorchRec shards and its pipeline drives: batch to (loss to differentiate, outputs)."""

    def __init__(self, embeddings: EmbeddingBagCollection, head: Head, loss_scale: float) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.head = head
        self.loss_scale = loss_scale

    def forward(
        self, batch: Batch
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(scaled loss, (loss, logits, labels)); the outputs carry no gradient."""
        embeddings = self.embeddings(batch.sparse)
        loss, logits = self.head(batch.dense, embeddings, batch.labels)
        return loss * self.loss_scale, (loss.detach(), logits.detach(), batch.labels)


def initialise_dense(network: nn.Module, seed: int) -> None:
    """Xavier-normal weights and zero biases, a function of seed and parameter name only."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() < 2:
                parameter.zero_()
                continue
            index = torch.arange(parameter.numel(), dtype=torch.int64).view(parameter.shape)
            deviation = math.sqrt(2.0 / sum(parameter.shape))
            parameter.copy_(normal(seed, text_counter(name), index) * deviation)


def embedding_bags(
    tables: Iterable[Table], data_types: Mapping[str, Dtype]
) -> EmbeddingBagCollection:
    """The tables on ``meta``; weights in fp32 where ``data_types`` says nothing of a name."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=list(table.feature_names),
                pooling=PoolingType.SUM,
                data_type=_DATA_TYPES[data_types.get(table.name, Dtype.FP32)],
            )
            for table in tables
        ],
        device=torch.device("meta"),
    )


def build_model(
    model: ModelSpec,
    device: torch.device,
    *,
    seed: int = 0,
    data_types: Mapping[str, Dtype] | None = None,
    policy: ComputePolicy | None = None,
) -> TrainModel:
    """The model, its dense part initialised on ``device``, its tables on ``meta`` (no memory).

    Args:
        data_types: weight precision by table name; fp32 where it says nothing.

    Raises:
        UsageError: the architecture can only be planned. SpecError: a policy for blocks that the
            network does not have.
    """
    policy = policy or ComputePolicy()
    network = build_network(model)
    initialise_dense(network, seed)
    switch_recompute(network, policy.recompute)
    embeddings = embedding_bags(model.all_tables, data_types or {})
    features = [name for table in model.all_tables for name in table.feature_names]
    head = Head(network.to(device), features, policy)
    return TrainModel(embeddings, head, policy.loss_scale)
