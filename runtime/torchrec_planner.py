"""TorchRec's own ``EmbeddingShardingPlanner`` on a pool, and its cost model for any placements.

It knows one bandwidth of each kind, no latency, no skew and no dense network, and rates a plan by
the largest sum of its shards' times on any rank. It gets what a careful user would give it: the
profile's bandwidths and the memory that the pool's dense network leaves. Its planner is left at
its defaults otherwise (proposers, partitioner, 20 % caches, no column shard below 128).

Needs torch, torchrec and fbgemm-gpu; no process group, no GPU.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torchrec import EmbeddingBagCollection
from torchrec import optim as torchrec_optim
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    PlannerError,
    Shard,
    ShardingOption,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.planner.utils import build_sharder_data_map, sharder_name
from torchrec.distributed.types import CacheParams, ParameterSharding

from planner.baselines.greedy import CACHE_LOAD_FACTOR
from planner.baselines.league import OtherCost, Placed
from planner.baselines.problem import recipe_type
from planner.baselines.torchrec_costs import torchrec_topology
from planner.cost.context import PoolContext
from planner.shards import extents
from planner.specs.errors import InfeasibleError
from planner.specs.model import ComputeKernel, ShardingType, Table
from planner.specs.plan import Placement, PoolPlan
from planner.specs.units import Dtype
from trainers.models.build import embedding_bags

PER_MS = 1e-3
MODULE = "embeddings"
TABLE_COLUMN_WISE = "table_column_wise"
"""TorchRec's name for column shards that stay inside one node."""

_TORCH_TYPES = {
    Dtype.FP32: torch.float32,
    Dtype.FP16: torch.float16,
    Dtype.BF16: torch.bfloat16,
}
_OPTIMIZERS = {
    "sgd": torchrec_optim.SGD,
    "rowwise_adagrad": torchrec_optim.RowWiseAdagrad,
    "adagrad": torchrec_optim.Adagrad,
    "adam": torchrec_optim.Adam,
}


def torchrec_placements(ctx: PoolContext, time_limit_s: float) -> Placed:
    """Where TorchRec's planner puts the tables of a pool, in the recipe's weight precision.

    Args:
        time_limit_s: it makes no new proposal after that.

    Raises:
        InfeasibleError: it finds no plan.
    """
    start_s = time.monotonic()
    placements = _Pool(ctx).placements(time_limit_s)
    took_s = time.monotonic() - start_s
    stopped = f"stopped after {time_limit_s:.0f} s" if took_s > time_limit_s else ""
    return Placed(placements, stopped)


def torchrec_cost(ctx: PoolContext, pool: PoolPlan) -> OtherCost:
    """A pool's placements under TorchRec's perf and storage estimators."""
    return _Pool(ctx).cost(pool)


