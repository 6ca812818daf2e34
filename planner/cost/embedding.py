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

from dataclasses import replace

from planner.cost.collectives import Fabric, fabric
from planner.cost.context import PoolContext
from planner.cost.elementwise import elementwise_seconds
from planner.cost.load import Piece, RankLoad, Scope
from planner.cost.memory import shard_host_bytes, shard_memory_bytes
from planner.cost.tbe import (
    FLOAT_BYTES,
    ID_BYTES,
    Shard,
    backward_seconds,
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
    split = rows_split(ctx, sharding_type)
    shard = Shard(
        table_rows=table.num_embeddings,
        table_draws=samples * table.pooling,
        row_share=1.0 / split,
        zipf_exponent=table.zipf_exponent,
        bags=samples * len(table.feature_names),
        columns=columns,
        element_bytes=data_type.bytes,
        state_floats_per_row=ctx.model.optimizer.sparse.state_floats_per_row(columns),
    )
    device_rates = rates(ctx.device, ctx.compute_share)
    memory = shard_memory_bytes(ctx, table, sharding_type, kernel, data_type, columns, load_factor)
    owner = RankLoad(
        lookup_forward_s=forward_seconds(shard, device_rates, kernel, load_factor),
        hbm_bytes=float(sum(memory.values())),
        host_bytes=float(shard_host_bytes(ctx, table, sharding_type, kernel, data_type, columns)),
    )
    if replicated:
        return Piece(Scope.POOL, columns, _data_parallel(ctx, shard, owner))
    owner = replace(owner, lookup_backward_s=backward_seconds(shard, device_rates, kernel))
    ids_per_peer = ctx.local_batch * ID_BYTES * (table.pooling + len(table.feature_names)) / split
    pooled_per_peer = (
        ctx.local_batch
        * len(table.feature_names)
        * columns
        * ctx.policy.communication_precision.bytes
    )
    if sharding_type is ShardingType.ROW_WISE:
        load = _row_wise(ctx, ids_per_peer, pooled_per_peer)
        return Piece(Scope.POOL, columns, owner + load)
    if split > 1:
        load, everyone = _node_wise(ctx, split, ids_per_peer, pooled_per_peer)
        return Piece(Scope.NODE, columns, owner + load, everyone)
    load, everyone = _rank_wise(ctx, ids_per_peer, pooled_per_peer)
    scope = Scope.RANK if sharding_type in _RANK_SCOPED else Scope.NODE
    return Piece(scope, columns, owner + load, everyone)


_RANK_SCOPED = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE)


def _data_parallel(ctx: PoolContext, shard: Shard, owner: RankLoad) -> RankLoad:
    """Dense gradients: zeroed, scattered into, all-reduced, and applied to the whole table.

    The optimizer reads weight, gradient and state and writes weight and state.
    """
    elements = shard.table_rows * shard.columns
    state = ctx.model.optimizer.sparse.state_floats_per_row(shard.columns) / shard.columns
    moved = FLOAT_BYTES * elements * (1 + 3 + 2 * state) + 3 * shard.pooled_bytes
    gradient_bytes = elements * FLOAT_BYTES
    paths = fabric(ctx, "all_reduce")
    seconds = 0.0 if ctx.ranks == 1 else 2 * paths.scatter_seconds(gradient_bytes)
    return replace(
        owner,
        lookup_backward_s=elementwise_seconds(ctx.device, moved, 2) / ctx.compute_share,
        table_all_reduce_s=seconds,
    )


def _transfer(ctx: PoolContext, sent_s: float, received_s: float) -> tuple[float, float]:
    """(send, receive) seconds: links are full duplex, a CPU copies both with one core."""
    if ctx.device.scale_up.topology is Topology.HOST:
        return 0.0, sent_s + received_s
    return sent_s, received_s


def _one_peer_seconds(paths: Fabric, bytes_per_peer: float) -> float:
    """A rank's mean time on its links to exchange ``bytes_per_peer`` with one other rank.

    The mean over where that rank may sit: in the same node or outside it.
    """
    return 0.0 if paths.ranks == 1 else paths.spread_seconds(bytes_per_peer) / (paths.ranks - 1)


def _rank_wise(
    ctx: PoolContext, ids_per_peer: float, pooled_per_peer: float
) -> tuple[RankLoad, RankLoad]:
    """A whole table or column shard on one rank: the owner talks to all, each one to it."""
    paths = fabric(ctx, "all_to_all")
    ids_s, pooled_s = paths.spread_seconds(ids_per_peer), paths.spread_seconds(pooled_per_peer)
    one_ids_s = _one_peer_seconds(paths, ids_per_peer)
    one_pooled_s = _one_peer_seconds(paths, pooled_per_peer)
    return _exchange(ctx, (0.0, ids_s), (pooled_s, 0.0)), _exchange(
        ctx, (one_ids_s, 0.0), (0.0, one_pooled_s)
    )


def _row_wise(ctx: PoolContext, ids_per_peer: float, pooled_per_peer: float) -> RankLoad:
    """Rows over the whole pool: ids to all, partial sums reduce-scattered over all."""
    ids_s = fabric(ctx, "all_to_all").spread_seconds(ids_per_peer)
    scatter = fabric(ctx, "reduce_scatter")
    gather = fabric(ctx, "all_gather")
    total = pooled_per_peer * ctx.ranks
    load = _exchange(ctx, (ids_s, ids_s), (scatter.scatter_seconds(total),) * 2)
    send_s, receive_s = _transfer(ctx, *(gather.scatter_seconds(total),) * 2)
    return replace(load, gradient_send_s=send_s, gradient_receive_s=receive_s)


def _node_wise(
    ctx: PoolContext, split: int, ids_per_peer: float, pooled_per_peer: float
) -> tuple[RankLoad, RankLoad]:
    """Rows over one node: reduce-scatter inside it, then each rank's slice to the other nodes."""
    paths = fabric(ctx, "all_to_all")
    inside = fabric(ctx, "reduce_scatter", spanning_nodes=False)
    total = pooled_per_peer * ctx.ranks
    outside = (ctx.ranks - split) * pooled_per_peer / split / paths.nic_bytes_per_s
    pooled_s = inside.scatter_seconds(total) + outside
    ids_s = paths.spread_seconds(ids_per_peer)
    # Every rank sends its ids to the whole node and receives one slice from each of its ranks.
    one_ids_s = split * _one_peer_seconds(paths, ids_per_peer)
    one_pooled_s = _one_peer_seconds(paths, pooled_per_peer)
    return _exchange(ctx, (0.0, ids_s), (pooled_s, 0.0)), _exchange(
        ctx, (one_ids_s, 0.0), (0.0, one_pooled_s)
    )


def _exchange(ctx: PoolContext, ids: tuple[float, float], pooled: tuple[float, float]) -> RankLoad:
    """Load from (send, receive) seconds of ids and of pooled rows; gradients go the other way."""
    input_send_s, input_receive_s = _transfer(ctx, *ids)
    output_send_s, output_receive_s = _transfer(ctx, *pooled)
    gradient_send_s, gradient_receive_s = _transfer(ctx, pooled[1], pooled[0])
    return RankLoad(
        input_send_s=input_send_s,
        input_receive_s=input_receive_s,
        output_send_s=output_send_s,
        output_receive_s=output_receive_s,
        gradient_send_s=gradient_send_s,
        gradient_receive_s=gradient_receive_s,
    )
