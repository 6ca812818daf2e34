"""Small plans made by hand, without a search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.assemble import assemble
from planner.cost.context import PoolContext
from planner.evaluate import evaluate
from planner.specs.cluster import BridgeSpec, ClusterSpec, PoolSpec
from planner.specs.load import load_device
from planner.specs.model import (
    Architecture,
    ComputeKernel,
    DenseOptimizer,
    ModelSpec,
    Optimizers,
    Precision,
    ShardingType,
    SparseOptimizer,
    TableConstraints,
    TableGroup,
)
from planner.specs.plan import MemoryPolicy, Placement, Plan, SolverReport
from planner.specs.units import Dtype

FP32 = MemoryPolicy(compute_precision=Dtype.FP32)
BRIDGE = BridgeSpec(gbps=40, latency_us=50, rails=1)


def pool(name: str, device: str, nodes: int, per_node: int, **more: Any) -> PoolSpec:
    return PoolSpec(name=name, device=device, nodes=nodes, devices_per_node=per_node, **more)


def model(
    tables: list[tuple[int, int, float]],
    batch: int,
    *,
    constraints: TableConstraints | None = None,
    interval: int = 1,
    **precision: Any,
) -> ModelSpec:
    """Tables t0, t1 … of (rows, columns, pooling)."""
    return ModelSpec(
        name="tiny",
        description="",
        source="made up",
        arch=Architecture.MLP_CONCAT,
        global_batch=batch,
        dense_features=4,
        bottom_mlp=(64,),
        top_mlp=(256, 1),
        tables=tuple(
            TableGroup(
                name=f"t{index}",
                num_embeddings=rows,
                embedding_dim=columns,
                pooling_factors=(pooling,),
                constraints=constraints or TableConstraints(),
            )
            for index, (rows, columns, pooling) in enumerate(tables)
        ),
        optimizer=Optimizers(
            dense=DenseOptimizer(name="sgd", learning_rate=0.1),
            sparse=SparseOptimizer(name="sgd", learning_rate=0.1),
        ),
        precision=Precision(**precision),
        max_exchange_interval_steps=interval,
    )


def on(rank: int, **more: Any) -> Placement:
    fields = {
        "sharding_type": ShardingType.TABLE_WISE,
        "compute_kernel": ComputeKernel.FUSED,
        "data_type": Dtype.FP32,
        "ranks": (rank,),
    }
    return Placement(**{**fields, **more})


def rows_over(ranks: int) -> Placement:
    return on(0, sharding_type=ShardingType.ROW_WISE, ranks=tuple(range(ranks)))


def by_columns(*ranks: int, widths: tuple[int, ...]) -> Placement:
    return on(0, sharding_type=ShardingType.COLUMN_WISE, ranks=ranks, column_widths=widths)


def make_plan(
    pools: tuple[PoolSpec, ...],
    job: ModelSpec,
    batches: Mapping[str, int],
    placements: Mapping[str, Mapping[str, Placement]],
    *,
    working: Mapping[str, int] | None = None,
    policies: Mapping[str, MemoryPolicy] | None = None,
    groups: Mapping[str, int] | None = None,
    interval: int = 1,
) -> Plan:
    """A plan of given placements.

    Args:
        working: nodes that work, by pool; all if left out.
    """
    cluster = ClusterSpec(name="tiny", pools=pools, bridge=BRIDGE if len(pools) > 1 else None)
    working = working or {one.name: one.nodes for one in pools}
    contexts = {
        name: PoolContext(
            pool=cluster.pool(name).model_copy(update={"nodes": nodes}),
            device=load_device(cluster.pool(name).device),
            model=job,
            local_batch=batches[name],
            policy=(policies or {}).get(name, FP32),
            bridge=cluster.bridge,
            pools_in_job=len(working),
            embedding_interval_steps=interval,
            replica_groups=(groups or {}).get(name, 1),
        )
        for name, nodes in working.items()
    }
    evaluation = evaluate(contexts, placements)
    return assemble(
        cluster=cluster,
        model=job,
        global_batch=job.global_batch,
        kind="planned",
        contexts=contexts,
        evaluation=evaluation,
        bound_s=evaluation.step_s / 1.02,
        report=SolverReport(
            name="by hand",
            status="exhausted",
            mip_gap=0.01,
            time_limit_s=1.0,
            evaluated=0,
            pruned=0,
        ),
    )


BIG = [(2_000_000, 64, 30.0), (500_000, 32, 10.0), (1000, 64, 1.0)]


def two_pools(batches: Mapping[str, int] | None = None) -> Plan:
    """Two vendors; tables and bridge decide."""
    return make_plan(
        (pool("amd", "mi350x", 2, 2), pool("nvidia", "b200", 1, 2)),
        model(BIG, 786_432, interval=8),
        batches or {"amd": 131_072, "nvidia": 131_072},
        {
            "amd": {"t0": by_columns(0, 1, widths=(32, 32)), "t1": on(3), "t2": rows_over(4)},
            "nvidia": {"t0": on(0), "t1": on(1), "t2": on(1)},
        },
        interval=4,
    )


def one_pool(batch: int = 1_048_576) -> Plan:
    """Four ranks; the rank with t0 is slowest."""
    return make_plan(
        (pool("amd", "mi350x", 2, 2),),
        model(BIG, batch),
        {"amd": batch // 4},
        {"amd": {"t0": on(0), "t1": on(0), "t2": on(3)}},
    )


def one_rank() -> Plan:
    return make_plan(
        (pool("solo", "h200", 1, 1),),
        model(BIG, 8192),
        {"solo": 8192},
        {"solo": {"t0": on(0), "t1": on(0), "t2": on(0)}},
    )


def host_bound() -> Plan:
    return make_plan(
        (pool("amd", "mi350x", 1, 2),),
        model([(1000, 16, 1.0), (2000, 16, 1.0)], 64),
        {"amd": 32},
        {"amd": {"t0": on(0), "t1": on(1)}},
    )


def cpu_pools() -> Plan:
    return make_plan(
        (
            pool("fast", "cpu", 1, 2, cpu_cores=(0, 1), host_memory_gib_per_node=16.0),
            pool("slow", "cpu", 1, 1, cpu_cores=(2,), host_memory_gib_per_node=16.0),
        ),
        model([(10_000, 16, 4.0), (5000, 16, 2.0)], 384),
        {"fast": 128, "slow": 128},
        {"fast": {"t0": on(0), "t1": on(1)}, "slow": {"t0": on(0), "t1": on(0)}},
    )


def groups() -> Plan:
    """Two replica groups of two ranks each, on one node each."""
    return make_plan(
        (pool("amd", "mi350x", 2, 2),),
        model(BIG, 1_048_576, interval=4),
        {"amd": 262_144},
        {"amd": {"t0": on(0), "t1": on(1), "t2": rows_over(2)}},
        groups={"amd": 2},
        interval=4,
    )


PLANS = {
    make.__name__: make for make in (two_pools, one_pool, one_rank, host_bound, cpu_pools, groups)
}
