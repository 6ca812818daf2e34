"""A plain single-process PyTorch DLRM: what every plan must reproduce."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from planner.specs.model import ModelSpec
from trainers.counter_rng import text_counter, uniform
from trainers.data.batch import Batch
from trainers.models.build import initialise_dense
from trainers.models.networks import build_network


class ReferenceDlrm(nn.Module):
    """nn.EmbeddingBag and nn.Linear, written out."""

    def __init__(self, model: ModelSpec, seed: int) -> None:
        super().__init__()
        self.model = model
        self.tables = nn.ModuleDict()
        for table in model.all_tables:
            rows = torch.arange(table.num_embeddings)[:, None]
            columns = torch.arange(table.embedding_dim)[None, :]
            drawn = uniform(seed, text_counter(table.name), rows, columns)
            weight = (2 * drawn - 1) * table.num_embeddings**-0.5
            self.tables[table.name] = nn.EmbeddingBag.from_pretrained(
                weight.float(), freeze=False, mode="sum", include_last_offset=True
            )
        network = build_network(model)
        initialise_dense(network, seed)
        self.bottom = network.bottom.layers
        self.top = network.top.layers

    def forward(self, batch: Batch) -> torch.Tensor:
        features = batch.sparse.to_dict()
        bottom = self.bottom(batch.dense)
        vectors = [bottom]
        for table in self.model.all_tables:
            for name in table.feature_names:
                jagged = features[name]
                vectors.append(self.tables[table.name](jagged.values(), jagged.offsets()))
        pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
        logits = self.top(torch.cat([bottom, torch.stack(pairs, 1)], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)


def train_reference(
    model: ModelSpec, batches: list[Batch], seed: int
) -> tuple[list[float], ReferenceDlrm]:
    """Losses and the trained model."""
    reference = ReferenceDlrm(model, seed)
    sparse, dense = model.optimizer.sparse, model.optimizer.dense
    rule = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "rowwise_adagrad": RowWiseAdagrad,
        "adam": torch.optim.Adam,
    }
    optimizers = []
    for spec, parameters in (
        (sparse, reference.tables.parameters()),
        (dense, [*reference.bottom.parameters(), *reference.top.parameters()]),
    ):
        eps = {} if spec.name == "sgd" else {"eps": spec.eps}
        optimizers.append(rule[spec.name](parameters, lr=spec.learning_rate, **eps))
    losses = []
    for batch in batches:
        reference.zero_grad()
        loss = reference(batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses, reference
