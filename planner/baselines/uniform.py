"""The same sharding for every table, without a look at costs or memory.

``table_wise``: tables dealt to the ranks in turn, in the model's order. ``row_wise``: the rows of
every table over all ranks; a table with fewer rows than ranks is replicated (data-parallel), for
TorchRec would leave ranks without any row of it.
"""

from __future__ import annotations

from planner.baselines.problem import PoolProblem, option_like
from planner.cost.load import Scope
from planner.ilp.program import Assignment, Choice
from planner.specs.model import ShardingType


def table_wise(problem: PoolProblem) -> Assignment:
    """Every table whole on one rank, dealt in turn."""
    return _dealt(problem, (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE))


def row_wise(problem: PoolProblem) -> Assignment:
    """Every table's rows over all ranks; tables with fewer rows replicated."""
    return _dealt(problem, (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL))


def _dealt(problem: PoolProblem, wanted: tuple[ShardingType, ...]) -> Assignment:
    """Options of the wanted sharding; their pieces, if they have a place, to ranks in turn."""
    program = problem.program
    chosen = [option_like(group, wanted) for group in program.classes]
    places = {Scope.POOL: 1, Scope.NODE: program.nodes, Scope.RANK: program.ranks}
    choices: dict[tuple[int, int], Choice] = {}
    dealt = 0
    for g, t in problem.in_order:
        landings = []
        for piece in program.classes[g].options[chosen[g]].pieces:
            landings.append(dealt % places[piece.scope])
            dealt += piece.scope is not Scope.POOL
        choices[g, t] = Choice(chosen[g], tuple(landings))
    return tuple(
        tuple(choices[g, t] for t in range(len(group.tables)))
        for g, group in enumerate(program.classes)
    )
