"""What each way to place a table costs the ranks of a pool: its pieces and their rank loads.

W ranks, L of them per node, b samples per rank, f features, D columns of the shard, e bytes per
element on the wire. Wire bytes per peer:

===============  =================================  =====================================
sharding type    ids, sample owner to shard owner   pooled rows, shard owner to sample owner
===============  =================================  =====================================
table/column     all of b samples' ids              b f D e
row-wise         1/W of them                        b f D e from every rank (reduce-scatter)
table-row/grid   1/L of them to each of the node    inside the node b f D e for each rank of the
                                                    pool and peer / L, then b f D e / L across
data-parallel    none                               none; table gradients are all-reduced
===============  =================================  =====================================

Gradients take the way of the pooled rows back.
"""

from __future__ import annotations

from planner.cost.collectives import Fabric, fabric
from planner.cost.context import PoolContext
from planner.cost.elementwise import elementwise_seconds
from planner.cost.load import Piece, RankLoad, Scope
from planner.cost.memory import FETCHED_AHEAD, shard_host_bytes, shard_memory_bytes
from planner.cost.tbe import (
    FLOAT_BYTES,
    ID_BYTES,
    Shard,
    backward_seconds,
    fetch_seconds,
    forward_seconds,
    rates,
)
from planner.specs.device import Topology
from planner.specs.errors import UsageError
from planner.specs.model import ComputeKernel, ShardingType, Table
from planner.specs.units import Dtype

_UVM = (ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING)


def _check(
    ctx: PoolContext,
    table: Table,
    sharding_type: ShardingType,
    kernel: ComputeKernel,
    widths: tuple[int, ...],
    load_factor: float | None,
) -> None:
    """Refuse combinations that TorchRec cannot run.

    Raises:
        UsageError: naming the combination and its cure.
    """
    where = f"table {table.name}"
    if (sharding_type is ShardingType.DATA_PARALLEL) != (kernel is ComputeKernel.DENSE):
        raise UsageError(
            f"{where}: data_parallel goes with the dense kernel and no other",
            field="compute_kernel",
            value=str(kernel),
            fix="use data_parallel with dense, every other sharding type with a fused kernel",
        )
    if (kernel is ComputeKernel.FUSED_UVM_CACHING) != (load_factor is not None):
        raise UsageError(
            f"{where}: cache_load_factor belongs to fused_uvm_caching and only there",
            field="cache_load_factor",
            value=load_factor,
            fix="give it with fused_uvm_caching, and leave it out otherwise",
        )
    if kernel in _UVM and ctx.device.is_cpu:
        raise UsageError(
            f"{where}: a CPU has no device memory to spill from",
            field="compute_kernel",
            value=str(kernel),
            fix="use the fused kernel in CPU pools",
        )
    by_column = sharding_type in (ShardingType.COLUMN_WISE, ShardingType.GRID_SHARD)
    if widths and (not by_column or sum(widths) != table.embedding_dim):
        raise UsageError(
            f"{where}: column_widths do not fit",
            field="column_widths",
            value=widths,
            fix=f"give widths that sum to {table.embedding_dim}, for column_wise or grid_shard",
        )


def option_pieces(
    ctx: PoolContext,
    table: Table,
    sharding_type: ShardingType,
    compute_kernel: ComputeKernel,
    data_type: Dtype,
    column_widths: tuple[int, ...] = (),
    cache_load_factor: float | None = None,
) -> tuple[Piece, ...]:
    """The pieces of one placement option; one per column shard where columns are split.

    Args:
        data_type: of the stored weights.
        column_widths: columns of each shard, left to right; empty means one shard.

    Raises:
        UsageError: a combination that TorchRec cannot run on this device.
    """
    _check(ctx, table, sharding_type, compute_kernel, column_widths, cache_load_factor)
    return tuple(
        _piece(ctx, table, sharding_type, compute_kernel, data_type, columns, cache_load_factor)
        for columns in column_widths or (table.embedding_dim,)
    )


def rows_split(ctx: PoolContext, sharding_type: ShardingType) -> int:
    """Among how many ranks a table's rows are split."""
    if sharding_type is ShardingType.ROW_WISE:
        return ctx.ranks
    if sharding_type in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD):
        return ctx.pool.devices_per_node
    return 1


def _piece(
    ctx: PoolContext,
    table: Table,
    sharding_type: ShardingType,
    kernel: ComputeKernel,
    data_type: Dtype,
    columns: int,
    load_factor: float | None,
) -> Piece:
    replicated = sharding_type is ShardingType.DATA_PARALLEL
    samples = ctx.local_batch if replicated else ctx.pool_batch
    split, features = rows_split(ctx, sharding_type), len(table.feature_names)
    shard = Shard(
        table_rows=table.num_embeddings,
        table_draws=samples * table.pooling,
        row_share=1.0 / split,
        zipf_exponent=table.zipf_exponent,
        bags=samples * features,
        columns=columns,
        element_bytes=data_type.bytes,
        state_floats_per_row=ctx.model.optimizer.sparse.state_floats_per_row(columns),
    )
    speed = rates(ctx.device, ctx.compute_share)
    memory = shard_memory_bytes(ctx, table, sharding_type, kernel, data_type, columns, load_factor)
    host = shard_host_bytes(ctx, table, sharding_type, kernel, data_type, columns)
    fetch_s = 0.0 if load_factor is None else fetch_seconds(shard, speed, load_factor)
    ahead = ctx.policy.prefetch_depth == FETCHED_AHEAD
    work = {
        "lookup_forward_s": forward_seconds(shard, speed, kernel) + (0.0 if ahead else fetch_s),
        "cache_fetch_s": fetch_s if ahead else 0.0,
        "hbm_bytes": float(sum(memory.values())),
        "host_bytes": float(host),
    }
    if replicated:
        return Piece(Scope.POOL, columns, RankLoad(**work, **_data_parallel(ctx, shard)))
    work["lookup_backward_s"] = backward_seconds(shard, speed, kernel)
    ids_per_peer = ctx.local_batch * ID_BYTES * (table.pooling + features) / split
    wire_bytes = ctx.policy.communication_precision.bytes
    pooled_per_peer = ctx.local_batch * features * columns * wire_bytes
    if sharding_type is ShardingType.ROW_WISE:
        load = _row_wise(ctx, ids_per_peer, pooled_per_peer)
        return Piece(Scope.POOL, columns, RankLoad(**work, **load))
    if sharding_type in (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE):
        load, everyone = _rank_wise(ctx, ids_per_peer, pooled_per_peer)
        return Piece(Scope.RANK, columns, RankLoad(**work, **load), RankLoad(**everyone))
    load, everyone = _node_wise(ctx, split, ids_per_peer, pooled_per_peer)
    return Piece(Scope.NODE, columns, RankLoad(**work, **load), RankLoad(**everyone))


