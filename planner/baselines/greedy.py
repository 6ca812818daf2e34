"""TorchRec's conventional planner, from its published description, over our costs.

Several proposals (each table's option with the cheapest slowest shard; with the cheapest sum over
shards; one sharding type for all), options rated by the sum of all times; shards placed in
descending order on the rank with the least accumulated time that has room; when something finds no
room, the table that takes most memory moves on to its next cheapest option; the best rated proposal
wins. The naive port makes its placements by it, with the reference device's costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planner.baselines.problem import PoolProblem, least_burdened
from planner.ilp.options import COLUMN_SPLIT
from planner.ilp.program import HBM, TIMES, Assignment, Choice, OptionLoads, PoolProgram
from planner.specs.errors import InfeasibleError
from planner.specs.model import ShardingType, Table
from planner.specs.units import GIB

MIN_PARTITION = 128
"""TorchRec splits no columns below this width unless it is told to."""
CACHE_LOAD_FACTOR = 0.2
"""TorchRec's default share of cached rows."""


def conventional(
    table: Table,
    sharding_type: ShardingType,
    column_widths: Sequence[int],
    cache_load_factor: float | None,
) -> bool:
    """Whether the option is in the default search space of a conventional planner."""
    limits = table.constraints
    split = sharding_type in COLUMN_SPLIT
    if sharding_type is ShardingType.GRID_SHARD and (
        limits.sharding_types is None or ShardingType.GRID_SHARD not in limits.sharding_types
    ):
        return False
    if split and limits.min_partition is None and min(column_widths) < MIN_PARTITION:
        return False
    return cache_load_factor in (None, CACHE_LOAD_FACTOR)


def torchrec_greedy(problem: PoolProblem) -> Assignment:
    """The greedy planner over the conventional options of a pool.

    Raises:
        InfeasibleError: no proposal finds room.
    """
    kept = [
        [
            index
            for index, option in enumerate(group.options)
            if conventional(
                table,
                option.sharding_type,
                [piece.columns for piece in option.pieces],
                option.cache_load_factor,
            )
        ]
        for table, group in zip(problem.tables, problem.program.classes, strict=True)
    ]
    found = greedy(problem.program.keep(kept)) if all(kept) else None
    if found is None:
        raise InfeasibleError(
            f"no proposal finds room for the tables in pool {problem.ctx.pool.name} with "
            f"{problem.program.hbm_room_bytes / GIB:.1f} GiB per rank",
            fix="use more ranks, or fewer or smaller tables",
        )
    return tuple(
        tuple(Choice(indexes[choice.option], choice.places) for choice in row)
        for indexes, row in zip(kept, found, strict=True)
    )


def greedy(program: PoolProgram) -> Assignment | None:
    """The best rated of all proposals; None if none finds room."""
    best: tuple[float, Assignment] | None = None
    for order in _proposals(program):
        found = _partition_with_retries(program, order)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return best[1] if best else None


def _slowest_s(option: OptionLoads) -> float:
    pieces = [float(shard.load[TIMES].sum()) for shard in option.shards]
    return float(option.everywhere[TIMES].sum()) + max(pieces, default=0.0)


def _total_s(option: OptionLoads) -> float:
    return float(option.mean[TIMES].sum())


def _proposals(program: PoolProgram) -> Iterator[list[list[int]]]:
    """Per class, options in the order in which they are tried."""
    for rate in (_slowest_s, _total_s):
        yield [_ascending(loads, rate) for loads in program.loads]
    for sharding_type in ShardingType:
        uniform = [
            [
                o
                for o in _ascending(loads, _slowest_s)
                if group.options[o].sharding_type is sharding_type
            ]
            for group, loads in zip(program.classes, program.loads, strict=True)
        ]
        if all(uniform):
            yield uniform


def _ascending(loads: Sequence[OptionLoads], rate: Callable[[OptionLoads], float]) -> list[int]:
    """Positions of options by ascending rate."""
    rates = [rate(option) for option in loads]
    return sorted(range(len(loads)), key=rates.__getitem__)


def _partition_with_retries(
    program: PoolProgram, order: Sequence[Sequence[int]]
) -> tuple[float, Assignment] | None:
    """Partition; while there is no room, the largest table moves on to its next option."""
    position = [0] * len(order)
    while True:
        chosen = [row[at] for row, at in zip(order, position, strict=True)]
        found = _partition(program, chosen)
        if found is not None:
            return found
        movable = [g for g, row in enumerate(order) if position[g] + 1 < len(row)]
        if not movable:
            return None
        largest = max(
            movable,
            key=lambda g: (program.loads[g][chosen[g]].mean[HBM], -g),
        )
        position[largest] += 1


def _partition(program: PoolProgram, chosen: Sequence[int]) -> tuple[float, Assignment] | None:
    """Shards in descending order of time, each to the rank with least time that has room.

    Returns the rating (the largest sum of times of any rank) and the places.
    """
    everywhere = sum(
        (
            program.loads[g][o].everywhere * len(program.classes[g].tables)
            for g, o in enumerate(chosen)
        ),
        np.zeros_like(program.loads[0][0].everywhere),
    )
    ranks = np.tile(everywhere, (program.ranks, 1))
    if not program.fits(ranks):
        return None
    places = [
        [[0] * len(group.options[o].pieces) for _ in group.tables]
        for group, o in zip(program.classes, chosen, strict=True)
    ]
    shards = sorted(
        (
            (-float(shard.load[TIMES].sum()), g, t, piece, shard.scope, shard.load)
            for g, o in enumerate(chosen)
            for shard in program.loads[g][o].shards
            for t in range(len(program.classes[g].tables))
            for piece in shard.pieces
        ),
        key=lambda item: item[:4],
    )
    for _, g, t, piece, scope, load in shards:
        burden = ranks[:, TIMES].sum(axis=1)
        place = least_burdened(program, ranks, burden, scope, load)
        if place is None:
            return None
        ranks[program.landing(scope, place)] += load
        places[g][t][piece] = place
    assignment = tuple(
        tuple(Choice(o, tuple(one)) for one in rows) for o, rows in zip(chosen, places, strict=True)
    )
    return float(ranks[:, TIMES].sum(axis=1).max()), assignment