@contextmanager
def _quietly() -> Iterator[None]:
    """TorchRec warns on the root logger of every data-parallel table, of which it plans many."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class _Pool:
    """A pool in TorchRec's words."""

    def __init__(self, ctx: PoolContext) -> None:
        self.ctx = ctx.sharding_group
        self.tables = ctx.model.all_tables
        self.sharder = EmbeddingBagCollectionSharder()

    @cached_property
    def topology(self) -> Topology:
        """``planner.baselines.torchrec_costs`` in TorchRec's words; bandwidths in bytes per ms."""
        of = torchrec_topology(self.ctx)
        return TopologyFactory.create_topology(
            TrainerConfig(world_size=of.ranks, local_world_size=of.node_ranks),
            HardwareConfig(
                hbm_cap_bytes=of.hbm_room_bytes,
                ddr_cap_bytes=of.host_room_bytes,
                ssd_cap_bytes=0,
                intra_host_bw=of.node_bytes_per_s * PER_MS,
                inter_host_bw=of.nic_bytes_per_s * PER_MS,
                hbm_mem_bw=of.hbm_bytes_per_s * PER_MS,
                ddr_mem_bw=of.host_bytes_per_s * PER_MS if of.on_cpu else None,
                hbm_to_ddr_mem_bw=of.link_bytes_per_s * PER_MS,
            ),
            KernelConfig(
                compute_device="cpu" if of.on_cpu else "cuda",
                use_hardware_based_bandwidth=True,
            ),
        )

    @cached_property
    def constraints(self) -> dict[str, ParameterConstraints]:
        """Pooling factors, and what the model file says of a table."""
        return {
            table.name: ParameterConstraints(
                sharding_types=_sharding_types(table),
                compute_kernels=_kernels(table),
                min_partition=table.constraints.min_partition,
                pooling_factors=list(table.pooling_factors),
            )
            for table in self.tables
        }

    @cached_property
    def module(self) -> EmbeddingBagCollection:
        """The tables on ``meta``, marked with the optimizer that is fused into their backward."""
        recipe = {table.name: recipe_type(self.ctx.model, table) for table in self.tables}
        module = embedding_bags(self.tables, recipe)
        for parameter in module.parameters():
            self._mark(parameter)
        return module

    def _mark(self, tensor: torch.Tensor) -> None:
        """As ``apply_optimizer_in_backward`` does; TorchRec's storage estimator reads it."""
        optimizer = _OPTIMIZERS[self.ctx.model.optimizer.sparse.name]
        tensor._optimizer_classes = [optimizer]  # type: ignore[attr-defined]

    def placements(self, time_limit_s: float) -> dict[str, Placement]:
        planner = EmbeddingShardingPlanner(
            topology=self.topology,
            batch_size=self.ctx.local_batch,
            # The room of the topology is what is left already.
            storage_reservation=FixedPercentageStorageReservation(0.0),
            constraints=self.constraints,
            stats=NoopEmbeddingStats(),
            debug=False,
            timeout_seconds=math.ceil(time_limit_s),
        )
        holder = torch.nn.Module()
        holder.add_module(MODULE, self.module)
        try:
            with _quietly():
                plan = planner.plan(holder, [self.sharder])
        except (PlannerError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InfeasibleError(
                f"TorchRec's planner, pool {self.ctx.pool.name}: {reason}",
                fix="use more ranks or a smaller batch",
            ) from None
        found = plan.plan[MODULE]
        return {
            table.name: _placement(
                found[table.name], recipe_type(self.ctx.model, table), self.ctx.ranks
            )
            for table in self.tables
        }

    def cost(self, pool: PoolPlan) -> OtherCost:
        options = [self._option(table, pool) for table in self.tables]
        data = build_sharder_data_map({sharder_name(EmbeddingBagCollection): self.sharder})
        for estimator in (EmbeddingPerfEstimator, EmbeddingStorageEstimator):
            estimator(self.topology, self.constraints).estimate(options, data)
        times = [0.0] * self.ctx.ranks
        stored = [(0, 0)] * self.ctx.ranks
        for shard in (shard for option in options for shard in option.shards):
            times[shard.rank] += shard.perf.total
            hbm, ddr = stored[shard.rank]
            stored[shard.rank] = hbm + shard.storage.hbm, ddr + shard.storage.ddr
        fits = all(
            hbm <= device.storage.hbm and ddr <= device.storage.ddr
            for (hbm, ddr), device in zip(stored, self.topology.devices, strict=True)
        )
        return OtherCost(step_ms=max(times), fits=fits)

    def _option(self, table: Table, pool: PoolPlan) -> ShardingOption:
        placement = pool.placements[table.name]
        tensor = torch.empty(
            (table.num_embeddings, table.embedding_dim),
            dtype=_TORCH_TYPES[placement.data_type],
            device="meta",
        )
        self._mark(tensor)
        factor = placement.cache_load_factor
        kind = placement.sharding_type.value
        return ShardingOption(
            name=table.name,
            tensor=tensor,
            module=(MODULE, self.module),
            input_lengths=list(table.pooling_factors),
            batch_size=self.ctx.local_batch,
            sharding_type=kind,
            partition_by=get_partition_by_type(kind),
            compute_kernel=placement.compute_kernel.value,
            shards=list(_shards(table, placement, pool)),
            cache_params=None if factor is None else CacheParams(load_factor=factor),
            is_pooled=True,
        )


def _sharding_types(table: Table) -> list[str] | None:
    limits = table.constraints.sharding_types
    if limits is None:
        return None
    names = [kind.value for kind in limits]
    return [*names, TABLE_COLUMN_WISE] if ShardingType.COLUMN_WISE in limits else names


def _kernels(table: Table) -> list[str]:
    """Those that a plan can name; TorchRec has others."""
    return [kernel.value for kernel in table.constraints.compute_kernels or ComputeKernel]


def _shards(table: Table, placement: Placement, pool: PoolPlan) -> Iterator[Shard]:
    if placement.sharding_type is ShardingType.DATA_PARALLEL:
        size = [table.num_embeddings, table.embedding_dim]
        for rank in placement.ranks:
            yield Shard(size=size, offset=[0, 0], rank=rank)
    for part in extents(table, placement, pool):
        yield Shard(size=[part.rows, part.columns], offset=[part.row, part.column], rank=part.rank)


def _placement(found: ParameterSharding, data_type: Dtype, ranks: int) -> Placement:
    """TorchRec's sharding of a table in the plan's words."""
    kind = found.sharding_type
    widths: tuple[int, ...] = ()
    if kind == ShardingType.DATA_PARALLEL.value:
        return Placement(
            sharding_type=ShardingType.DATA_PARALLEL,
            compute_kernel=ComputeKernel.DENSE,
            data_type=data_type,
            ranks=tuple(range(ranks)),
        )
    columns = _column_widths(found.sharding_spec.shards)
    if kind in (ShardingType.COLUMN_WISE.value, TABLE_COLUMN_WISE):
        # One column shard is a whole table.
        kind = ShardingType.COLUMN_WISE if len(columns) > 1 else ShardingType.TABLE_WISE
        widths = columns if len(columns) > 1 else ()
    elif kind == ShardingType.GRID_SHARD.value:
        widths = columns
    kernel = ComputeKernel(found.compute_kernel)
    cached = kernel is ComputeKernel.FUSED_UVM_CACHING
    factor = found.cache_params.load_factor if found.cache_params else None
    return Placement(
        sharding_type=ShardingType(kind),
        compute_kernel=kernel,
        data_type=data_type,
        ranks=tuple(found.ranks),
        column_widths=widths,
        cache_load_factor=(factor or CACHE_LOAD_FACTOR) if cached else None,
    )


def _column_widths(shards: Sequence[Any]) -> tuple[int, ...]:
    """Widths of the column shards, left to right (each may be cut by rows as well)."""
    by_column = groupby(shards, key=lambda shard: int(shard.shard_offsets[1]))
    return tuple(int(next(group).shard_sizes[1]) for _, group in by_column)
