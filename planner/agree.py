"""Pools that answer to one another: each is solved anew for the step of the whole job.

By itself a pool knows of the others only when they can reach the bridge at the earliest, and what
it does before the bridge may cost the others more than it saves. So, where the job's step is longer
than that of each pool by itself, one pool after another is solved for the shortest step of the
job, the others as they are, until none shortens it any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.graph import pool_step_graph
from planner.cost.load import COMPONENTS
from planner.cost.step import StepGraph
from planner.crew import Crew
from planner.evaluate import Evaluation, evaluate, pool_loads
from planner.ilp.pool import Goal
from planner.study import Solved

ROUNDS = 3
"""How often every pool answers at most."""
LESS = 1e-9
"""Share of the step by which an answer shortens it at least."""


def evaluated(solved: Sequence[Solved]) -> Evaluation:
    """The job of these pools."""
    return evaluate(
        {one.context.pool.name: one.context for one in solved},
        {one.context.pool.name: one.placements for one in solved},
    )


def agree(
    crew: Crew, solved: Sequence[Solved], evaluation: Evaluation, enough_s: float
) -> tuple[tuple[Solved, ...], Evaluation]:
    """Better answers of the pools, if there are any, and their evaluation.

    Args:
        solved: of each pool by itself, in the crew's order.
        enough_s: a step this short need not get shorter.
    """
    best, unanswered = list(solved), 0
    for _ in range(ROUNDS):
        for index, study in enumerate(crew.studies):
            if evaluation.step_s <= enough_s or unanswered == len(best):
                return tuple(best), evaluation
            others = [_step(one) for i, one in enumerate(best) if i != index]
            goal = Goal(enough_s=enough_s, hopeless_s=evaluation.step_s)
            answer = study.solve_beside(best[index].context.local_batch, others, goal)
            tried = [answer if i == index else one for i, one in enumerate(best)]
            unanswered += 1
            if answer is None:
                continue
            found = evaluated([one for one in tried if one is not None])
            if found.step_s < evaluation.step_s * (1 - LESS):
                best[index], evaluation, unanswered = answer, found, 1
    return tuple(best), evaluation


def _step(solved: Solved) -> StepGraph:
    """A pool's operations, under its placements."""
    loads, _ = pool_loads(solved.context, solved.placements)
    slowest = dict(zip(COMPONENTS, map(float, loads.max(axis=0)), strict=True))
    return pool_step_graph(solved.context).under(slowest)
