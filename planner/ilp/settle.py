"""Of the placements whose step is equally short, one that spends little time on tables.

Where the host, the dense network or the bridge decides the step, most placements have the same one,
and the programs stop at the first. The tie is broken by the *table time*

    sum over operations with loads of max over their components of L[c]

that is, the end of a graph of these operations alone, one after another. It is lowered by the same
programs: those operations are appended to the step graph, where the first starts no earlier than
the step that must not get longer, so that the end is

    max(limit, step) + table time.

An answer with a longer step is refused.
"""

from __future__ import annotations

import math
from dataclasses import replace

from planner.cost.step import Operation, StepGraph
from planner.ilp.balance import balance
from planner.ilp.pool import Goal, solve_pool
from planner.ilp.program import Assignment, Floats, PoolProgram, StepTimes
from planner.ilp.solve import SolverOptions

PREFIX = "tables:"
"""Of the names of appended operations."""
SAME = 1e-9
"""Steps closer than this (relative) are equal."""
LESS = 1e-3
"""Table time must fall by this share to be worth another placement."""


def table_operations(graph: StepGraph) -> tuple[Operation, ...]:
    """The operations with loads, without fixed seconds, one after another."""
    return tuple(
        Operation(PREFIX + operation.name, "compute", loads=operation.loads)
        for operation in graph.operations
        if operation.loads
    )


def table_s(graph: StepGraph, loads: Floats) -> float:
    """Table time under the ranks' loads, shape [ranks, C]; seconds."""
    return float(StepTimes(StepGraph(table_operations(graph)), {}).step_s(loads.max(axis=0)))


def rank_table_s(graph: StepGraph, loads: Floats) -> Floats:
    """Table time of each rank by itself, shape [ranks]; seconds."""
    return StepTimes(StepGraph(table_operations(graph)), {}).step_s(loads)


def settle(
    program: PoolProgram, assignment: Assignment, options: SolverOptions
) -> tuple[PoolProgram, Assignment] | None:
    """A placement with less table time and no longer a step, among the options of the program
    returned with it; None if none was found.

    Args:
        options: an aggregate program is solved under them, and rounded and balanced. Where that
            does not do, the given placement is balanced.
    """
    loads = program.rank_loads(assignment)
    limit_s, before_s = program.step_s(loads), table_s(program.graph, loads)
    longer = _appended(program, limit_s)

    def time_of(candidate: tuple[PoolProgram, Assignment]) -> float:
        new = candidate[0].rank_loads(candidate[1])
        kept = program.fits(new) and program.step_s(new) <= limit_s * (1 + SAME)
        return table_s(program.graph, new) if kept else math.inf

    solution = solve_pool(longer, options, goal=Goal(quick=True))
    # Of the table time of placements whose step is no longer.
    bound_s = max(solution.bound_s - limit_s, 0.0)
    if before_s <= bound_s * (1 + options.mip_gap):
        return None
    candidates = []
    if solution.program is not None and solution.assignment is not None:
        candidates.append((solution.program, solution.assignment))
    if not candidates or time_of(candidates[0]) > bound_s * (1 + options.mip_gap):
        enough_s = limit_s + bound_s * (1 + options.mip_gap)
        candidates.append((longer, balance(longer, assignment, enough_s, math.inf)))
    best = min(candidates, key=time_of)
    return best if time_of(best) <= before_s * (1 - LESS) else None


def _appended(program: PoolProgram, limit_s: float) -> PoolProgram:
    """The program with its operations on tables once more at the end, from ``limit_s`` on."""
    first, *rest = table_operations(program.graph)
    everything = tuple(operation.name for operation in program.graph.operations)
    tail = (replace(first, after=everything), *rest)
    return program.under(
        StepGraph((*program.graph.operations, *tail)),
        {**program.not_before, first.name: limit_s},
    )
