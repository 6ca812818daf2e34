"""Table-wise, one number balanced: tables in descending order, each to the rank with least of it.

The greedy heuristics that AutoShard (Zha et al., KDD 2022) and NeuroShard (MLSys 2023) compare
with. ``size_balanced``: rows x columns. ``lookup_balanced``: columns x ids per sample. A rank
without room for a table is passed over.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.baselines.problem import PoolProblem, least_burdened, no_room, option_like
from planner.ilp.program import Assignment, Choice
from planner.specs.model import ShardingType, Table


def size_balanced(problem: PoolProblem) -> Assignment:
    """Balances parameters.

    Raises:
        InfeasibleError: a table finds no rank with room.
    """
    return _balanced(problem, lambda table: float(table.parameters))


def lookup_balanced(problem: PoolProblem) -> Assignment:
    """Balances looked-up elements per sample.

    Raises:
        InfeasibleError: a table finds no rank with room.
    """
    return _balanced(problem, lambda table: table.embedding_dim * table.pooling)


def _balanced(problem: PoolProblem, cost: Callable[[Table], float]) -> Assignment:
    """Pieces of one table share its cost; equal costs keep the model's order."""
    program = problem.program
    wanted = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE)
    chosen = [option_like(group, wanted) for group in program.classes]
    options = [loads[o] for loads, o in zip(program.loads, chosen, strict=True)]
    ranks = np.zeros((program.ranks, len(options[0].everywhere)))
    for g, group in enumerate(program.classes):
        ranks += options[g].everywhere * len(group.tables)
    burden = np.zeros(program.ranks)
    choices: dict[tuple[int, int], Choice] = {}
    for g, t in sorted(problem.in_order, key=lambda place: -cost(problem.tables[place[0]])):
        places = [0] * len(program.classes[g].options[chosen[g]].pieces)
        for shard in options[g].shards:
            for piece in shard.pieces:
                place = least_burdened(program, ranks, burden, shard.scope, shard.load)
                if place is None:
                    raise no_room(problem, program.classes[g].tables[t], shard.load, ranks)
                places[piece] = place
                landing = program.landing(shard.scope, place)
                ranks[landing] += shard.load
                burden[landing] += cost(problem.tables[g]) / len(places)
        choices[g, t] = Choice(chosen[g], tuple(places))
    return tuple(
        tuple(choices[g, t] for t in range(len(group.tables)))
        for g, group in enumerate(program.classes)
    )
