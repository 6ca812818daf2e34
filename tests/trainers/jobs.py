"""Small jobs written by hand, and a way to run them on real processes."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

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
from runtime.bridge import HierarchicalBridge, build_groups
from trainers.rank import RankEnv


def model_of(sparse: str = "sgd", dense: str = "sgd", rate: float = 0.1) -> ModelSpec:
    """Three tables of unequal size, one of them read by two multi-hot features."""
    return ModelSpec(
        name="small",
        description="test",
        source="this test",
        arch=Architecture.DLRM_DOT,
        global_batch=256,
        dense_features=5,
        bottom_mlp=(24, 16),
        top_mlp=(32, 1),
        interaction=DotInteraction(type="dot"),
        tables=(
            TableGroup(name="a", num_embeddings=97, embedding_dim=16, zipf_exponent=1.0),
            TableGroup(name="b", num_embeddings=40, embedding_dim=16, pooling_factors=(2.5, 1.0)),
            TableGroup(name="c", num_embeddings=1000, embedding_dim=16, zipf_exponent=1.2),
        ),
        optimizer=Optimizers(
            dense=DenseOptimizer(name=dense, learning_rate=rate),
            sparse=SparseOptimizer(name=sparse, learning_rate=rate),
        ),
    )


def place(
    kind: str, *ranks: int, widths: tuple[int, ...] = (), dtype: Dtype = Dtype.FP32
) -> Placement:
    """A placement in one line."""
    return Placement(
        sharding_type=ShardingType(kind),
        compute_kernel=ComputeKernel.DENSE if kind == "data_parallel" else ComputeKernel.FUSED,
        data_type=dtype,
        ranks=ranks,
        column_widths=widths,
    )


def plan_of(
    pools: dict[str, tuple[int, int, dict[str, Placement]]],
    model: ModelSpec,
    *,
    interval: int = 1,
    node_size: int | None = None,
    policy: MemoryPolicy | None = None,
    groups: dict[str, int] | None = None,
) -> Plan:
    """A plan from {pool: (ranks, local batch, placements)}; replica groups by pool, else 1."""
    return Plan(
        hwplan_version="0",
        kind="planned",
        fingerprint="",
        fingerprint_parts={"cluster": "", "model": "", "profiles": "", "code": ""},
        cluster=ClusterSpec(
            name="test",
            pools=tuple(
                PoolSpec(
                    name=name,
                    device="cpu",
                    nodes=ranks // (node_size or ranks),
                    devices_per_node=node_size or ranks,
                    cpu_cores=(0,),
                )
                for name, (ranks, _, _) in pools.items()
            ),
            bridge=BridgeSpec(gbps=8.0, latency_us=100.0),
            reference_device="cpu",
        ),
        model=model,
        global_batch=sum(ranks * batch for ranks, batch, _ in pools.values()),
        pools={
            name: PoolPlan(
                device="cpu",
                nodes=ranks // (node_size or ranks),
                devices_per_node=node_size or ranks,
                ranks=ranks,
                local_batch=batch,
                replica_groups=(groups or {}).get(name, 1),
                policy=policy or MemoryPolicy(compute_precision=Dtype.FP32),
                placements=placements,
                memory_bytes=tuple({"total": 0} for _ in range(ranks)),
                predicted=PoolPrediction(
                    step_ms=1.0, breakdown_ms={}, critical_path=(), slowest_rank=0
                ),
            )
            for name, (ranks, batch, placements) in pools.items()
        },
        exchange=ExchangePlan(
            embedding_interval_steps=interval,
            dense_bytes_per_step=0,
            embedding_bytes_per_exchange=0,
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


def whole_on_rank_0(model: ModelSpec) -> dict[str, Placement]:
    """Every table on the pool's first rank."""
    return {table.name: place("table_wise", 0) for table in model.all_tables}


def rank_env(plan: Plan, world_rank: int) -> RankEnv:
    """Groups and bridge of one rank of an initialised world; every rank must call it."""
    groups = build_groups(plan, world_rank)
    pool, pool_rank = plan.pool_of_rank(world_rank)
    return RankEnv(
        world_rank=world_rank,
        pool=pool,
        pool_rank=pool_rank,
        device=torch.device("cpu"),
        world_group=dist.group.WORLD,
        pool_group=groups.pool,
        replica_group=groups.replica,
        bridge=HierarchicalBridge(groups),
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _process(
    rank: int, world: int, port: int, folder: str, work: Callable[..., Any], arguments: tuple
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    try:
        torch.save(work(rank, *arguments), Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_on_processes(world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``work(rank, *arguments)`` on ``world`` fresh processes with a gloo world; their results."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, args=(world, _free_port(), folder, work, arguments), nprocs=world)
        return [torch.load(Path(folder) / f"{r}.pt", weights_only=False) for r in range(world)]
