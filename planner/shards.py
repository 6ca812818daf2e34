"""Where the shards of a placement lie, and what TorchRec asks of placements without saying so.

Ranks are counted inside the replica group, which is the pool where there is only one. Neither
torch nor TorchRec is needed here: the trainer makes TorchRec's objects of these rectangles,
``planner.interchange`` writes them to files.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from planner.specs.errors import SpecError
from planner.specs.model import ComputeKernel, ShardingType, Table
from planner.specs.plan import Placement, Plan, PoolPlan

COLUMN_MULTIPLE = 4
"""FBGEMM's vector width: a column shard of another width is refused by its kernels."""


@dataclass(frozen=True)
class Extent:
    """Rectangle of a table that one rank of a replica group holds."""

    rank: int
    row: int
    rows: int
    column: int
    columns: int


def extents(table: Table, placement: Placement, pool: PoolPlan) -> tuple[Extent, ...]:
    """Every shard of a table, in TorchRec's order; empty for a data-parallel table.

    Rows are cut into blocks of ceil(rows / ranks): TorchRec routes ids by that block size, so any
    other cut would train wrongly without an error. The last blocks may be short or empty.
    """
    kind, ranks = placement.sharding_type, placement.ranks
    rows, columns = table.num_embeddings, table.embedding_dim
    if kind is ShardingType.DATA_PARALLEL:
        return ()
    if kind in (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE):
        widths = placement.column_widths or (columns,)
        starts = (0, *accumulate(widths))
        return tuple(
            Extent(rank, 0, rows, start, width)
            for rank, start, width in zip(ranks, starts, widths, strict=False)
        )
    grid = kind is ShardingType.GRID_SHARD
    widths = placement.column_widths if grid else (columns,)
    group = len(ranks) // len(widths)
    block = -(-rows // group)
    return tuple(
        Extent(
            ranks[part * group + index],
            min(index * block, rows),
            max(0, min(block, rows - index * block)),
            start,
            width,
        )
        for part, (start, width) in enumerate(zip((0, *accumulate(widths)), widths, strict=False))
        for index in range(group)
    )


def check_placements(plan: Plan, pool_name: str) -> None:
    """Refuse what TorchRec would reject late, or run wrongly.

    Raises:
        SpecError: naming pool, table and rule.
    """
    pool = plan.pools[pool_name]
    tables = {table.name: table for table in plan.model.all_tables}

    def refuse(name: str, problem: str, value: object) -> SpecError:
        return SpecError(
            problem,
            field=f"pools.{pool_name}.placements.{name}",
            value=value,
            fix="make the plan again with hwplan plan",
        )

    for name in sorted(set(tables) ^ set(pool.placements)):
        state = "has no placement" if name in tables else "is not a table of the model"
        raise refuse(name, f"table {name} {state}", name)
    for name, placement in pool.placements.items():
        wrong = _broken_rule(tables[name], placement, pool)
        if wrong:
            raise refuse(name, wrong, placement.model_dump(mode="json"))
    row_wise = [
        tables[name].num_embeddings
        for name, placement in pool.placements.items()
        if placement.sharding_type is ShardingType.ROW_WISE
    ]
    if row_wise and max(row_wise) <= -(-max(row_wise) // pool.group_ranks) * (pool.group_ranks - 1):
        raise refuse("*", "the last rank holds no row of any row-wise table", max(row_wise))


def _broken_rule(table: Table, placement: Placement, pool: PoolPlan) -> str:
    """What is wrong with one placement, or nothing."""
    kind, ranks, node = placement.sharding_type, placement.ranks, pool.group_devices_per_node
    everyone = tuple(range(pool.group_ranks))
    if max(ranks) >= pool.group_ranks:
        group = "pool" if pool.replica_groups == 1 else "replica group"
        return f"rank {max(ranks)} is not in a {group} of {pool.group_ranks}"
    if (kind is ShardingType.DATA_PARALLEL) != (placement.compute_kernel is ComputeKernel.DENSE):
        return "kernel dense belongs to data_parallel tables and only to them"
    split = kind in (ShardingType.COLUMN_WISE, ShardingType.GRID_SHARD)
    if split != bool(placement.column_widths):
        return "column_widths belong to column_wise and grid_shard and only to them"
    if split:
        if sum(placement.column_widths) != table.embedding_dim:
            return f"column_widths do not add up to {table.embedding_dim}"
        if any(width % COLUMN_MULTIPLE for width in placement.column_widths):
            return f"column_widths must be multiples of {COLUMN_MULTIPLE}"
    if kind is ShardingType.TABLE_WISE and len(ranks) != 1:
        return "a table_wise table lives on one rank"
    if kind is ShardingType.COLUMN_WISE and len(ranks) != len(placement.column_widths):
        return "column_wise needs one rank per column shard"
    if kind in (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL) and ranks != everyone:
        return f"{kind} uses all ranks of the pool, in order"
    if kind in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD):
        groups = [ranks[start : start + node] for start in range(0, len(ranks), node)]
        if any(g != tuple(range(g[0], g[0] + node)) or g[0] % node for g in groups):
            return f"{kind} uses whole nodes of {node} ranks, in order"
        if len(groups) != max(1, len(placement.column_widths)):
            return f"{kind} needs one node per column shard"
    return ""
