"""Plans to export, and what a process does with an exported module."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from planner.specs.model import ModelSpec, TableGroup
from planner.specs.plan import Plan
from tests.trainers.jobs import model_of, place, plan_of
from trainers.models.build import EMBEDDINGS
from trainers.placement import sharding_plan

RATE = 0.05
LOCAL_BATCH = 3
STEPS = 3
START = 0.25
PLACEMENTS = {
    "whole": place("table_wise", 2),
    "rows": place("row_wise", 0, 1, 2, 3),
    "columns": place("column_wise", 3, 1, widths=(4, 12)),
    "node_rows": place("table_row_wise", 2, 3),
    "grid": place("grid_shard", 2, 3, 0, 1, widths=(12, 4)),
    "replica": place("data_parallel", 0, 1, 2, 3),
}


def every_sharding() -> Plan:
    """One table of each sharding type on two nodes of two ranks."""
    return plan_of({"p": (4, LOCAL_BATCH, dict(PLACEMENTS))}, model_with(PLACEMENTS), node_size=2)


def model_with(names: Any) -> ModelSpec:
    """Tables of these names, of unequal rows, one of them read by two features."""
    base = model_of()
    tables = tuple(
        TableGroup(
            name=name,
            num_embeddings=10 + 3 * index,
            embedding_dim=16,
            pooling_factors=(2.0, 1.0) if name == "rows" else (1.5,),
        )
        for index, name in enumerate(names)
    )
    fields = {name: getattr(base, name) for name in ModelSpec.model_fields}
    return ModelSpec(**(fields | {"tables": tables}))


def executed(source: str) -> dict[str, Any]:
    """What an exported module defines."""
    module: dict[str, Any] = {"__name__": "exported"}
    exec(compile(source, "exported.py", "exec"), module)
    return module


class Score(nn.Module):
    """A foreign model: embeddings, and one linear layer with constant weights."""

    def __init__(self, configs: list[Any], device: torch.device) -> None:
        super().__init__()
        for config in configs:
            config.init_fn = lambda weight: nn.init.constant_(weight, START)
        self.ebc = EmbeddingBagCollection(tables=configs, device=device)
        self.features = [name for config in configs for name in config.feature_names]
        width = sum(c.embedding_dim * len(c.feature_names) for c in configs)
        self.layer = nn.Linear(width, 1)
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(0.1, 0.2, width)[None])
            self.layer.bias.zero_()

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(ids).to_dict()
        score = self.layer(torch.cat([pooled[name] for name in self.features], dim=1))
        return (score - 1.0).square()


def batch(plan: Plan, rank: int, step: int) -> KeyedJaggedTensor:
    """A rank's ids: two per sample and feature, a function of rank and step only."""
    keys, values = [], []
    generator = torch.Generator().manual_seed(100 * step + rank)
    for table in plan.model.all_tables:
        for name in table.feature_names:
            keys.append(name)
            shape = (2 * LOCAL_BATCH,)
            values.append(torch.randint(table.num_embeddings, shape, generator=generator))
    lengths = torch.full((len(keys) * LOCAL_BATCH,), 2, dtype=torch.int64)
    return KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=lengths)


def train_exported(rank: int, source: str, plan: Plan) -> tuple[bool, list[torch.Tensor]]:
    """Whether the module's plan is the trainer's, and the outputs of each step of training under
    it, with TorchRec's own parts alone."""
    os.environ["LOCAL_WORLD_SIZE"] = str(plan.pools["p"].devices_per_node)
    device = torch.device("cpu")
    module = executed(source)
    mine = module["sharding_plan"](module=EMBEDDINGS, device_type="cpu")
    same = mine.plan == sharding_plan(plan, "p", rank, device).plan
    model = Score(module["embedding_bag_configs"](), torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": RATE})
    dmp = DistributedModelParallel(
        model,
        device=device,
        plan=module["sharding_plan"]("ebc", device_type="cpu"),
        sharders=[EmbeddingBagCollectionSharder()],
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        lambda parameters: torch.optim.SGD(parameters, lr=RATE),
    )
    outputs = []
    for step in range(STEPS):
        output = dmp(batch(plan, rank, step))
        dense.zero_grad()
        output.mean().backward()
        dense.step()
        outputs.append(output.detach())
    dist.barrier()
    return same, outputs


def train_plainly(source: str, plan: Plan) -> list[torch.Tensor]:
    """The outputs of the same steps on one process and the whole batch."""
    model = Score(executed(source)["embedding_bag_configs"](), torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    ranks = range(plan.pools["p"].ranks)
    outputs = []
    for step in range(STEPS):
        output = torch.cat([model(batch(plan, rank, step)) for rank in ranks])
        optimizer.zero_grad()
        output.mean().backward()
        optimizer.step()
        outputs.append(output.detach())
    return outputs
