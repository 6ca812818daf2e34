"""A small model, contexts and the measured tables, shared by the cost tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.cost.context import PoolContext
from planner.specs.cluster import BridgeSpec, PoolSpec
from planner.specs.load import load_device
from planner.specs.model import (
    Architecture,
    DenseOptimizer,
    DotInteraction,
    ModelSpec,
    Optimizers,
    SparseOptimizer,
    TableGroup,
)
from planner.specs.plan import MemoryPolicy
from planner.specs.units import Dtype

DATA = Path(__file__).parents[3] / "shared" / "data"
BRIDGE = BridgeSpec(gbps=8.0, latency_us=100.0)


def data_file(name: str) -> Path:
    """A measured table beside the repository: skip without it, except on CI."""
    path = DATA / name
    if not path.exists():
        assert os.environ.get("CI") != "true", f"{path} is missing"
        pytest.skip(f"{path} is not here")
    return path


def small_model() -> ModelSpec:
    """DLRM: 13 -> 8 -> 4, two tables of width 4, top 16 -> 1."""
    return ModelSpec(
        name="small",
        description="",
        source="",
        arch=Architecture.DLRM_DOT,
        global_batch=64,
        dense_features=13,
        bottom_mlp=(8, 4),
        top_mlp=(16, 1),
        interaction=DotInteraction(type="dot"),
        tables=(
            TableGroup(name="a", num_embeddings=1000, embedding_dim=4, pooling_factors=(3.0,)),
            TableGroup(name="b", num_embeddings=50, embedding_dim=4, zipf_exponent=1.1),
        ),
        optimizer=Optimizers(
            dense=DenseOptimizer(name="adagrad", learning_rate=0.1),
            sparse=SparseOptimizer(name="rowwise_adagrad", learning_rate=0.1),
        ),
    )


def context(
    device: str = "h200",
    *,
    nodes: int = 1,
    per_node: int = 8,
    local_batch: int = 64,
    model: ModelSpec | None = None,
    recompute: tuple[str, ...] = (),
    precision: Dtype = Dtype.FP32,
    communication: Dtype = Dtype.FP32,
    pools: int = 1,
) -> PoolContext:
    profile = load_device(device)
    return PoolContext(
        pool=PoolSpec(
            name="p",
            device=device,
            nodes=nodes,
            devices_per_node=per_node,
            cpu_cores=(0,) if profile.is_cpu else None,
        ),
        device=profile,
        model=model or small_model(),
        local_batch=local_batch,
        policy=MemoryPolicy(
            compute_precision=precision,
            recompute=recompute,
            communication_precision=communication,
        ),
        bridge=BRIDGE if pools > 1 else None,
        pools_in_job=pools,
    )
