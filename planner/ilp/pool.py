"""Solve the placement program of one pool: bound, rounding, exact solution where it pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.cost.load import Scope
from planner.ilp.bounds import SAFETY, lean, time_unit_s, without_hopeless
from planner.ilp.formulation import aggregate, exact
from planner.ilp.program import Assignment, PoolProgram
from planner.ilp.rounding import improve, round_to_ranks
from planner.ilp.solve import SolverOptions, Status, run

EXACT_PLACES = 600
"""Integer variables up to which the exact formulation is tried when rounding leaves a gap."""
EXACT_NODES = 2000
"""Its limit of branch-and-bound nodes."""
ROOM_SHARES = (1.0, 0.95, 0.85, 0.7)
"""Shares of the room that the aggregate formulation may fill, until rounding succeeds."""


@dataclass(frozen=True)
class Found:
    """A placement and its step."""

    program: PoolProgram
    assignment: Assignment
    step_s: float


@dataclass(frozen=True)
class PoolSolution:
    """``assignment`` chooses among the options of ``program``; both are None without a solution.

    ``status`` ``infeasible``: proven to have none; ``unknown``: none was found.
    """

    program: PoolProgram | None
    assignment: Assignment | None
    step_s: float
    bound_s: float
    status: Status

    @property
    def gap(self) -> float:
        """(step - bound) / bound."""
        return self.step_s / self.bound_s - 1 if self.bound_s > 0 else 0.0


INFEASIBLE = PoolSolution(None, None, float("inf"), float("inf"), "infeasible")


def solve_pool(
    program: PoolProgram | None,
    options: SolverOptions,
    wider: Callable[[], PoolProgram | None] | None = None,
) -> PoolSolution:
    """The shortest step of one pool, with a proven bound.

    1. Ignoring memory, over the options that are best then: a bound for every placement.
    2. Round it. If it fits and is within the gap, done.
    3. Otherwise with memory and every option that is not dominated.
    4. If that leaves a gap too and the pool is small, the exact formulation.

    Args:
        program: None if some table has no option that fits.
        wider: the program with options that take more time and less memory than those of
            ``program``; asked for only when step 2 does not do.
    """
    bound_s, best = 0.0, None
    usable = None if program is None else without_hopeless(program)
    if usable is not None:
        best, bound_s = _bound_and_round(lean(usable), False, 0.0, options)
        if best is not None and best.step_s <= bound_s * (1 + options.mip_gap):
            return _finished(best, bound_s, options)
    if wider is not None:
        widest = wider()
        usable = None if widest is None else without_hopeless(widest)
    if usable is None:
        return INFEASIBLE
    again, bound_s = _bound_and_round(usable, True, bound_s, options)
    best = _better(best, again)
    if best is None or best.step_s > bound_s * (1 + options.mip_gap):
        exactly, bound_s = _exactly(usable, bound_s, options)
        best = _better(best, exactly)
    if bound_s == float("inf"):
        return INFEASIBLE
    return _finished(best, bound_s, options)


def _better(one: Found | None, other: Found | None) -> Found | None:
    if one is None or other is None:
        return one or other
    return other if other.step_s < one.step_s else one


def _finished(best: Found | None, bound_s: float, options: SolverOptions) -> PoolSolution:
    if best is None:
        return PoolSolution(None, None, float("inf"), bound_s, "unknown")
    bound_s = min(bound_s, best.step_s)
    proven = best.step_s <= bound_s * (1 + options.mip_gap) * (1 + 1e-9)
    status: Status = "optimal" if proven else "feasible"
    return PoolSolution(best.program, best.assignment, best.step_s, bound_s, status)


def _bound_and_round(
    program: PoolProgram, memory: bool, bound_s: float, options: SolverOptions
) -> tuple[Found | None, float]:
    """A placement, if rounding finds one, and the aggregate formulation's bound.

    Largest-first may find no room for a solution that fits on average: then once more with less
    room on average.
    """
    finer = replace(options, mip_gap=options.mip_gap / 4)
    best_bound_s = bound_s
    for share in ROOM_SHARES if memory else (1.0,):
        tighter = program.with_room(share)
        form = aggregate(tighter, time_unit_s(program), memory)
        outcome = run(form.problem, finer)
        if share == 1.0:
            best_bound_s = max(bound_s, outcome.bound * form.unit_s * SAFETY)
        if not outcome.found:
            break
        rounded = round_to_ranks(program, form.counts())
        if rounded is not None:
            better = improve(program, rounded, best_bound_s, options.mip_gap)
            step_s = program.step_s(program.rank_loads(better))
            return Found(program, better, step_s), best_bound_s
    return None, best_bound_s


def _exactly(
    program: PoolProgram, bound_s: float, options: SolverOptions
) -> tuple[Found | None, float]:
    """The exact formulation's answer where it is small enough to solve."""
    places = sum(
        program.nodes if shard.scope is Scope.NODE else program.ranks
        for loads in program.loads
        for option in loads
        for shard in option.shards
    )
    if places > EXACT_PLACES:
        return None, bound_s
    form = exact(program, time_unit_s(program))
    outcome = run(form.problem, replace(options, max_nodes=EXACT_NODES))
    bound_s = max(bound_s, outcome.bound * form.unit_s * SAFETY)
    if not outcome.found:
        return None, bound_s
    found = form.assignment()
    loads = program.rank_loads(found)
    # The solver's tolerance may let a rank be overfull by a few bytes.
    if not program.fits(loads):
        return None, bound_s
    return Found(program, found, program.step_s(loads)), bound_s
