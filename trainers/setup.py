"""One rank's model, sharded and initialised as its plan says, with its optimizers and exchange."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from planner.specs.plan import Plan
from trainers.dense_parallel import spread_network
from trainers.exchange import EmbeddingExchange
from trainers.gradients import DenseExchange
from trainers.models import build_model
from trainers.node_groups import create_node_groups
from trainers.optimizers import (
    ReplicatedTables,
    TrainOptimizer,
    dense_optimizer,
    fuse_sparse_optimizer,
)
from trainers.placement import sharding_plan
from trainers.policy import ComputePolicy, communication_codecs
from trainers.rank import RankEnv
from trainers.sharder import TableSharder
from trainers.shards import Shard, initialise, local_shards

_STATES = {"sgd": 0, "rowwise_adagrad": 1, "adagrad": 1, "adam": 2}


@dataclass
class Trainable:
    """Everything that a training step touches."""

    model: DistributedModelParallel
    optimizer: TrainOptimizer
    shards: list[Shard]
    dense_exchange: DenseExchange | None
    """None with one rank, and where the dense network is fully sharded."""
    embedding_exchange: EmbeddingExchange | None
    """None with one copy of the tables."""


def set_up(plan: Plan, rank: RankEnv, seed: int, kernel_store: str | None = None) -> Trainable:
    """Build, shard and initialise; all ranks must call it.

    Args:
        kernel_store: see ``TrainTask``.

    Raises:
        SpecError: a placement or policy that cannot run, an unusable kernel store. UsageError: an
            architecture, optimizer or precision that cannot be trained here.
    """
    pool, spec = plan.pools[rank.pool], plan.model
    policy = ComputePolicy.of(pool.policy)
    policy.apply_matmul_precision()
    model = build_model(
        spec,
        rank.device,
        seed=seed,
        data_types={name: p.data_type for name, p in pool.placements.items()},
        policy=policy,
    )
    if pool.own_kernels:
        _use_planned_kernels(model.head.network, plan, rank, kernel_store)
    shardings = sharding_plan(plan, rank.pool, rank.world_rank, rank.device)
    fuse_sparse_optimizer(model.embeddings, spec.optimizer.sparse, shardings, rank.device)
    create_node_groups(plan, rank)
    wrapper, dense_exchange = spread_network(plan, rank, policy.loss_scale)
    sharded = DistributedModelParallel(
        model,
        env=_sharding_env(rank.replica_group),
        device=rank.device,
        plan=shardings,
        sharders=[
            TableSharder(qcomm_codecs_registry=communication_codecs(pool.policy, rank.device))
        ],
        data_parallel_wrapper=wrapper,
    )
    shards = local_shards(sharded.module.embeddings)
    initialise(shards, {t.name: t.num_embeddings for t in spec.all_tables}, seed)
    replicated = ReplicatedTables(shards, spec.optimizer.sparse)
    dealt = pool.policy.dense_parallelism == "sharded_optimizer"
    optimizer = TrainOptimizer(
        dense_optimizer(
            sharded.module.head, spec.optimizer.dense, rank.pool_group if dealt else None
        ),
        replicated,
        gradient_scale=1.0 if dense_exchange is not None else 1.0 / policy.loss_scale,
    )
    exchange = None
    if plan.table_copies > 1:
        exchange = EmbeddingExchange(
            spec.all_tables,
            shards,
            row_wise_state=spec.optimizer.sparse.name == "rowwise_adagrad",
            states=_STATES[spec.optimizer.sparse.name],
            share=plan.share(rank.pool) / pool.replica_groups,
            interval_steps=plan.exchange.embedding_interval_steps,
            rank=rank,
        )
    return Trainable(sharded, optimizer, shards, dense_exchange, exchange)


def _use_planned_kernels(
    network: nn.Module, plan: Plan, rank: RankEnv, kernel_store: str | None
) -> None:
    # Triton comes with GPU builds of PyTorch only, and CPU pools have no kernels of their own.
    from trainers.kernels.launch import compile_here, device_arch
    from trainers.kernels.linear import KernelTable
    from trainers.kernels.prepare import prepare
    from trainers.kernels.store import KernelStore
    from trainers.kernels.swap import use_kernels

    pool = plan.pools[rank.pool]
    arch = device_arch(rank.device.index or 0)
    if kernel_store is None:
        find = compile_here
        prepare(pool, arch, rank.pool_rank)
    else:
        find = KernelStore.open(kernel_store, plan).find
    use_kernels(network, KernelTable(pool.kernels, pool.policy.compute_precision, arch, find))


_KEPT_BYTES = 1 << 30
"""Freed memory that a CPU rank does not give back to the system."""
_LARGEST_HEAP_BLOCK_BYTES = 32 << 20
"""glibc's own upper limit for what it serves from the heap."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def prepare_host(device: torch.device) -> None:
    """On a CPU rank: as many compute threads as cores that the process may run on, and freed
    activations kept.

    glibc maps large blocks afresh each time, and the kernel zeroes every page of them: thousands
    of page faults a step, a tenth of its time. PyTorch has a caching allocator only on devices.
    """
    if device.type != "cpu":
        return
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _sharding_env(replica_group: dist.ProcessGroup) -> ShardingEnv:
    """TorchRec's environment of one replica group.

    ``ShardingEnv.from_process_group`` also makes a device mesh over the world's *first* ranks,
    which hangs where groups differ in size; only 2D parallelism and DTensor output use it.
    """
    env = ShardingEnv(replica_group.size(), replica_group.rank(), pg=None)
    env.process_group = replica_group
    return env
