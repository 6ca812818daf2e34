"""Every way to place each table in a pool, with what it costs the pool's ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from planner.cost.context import PoolContext
from planner.cost.embedding import option_pieces
from planner.cost.graph import pool_step_graph
from planner.cost.load import PlacementOption
from planner.cost.memory import base_memory_bytes
from planner.cost.tbe import device_memory_is_faster
from planner.ilp.program import PoolProgram, TableClass
from planner.specs.errors import InfeasibleError
from planner.specs.model import ComputeKernel, ModelSpec, ShardingType, Table
from planner.specs.units import MIB, Dtype

SHARD_COUNTS = (2, 4, 8)
"""Column shards of a table that are considered."""
CACHE_LOAD_FACTORS = (0.05, 0.2, 0.5)
"""Cached shares of the rows that are considered for fused_uvm_caching."""
DATA_PARALLEL_BYTES = 256 * MIB
"""A larger table is never worth a dense all-reduce of all of its rows in every step."""
VECTOR_COLUMNS = 4
"""FBGEMM reads rows in vectors of four columns."""
CPU_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
"""What FBGEMM's CPU kernels can fuse."""

UVM_KERNELS = (ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING)
COLUMN_SPLIT = (ShardingType.COLUMN_WISE, ShardingType.GRID_SHARD)


@dataclass(frozen=True)
class Way:
    """A placement option before its costs are known."""

    sharding_type: ShardingType
    compute_kernel: ComputeKernel
    data_type: Dtype
    column_widths: tuple[int, ...] = ()
    cache_load_factor: float | None = None