Load = dict[str, float]
"""Some components of a ``RankLoad``."""


def _data_parallel(ctx: PoolContext, shard: Shard) -> Load:
    """Dense gradients: zeroed, scattered into, all-reduced, and applied to the whole table.

    The optimizer reads weight, gradient and state and writes weight and state.
    """
    elements = shard.table_rows * shard.columns
    state = shard.state_floats_per_row / shard.columns
    moved = FLOAT_BYTES * elements * (1 + 3 + 2 * state) + 3 * shard.pooled_bytes
    gradient_bytes = elements * FLOAT_BYTES
    scatter_s = fabric(ctx, "all_reduce").scatter_seconds(gradient_bytes)
    return {
        "lookup_backward_s": elementwise_seconds(ctx.device, moved, 2) / ctx.compute_share,
        "table_all_reduce_s": 2 * scatter_s,
    }


def _rank_wise(ctx: PoolContext, ids_per_peer: float, pooled_per_peer: float) -> tuple[Load, Load]:
    """A whole table or column shard on one rank: the owner talks to all, each one to it."""
    paths = fabric(ctx, "all_to_all")
    ids_s, pooled_s = paths.spread_seconds(ids_per_peer), paths.spread_seconds(pooled_per_peer)
    one = _share_of_one_peer(paths)
    return (
        _exchange(ctx, (0.0, ids_s), (pooled_s, 0.0)),
        _exchange(ctx, (ids_s * one, 0.0), (0.0, pooled_s * one)),
    )


def _row_wise(ctx: PoolContext, ids_per_peer: float, pooled_per_peer: float) -> Load:
    """Rows over the whole pool: ids to all, partial sums reduce-scattered over all."""
    ids_s = fabric(ctx, "all_to_all").spread_seconds(ids_per_peer)
    total = pooled_per_peer * ctx.ranks
    scatter_s = fabric(ctx, "reduce_scatter").scatter_seconds(total)
    gather_s = fabric(ctx, "all_gather").scatter_seconds(total)
    load = _exchange(ctx, (ids_s, ids_s), (scatter_s, scatter_s))
    load["gradient_send_s"], load["gradient_receive_s"] = _transfer(ctx, gather_s, gather_s)
    return load


def _node_wise(
    ctx: PoolContext, split: int, ids_per_peer: float, pooled_per_peer: float
) -> tuple[Load, Load]:
    """Rows over one node: reduce-scatter inside it, then each rank's slice to the other nodes."""
    paths = fabric(ctx, "all_to_all")
    inside = fabric(ctx, "reduce_scatter", spanning_nodes=False)
    total = pooled_per_peer * ctx.ranks
    outside_s = (ctx.ranks - split) * pooled_per_peer / split / paths.nic_bytes_per_s
    pooled_s = inside.scatter_seconds(total) + outside_s
    ids_s = paths.spread_seconds(ids_per_peer)
    # Every rank sends its ids to the whole node and receives one slice from each of its ranks.
    one = _share_of_one_peer(paths)
    received_s = paths.spread_seconds(pooled_per_peer) * one
    return (
        _exchange(ctx, (0.0, ids_s), (pooled_s, 0.0)),
        _exchange(ctx, (ids_s * one * split, 0.0), (0.0, received_s)),
    )


def _share_of_one_peer(paths: Fabric) -> float:
    """One peer's part of an exchange with all, in the mean over where that peer may sit."""
    return 1.0 / max(paths.ranks - 1, 1)


def _transfer(ctx: PoolContext, sent_s: float, received_s: float) -> tuple[float, float]:
    """(send, receive) seconds: links are full duplex, a CPU copies both with one core."""
    if ctx.device.scale_up.topology is Topology.HOST:
        return 0.0, sent_s + received_s
    return sent_s, received_s


def _exchange(ctx: PoolContext, ids: tuple[float, float], pooled: tuple[float, float]) -> Load:
    """Load from (send, receive) seconds of ids and of pooled rows; gradients go the other way."""
    input_send_s, input_receive_s = _transfer(ctx, *ids)
    output_send_s, output_receive_s = _transfer(ctx, *pooled)
    gradient_send_s, gradient_receive_s = _transfer(ctx, pooled[1], pooled[0])
    return {
        "input_send_s": input_send_s,
        "input_receive_s": input_receive_s,
        "output_send_s": output_send_s,
        "output_receive_s": output_receive_s,
        "gradient_send_s": gradient_send_s,
        "gradient_receive_s": gradient_receive_s,
    }
