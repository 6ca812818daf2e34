"""One pool of a job over all local batches and memory policies: bounds and placements, memoised.

The pools of a job meet only at the bridge, so each pool's best policy at a local batch is its own
affair, and the job's step is at least that of each pool alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.candidates import Candidates
from planner.cost.context import PoolContext
from planner.cost.step import EXCHANGE_PREFIX, StepGraph, head_start_s
from planner.evaluate import placement_of
from planner.ilp.bounds import relax
from planner.ilp.pool import Goal, PoolSolution, solve_pool
from planner.ilp.program import PoolProgram
from planner.ilp.solve import SolverOptions
from planner.pool_ways import PoolWays, Waits
from planner.specs.plan import MemoryPolicy, Placement

GRID_POINTS = 9
"""Local batches at which the work without tables is sampled to guess a balanced split."""


@dataclass(frozen=True)
class Solved:
    """A pool's best placements at one local batch."""

    context: PoolContext
    placements: dict[str, Placement]
    step_s: float
    """Of the pool, the other pools' delays included."""


@dataclass(kw_only=True)
class PoolStudy(PoolWays):
    """Bounds and solutions of one pool (with the nodes it uses) inside a job."""

    options: SolverOptions
    programs_solved: int = 0
    _candidates: dict[tuple[int, Waits], Candidates] = field(default_factory=dict)
    _solved: dict[tuple[int, Waits], Solved | None] = field(default_factory=dict)
    _starts: dict[tuple[int, bool], dict[str, float]] = field(default_factory=dict)
    _grid: tuple[list[float], list[float]] | None = None

    def dense_s(self, batch: int, waits: Waits = ()) -> float:
        """Lower bound: the step if tables cost nothing, under the fastest policy."""
        schedules = (self.graph(batch, one).schedule({}, dict(waits)) for one in self.policies)
        return min(max(span.end_s for span in spans.values()) for spans in schedules)

    def bridge_starts(self, batch: int, with_tables: bool = False) -> dict[str, float]:
        """Earliest start of each operation on the bridge, whatever policy and placements.

        Args:
            with_tables: count the tables' part before the last one too.
        """
        key = (batch, with_tables)
        if key not in self._starts:
            each = {policy: self._empty_starts(batch, policy) for policy in self.policies}
            names = next(iter(each.values()))
            starts = {name: min(one[name] for one in each.values()) for name in names}
            if with_tables and starts:
                last = list(starts)[-1]
                empty_s = {policy: one[last] for policy, one in each.items()}
                starts[last] = self._start_s(batch, last, empty_s)
            self._starts[key] = starts
        return self._starts[key]

    def _empty_starts(self, batch: int, policy: MemoryPolicy) -> dict[str, float]:
        spans = self.graph(batch, policy).schedule({})
        return {n: span.start_s for n, span in spans.items() if n.startswith(EXCHANGE_PREFIX)}

    def _start_s(self, batch: int, name: str, empty_s: dict[MemoryPolicy, float]) -> float:
        """Earliest start of an operation with tables: a linear program for each policy that could
        reach it earlier than the others, by its graph without tables or by what it gains on them.
        """
        known: dict[MemoryPolicy, float] = {}
        for policy in sorted(empty_s, key=lambda one: empty_s[one]):
            carried_s = [
                start_s - head_start_s(self.graph(batch, policy), self.graph(batch, other), name)
                for other, start_s in known.items()
                if self.same_loads(policy, other)
            ]
            start_s = max(empty_s[policy], *carried_s, 0.0)
            if start_s < min(known.values(), default=float("inf")):
                start_s = max(start_s, self._relaxed_start_s(batch, policy, name))
            known[policy] = start_s
        return min(known.values())

    def _relaxed_start_s(self, batch: int, policy: MemoryPolicy, name: str) -> float:
        program = self.roomy_program(batch, policy)
        if program is None:
            return 0.0
        (seconds,) = (one.seconds for one in program.graph.operations if one.name == name)
        relaxed = relax(program, memory=False, seed=self.options.seed, until=name)
        return relaxed.step_s - seconds

    def ready_s(self, batch: float) -> float:
        """Rough time until the pool has done its part before the last exchange; no bound.

        Balancing it over the pools lets none of them wait. Sampled without tables, plus tables in
        proportion to the batch.
        """
        if self._grid is None:
            most = max(self.model.global_batch // self.ranks, 1)
            batches = sorted({max(1, round(b)) for b in np.geomspace(1, most, GRID_POINTS)})
            ready = [max(self.bridge_starts(b).values(), default=0.0) for b in batches]
            self._grid = [float(b) for b in batches], ready
        seconds = float(np.interp(batch, *self._grid))
        known = [b for b, with_tables in self._starts if with_tables]
        if known:
            nearest = min(known, key=lambda b: (abs(b - batch), b))
            tables_s = max(self.bridge_starts(nearest, True).values(), default=0.0) - max(
                self.bridge_starts(nearest).values(), default=0.0
            )
            seconds += tables_s * batch / nearest
        return seconds

    def bound_s(self, batch: int, waits: Waits = ()) -> float:
        """Lower bound at this and every larger local batch; infinite if nothing fits."""
        return self._policies_at(batch, waits).bound_s()

    def _policies_at(self, batch: int, waits: Waits) -> Candidates:
        key = (batch, waits)
        if key not in self._candidates:
            self._candidates[key] = Candidates(self, batch, waits=waits, seed=self.options.seed)
        return self._candidates[key]

    def solve(self, batch: int, waits: Waits = (), goal: Goal | None = None) -> Solved | None:
        """The best placements over all policies; None if none was found.

        Raises the bounds of the policies that it solves.

        Args:
            goal: of the caller. Ask for less and less of the same batch, not for more: what was
                found for one goal is the answer to the next one too.
        """
        key = (batch, waits)
        if key not in self._solved:
            candidates = self._policies_at(batch, waits)
            self._solved[key] = self._solve(batch, candidates, goal or Goal())
        return self._solved[key]

    def solve_beside(self, batch: int, others: Sequence[StepGraph], goal: Goal) -> Solved | None:
        """The best answer to what the other pools do; None if none was found.

        Args:
            others: their steps.
            goal: for the step of all pools together.
        """
        candidates = Candidates(self, batch, others=others, seed=self.options.seed)
        return self._solve(batch, candidates, goal)

    def _solve(self, batch: int, candidates: Candidates, goal: Goal) -> Solved | None:
        candidates.bound_s()
        best: tuple[float, MemoryPolicy, PoolSolution] | None = None
        deadline = time.monotonic() + self.options.time_limit_s
        while (bound_s := candidates.open_bound_s()) < goal.hopeless_s:
            enough_s = max(bound_s * (1 + self.options.mip_gap), goal.enough_s)
            if best is not None and best[0] <= enough_s:
                break
            chosen = candidates.take(self.options.mip_gap)
            if chosen is None:
                continue
            left_s = max(deadline - time.monotonic(), 0.0)
            options = replace(self.options, time_limit_s=left_s)
            solution = self._placements(batch, chosen.policy, candidates.at_work, goal, options)
            candidates.record(chosen, solution)
            if solution.assignment is not None and (best is None or solution.step_s < best[0]):
                best = solution.step_s, chosen.policy, solution
        return None if best is None else self._as_solved(batch, best[1], best[2])

    def solve_under(
        self, batch: int, policy: MemoryPolicy, goal: Goal | None = None
    ) -> Solved | None:
        """The best placements under one policy; None if none was found."""
        solution = self._placements(batch, policy, _alone, goal or Goal(), self.options)
        if solution.assignment is None:
            return None
        return self._as_solved(batch, policy, solution)

    def _placements(
        self,
        batch: int,
        policy: MemoryPolicy,
        at_work: Callable[[PoolProgram, MemoryPolicy], PoolProgram],
        goal: Goal,
        options: SolverOptions,
    ) -> PoolSolution:
        self.programs_solved += 1

        def programmed(spill: bool) -> PoolProgram | None:
            program = self.program(batch, policy, spill)
            return None if program is None else at_work(program, policy)

        solution = solve_pool(programmed(False), options, lambda: programmed(True), goal)
        if self.roomy_program(batch, policy) is self.program(batch, policy, spill=False):
            return solution
        # Options that another policy has room for were left out.
        return replace(solution, roomy_bound_s=0.0)

    def _as_solved(self, batch: int, policy: MemoryPolicy, solution: PoolSolution) -> Solved:
        assert solution.program is not None and solution.assignment is not None
        context = self.context(batch, policy)
        by_name = {
            table: placement_of(context, group, choice)
            for group, row in zip(solution.program.classes, solution.assignment, strict=True)
            for table, choice in zip(group.tables, row, strict=True)
        }
        placements = {table.name: by_name[table.name] for table in self.model.all_tables}
        return Solved(context, placements, solution.step_s)


def _alone(program: PoolProgram, policy: MemoryPolicy) -> PoolProgram:
    return program