def column_splits(width: int, most: int, min_partition: int | None) -> Iterator[tuple[int, ...]]:
    """Widths of 2, 4, 8 … column shards, each a multiple of four.

    Even only, unless ``min_partition`` asks for shards that do not divide the table evenly: then
    as many shards of at least that width as there is room for, as even as multiples of 4 can be.
    """
    for count in SHARD_COUNTS:
        if count > most or width % (count * VECTOR_COLUMNS):
            continue
        if min_partition is None or width // count >= min_partition:
            yield (width // count,) * count
    if min_partition is not None and width % VECTOR_COLUMNS == 0:
        vectors = width // VECTOR_COLUMNS
        count = min(width // min_partition, most)
        if count > 1 and (vectors % count or count not in SHARD_COUNTS):
            narrow, wider = divmod(vectors, count)
            yield tuple(VECTOR_COLUMNS * (narrow + (index < wider)) for index in range(count))


def data_types(model: ModelSpec, table: Table) -> tuple[Dtype, ...]:
    """Weight precisions that both the model and the table's constraints allow.

    Raises:
        InfeasibleError: there is none.
    """
    wanted = table.constraints.data_types
    allowed = tuple(d for d in model.precision.embeddings if wanted is None or d in wanted)
    if not allowed:
        raise InfeasibleError(
            f"table {table.name}: its data_types and the model's precision.embeddings have "
            "nothing in common",
            field="constraints.data_types",
            value=[str(dtype) for dtype in wanted or ()],
            fix=f"allow one of {', '.join(model.precision.embeddings)} for this table",
        )
    return allowed


def ways(ctx: PoolContext, table: Table, spill: bool) -> Iterator[Way]:
    """Placement options that the table, its constraints, the pool and TorchRec allow.

    Args:
        spill: also those that keep rows in host memory though the same with all rows on the device
            is allowed, and no slower.
    """
    limits = table.constraints
    all_on_device = limits.compute_kernels is None or ComputeKernel.FUSED in limits.compute_kernels
    spill = spill or not all_on_device or not device_memory_is_faster(ctx.device)
    kernels = [
        (ComputeKernel.FUSED, None),
        *(((ComputeKernel.FUSED_UVM, None),) if spill and not ctx.device.is_cpu else ()),
        *(
            (ComputeKernel.FUSED_UVM_CACHING, factor)
            for factor in CACHE_LOAD_FACTORS
            if spill and not ctx.device.is_cpu
        ),
    ]
    for data_type in data_types(ctx.model, table):
        for sharding_type, widths in _shardings(ctx, table):
            if limits.sharding_types is not None and sharding_type not in limits.sharding_types:
                continue
            if sharding_type is ShardingType.DATA_PARALLEL:
                candidates = [Way(sharding_type, ComputeKernel.DENSE, data_type)]
            else:
                candidates = [
                    Way(sharding_type, kernel, data_type, widths, factor)
                    for kernel, factor in kernels
                ]
            for way in candidates:
                if limits.compute_kernels is None or way.compute_kernel in limits.compute_kernels:
                    yield way


def _shardings(ctx: PoolContext, table: Table) -> Iterator[tuple[ShardingType, tuple[int, ...]]]:
    """Sharding types that fit the shapes of table and pool, with column widths."""
    nodes, per_node = ctx.pool.nodes, ctx.pool.devices_per_node
    rows, columns = table.num_embeddings, table.embedding_dim
    asked = table.constraints.sharding_types or ()
    yield ShardingType.TABLE_WISE, ()
    for widths in column_splits(columns, ctx.ranks, table.constraints.min_partition):
        yield ShardingType.COLUMN_WISE, widths
    if rows >= ctx.ranks > 1:
        yield ShardingType.ROW_WISE, ()
    # On a single node the rows of one node are the rows of the pool.
    if rows >= per_node and (nodes > 1 or ShardingType.TABLE_ROW_WISE in asked):
        yield ShardingType.TABLE_ROW_WISE, ()
    if rows >= per_node and (nodes > 1 or ShardingType.GRID_SHARD in asked):
        most = nodes if ShardingType.GRID_SHARD not in asked else max(SHARD_COUNTS)
        for widths in column_splits(columns, most, table.constraints.min_partition):
            yield ShardingType.GRID_SHARD, widths
    small = table.parameters * Dtype.FP32.bytes <= DATA_PARALLEL_BYTES
    if (small and ctx.ranks > 1) or ShardingType.DATA_PARALLEL in asked:
        yield ShardingType.DATA_PARALLEL, ()
    if ctx.ranks == 1 and ShardingType.ROW_WISE in asked:
        yield ShardingType.ROW_WISE, ()


def placement_option(ctx: PoolContext, table: Table, way: Way) -> PlacementOption:
    """The option with its pieces."""
    return PlacementOption(
        way.sharding_type,
        way.compute_kernel,
        way.data_type,
        option_pieces(
            ctx,
            table,
            way.sharding_type,
            way.compute_kernel,
            way.data_type,
            way.column_widths,
            way.cache_load_factor,
        ),
        way.cache_load_factor,
    )


def equal_tables(model: ModelSpec) -> list[tuple[Table, ...]]:
    """Tables grouped by everything that costs depend on, in order of first appearance."""
    groups: dict[tuple[object, ...], list[Table]] = {}
    for table in model.all_tables:
        key = (
            table.num_embeddings,
            table.embedding_dim,
            table.pooling_factors,
            table.zipf_exponent,
            table.constraints,
        )
        groups.setdefault(key, []).append(table)
    return [tuple(group) for group in groups.values()]


def _any_way(table: Table, way: Way) -> bool:
    return True


def table_classes(
    ctx: PoolContext, spill: bool, keep: Callable[[Table, Way], bool] = _any_way
) -> tuple[TableClass, ...]:
    """Equal tables with their options; costs are computed once per class.

    Args:
        spill: also options that keep rows in host memory.
        keep: which options to consider.

    Raises:
        InfeasibleError: a table's constraints leave no option in this pool.
    """
    sparse = ctx.model.optimizer.sparse.name
    if ctx.device.is_cpu and sparse not in CPU_OPTIMIZERS:
        raise InfeasibleError(
            f"pool {ctx.pool.name}: FBGEMM has no fused {sparse} for CPUs",
            field="optimizer.sparse.name",
            value=sparse,
            fix=f"use one of {', '.join(CPU_OPTIMIZERS)}, or a GPU pool",
        )
    classes = []
    for group in equal_tables(ctx.model):
        chosen = [way for way in ways(ctx, group[0], spill) if keep(group[0], way)]
        # Constraints may insist on kernels that only the wider space has.
        if not chosen and not spill:
            chosen = [way for way in ways(ctx, group[0], True) if keep(group[0], way)]
        options = tuple(placement_option(ctx, group[0], way) for way in chosen)
        if not options:
            raise InfeasibleError(
                f"table {group[0].name}: its constraints leave no way to place it in pool "
                f"{ctx.pool.name} ({ctx.ranks} x {ctx.device.name})",
                field="constraints",
                value=group[0].constraints.model_dump(mode="json", exclude_none=True),
                fix="allow another sharding type or compute kernel",
            )
        classes.append(TableClass(tuple(table.name for table in group), options))
    return tuple(classes)


def pool_program(
    ctx: PoolContext, spill: bool, classes: tuple[TableClass, ...] | None = None
) -> PoolProgram:
    """The placement program of a pool (of one of its replica groups: they are alike) under a local
    batch and a policy.

    Args:
        spill: also consider keeping rows in host memory. Such options take more time and less
            device memory than their counterparts, so they matter only when memory is short.
        classes: from ``table_classes`` of the sharding group of a context that differs in compute
            precision and recompute alone: tables do not see those.
    """
    base = sum(base_memory_bytes(ctx).values())
    group = ctx.sharding_group
    return PoolProgram(
        graph=pool_step_graph(ctx),
        nodes=group.pool.nodes,
        devices_per_node=group.pool.devices_per_node,
        classes=table_classes(group, spill) if classes is None else classes,
        hbm_room_bytes=float(ctx.hbm_capacity_bytes - base),
        host_room_bytes=float(0 if ctx.device.is_cpu else ctx.host_capacity_bytes),
    )
