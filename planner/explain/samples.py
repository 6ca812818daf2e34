"""Batches and placements carried over to other numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping

from planner.cost.context import PoolContext
from planner.specs.model import ShardingType
from planner.specs.plan import Placement
from planner.splits import SplitSpace

WHOLE_POOL = (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)
WHOLE_NODE = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)


def shared_out(
    global_batch: int, ranks: Mapping[str, int], like: Mapping[str, int]
) -> dict[str, int] | None:
    """A split of the batch with local batches in the proportions of ``like``; None if none is."""
    space = SplitSpace(tuple(ranks.values()), global_batch)
    box = space.root
    if box is None:
        return None
    whole = sum(count * like[name] for name, count in ranks.items())
    found = space.nearest(box, [like[name] * global_batch / whole for name in ranks])
    return dict(zip(ranks, found, strict=True)) if found else None


def on_more_nodes(ctx: PoolContext, placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """Placements where they were, in a pool with more nodes: what lies on all ranks lies on all."""
    every = tuple(range(ctx.sharding_group.ranks))
    return {
        table: placement.model_copy(update={"ranks": every})
        if placement.sharding_type in WHOLE_POOL
        else placement
        for table, placement in placements.items()
    }


def in_one_group(ctx: PoolContext, placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """One copy of the tables instead of one per replica group.

    Tables in turn go to the ranks that a group after the other has for them; what lies on all ranks
    of a group lies on all of the pool, and on part of a node on the whole node.
    """
    group = ctx.sharding_group
    size, per_node = group.ranks, ctx.pool.devices_per_node
    moved: dict[str, Placement] = {}
    for turn, (table, placement) in enumerate(placements.items()):
        first = turn % ctx.replica_groups * size
        ranks = tuple(first + rank for rank in placement.ranks)
        if placement.sharding_type in WHOLE_POOL:
            ranks = tuple(range(ctx.ranks))
        elif placement.sharding_type in WHOLE_NODE and group.pool.devices_per_node < per_node:
            pieces = max(len(placement.column_widths), 1)
            node = first // per_node * per_node
            ranks = tuple(range(node, node + per_node)) * pieces
        moved[table] = placement.model_copy(update={"ranks": ranks})
    return moved
