"""Small jobs on CPU pools, solved to the optimum within a tenth of a second."""

from __future__ import annotations

from typing import Any

from planner.search import SearchOptions
from planner.specs.cluster import BridgeSpec, ClusterSpec, PoolSpec
from planner.specs.model import (
    Architecture,
    DenseOptimizer,
    ModelSpec,
    Optimizers,
    Precision,
    ShardingType,
    SparseOptimizer,
    TableConstraints,
    TableGroup,
)

EXACT = SearchOptions(mip_gap=0.0)

TINY = ModelSpec(
    name="tiny",
    description="two tables, and an MLP that keeps CPU workers busy",
    source="made up",
    arch=Architecture.MLP_CONCAT,
    global_batch=1920,
    dense_features=4,
    top_mlp=(512, 512, 1),
    tables=(
        TableGroup(
            name="t",
            count=2,
            num_embeddings=10_000,
            embedding_dim=16,
            pooling_factors=(4.0,),
            constraints=TableConstraints(
                sharding_types=(ShardingType.TABLE_WISE, ShardingType.ROW_WISE)
            ),
        ),
    ),
    optimizer=Optimizers(
        dense=DenseOptimizer(name="sgd", learning_rate=0.1),
        sparse=SparseOptimizer(name="sgd", learning_rate=0.1),
    ),
    precision=Precision(),
)


def cpu_pool(name: str, nodes: int, workers: int, **fields: Any) -> PoolSpec:
    """Nodes with a core and 4 GiB for each worker; pools of other names have other cores."""
    first = sum(name.encode()) % 1000
    return PoolSpec(
        name=name,
        nodes=nodes,
        devices_per_node=workers,
        cpu_cores=tuple(range(first, first + workers)),
        host_memory_gib_per_node=4.0 * workers,
        **{"device": "cpu", **fields},
    )


def cpu_cluster(*pools: PoolSpec, gbps: float = 100.0) -> ClusterSpec:
    return ClusterSpec(
        name="toy",
        pools=pools,
        bridge=BridgeSpec(gbps=gbps, latency_us=5.0),
        reference_device="cpu",
    )


TWO = cpu_cluster(
    cpu_pool("single", 3, 1, dollars_per_device_hour=0.5, watts_per_device=10.0),
    cpu_pool("double", 2, 2, dollars_per_device_hour=0.75),
)
"""Both pools together are faster than either, but not with all their nodes."""
