"""Small plans written by hand, so that runtime tests do not depend on the planner's choices."""

from __future__ import annotations

from planner.specs.cluster import BridgeSpec, ClusterSpec, PoolSpec
from planner.specs.model import (
    Architecture,
    ComputeKernel,
    DenseOptimizer,
    DotInteraction,
    ModelSpec,
    Optimizers,
    ShardingType,
    SparseOptimizer,
    TableGroup,
)
from planner.specs.plan import (
    ExchangePlan,
    MemoryPolicy,
    Placement,
    Plan,
    PoolPlan,
    PoolPrediction,
    Prediction,
    SolverReport,
)
from planner.specs.units import Dtype

MODEL = ModelSpec(
    name="tiny",
    description="Two tables and two layers",
    source="this test",
    arch=Architecture.DLRM_DOT,
    global_batch=64,
    dense_features=4,
    bottom_mlp=(8,),
    top_mlp=(8, 1),
    interaction=DotInteraction(type="dot"),
    tables=(
        TableGroup(name="a", num_embeddings=50, embedding_dim=8),
        TableGroup(name="b", num_embeddings=30, embedding_dim=8),
    ),
    optimizer=Optimizers(
        dense=DenseOptimizer(name="sgd", learning_rate=0.1),
        sparse=SparseOptimizer(name="sgd", learning_rate=0.1),
    ),
)


def cluster_of(pools: dict[str, tuple[int, list[int]]], rails: int = 1) -> ClusterSpec:
    """CPU pools of one node: name -> (workers, cores)."""
    return ClusterSpec(
        name="test",
        pools=tuple(
            PoolSpec(
                name=name, device="cpu", nodes=1, devices_per_node=ranks, cpu_cores=tuple(cores)
            )
            for name, (ranks, cores) in pools.items()
        ),
        bridge=BridgeSpec(gbps=8.0, latency_us=200.0, rails=rails),
        reference_device="cpu",
    )


def plan_for(cluster: ClusterSpec, local_batch: dict[str, int], model: ModelSpec = MODEL) -> Plan:
    """Table i of ``model`` lives whole on rank i (modulo the pool's size) of every pool."""
    pools = {}
    for pool in cluster.pools:
        pools[pool.name] = PoolPlan(
            device=pool.device,
            nodes=pool.nodes,
            devices_per_node=pool.devices_per_node,
            ranks=pool.devices,
            local_batch=local_batch[pool.name],
            policy=MemoryPolicy(compute_precision=Dtype.FP32),
            placements={
                table.name: Placement(
                    sharding_type=ShardingType.TABLE_WISE,
                    compute_kernel=ComputeKernel.FUSED,
                    data_type=Dtype.FP32,
                    ranks=(index % pool.devices,),
                )
                for index, table in enumerate(model.all_tables)
            },
            memory_bytes=tuple({"total": 0, "capacity": 1} for _ in range(pool.devices)),
            predicted=PoolPrediction(
                step_ms=1.0, breakdown_ms={}, critical_path=(), slowest_rank=0
            ),
        )
    return Plan(
        hwplan_version="0",
        kind="planned",
        fingerprint="",
        fingerprint_parts={"cluster": "", "model": "", "profiles": "", "code": ""},
        cluster=cluster,
        model=model,
        global_batch=sum(pool.ranks * pool.local_batch for pool in pools.values()),
        pools=pools,
        exchange=ExchangePlan(
            embedding_interval_steps=1, dense_bytes_per_step=0, embedding_bytes_per_exchange=0
        ),
        predicted=Prediction(
            step_ms=1.0,
            samples_per_s=1.0,
            lower_bound_ms=1.0,
            gap=0.0,
            provenance={},
            error_band=0.0,
        ),
        solver=SolverReport(
            name="none",
            status="heuristic",
            mip_gap=0.0,
            time_limit_s=1.0,
            evaluated=0,
            pruned=0,
        ),
    )
