"""One pool of a job over all local batches and memory policies: bounds and placements, memoised.

The pools of a job meet only at the bridge, so each pool's best policy at a local batch is its own
affair, and the job's step is at least that of each pool alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property

import numpy as np

from planner.cost.context import PoolContext
from planner.cost.graph import pool_step_graph
from planner.cost.memory import base_memory_bytes
from planner.cost.step import EXCHANGE_PREFIX, StepGraph, head_start_s
from planner.evaluate import placement_of
from planner.ilp.bounds import lean, relax, without_hopeless
from planner.ilp.options import pool_program, table_classes
from planner.ilp.pool import Goal, PoolSolution, solve_pool
from planner.ilp.program import PoolProgram, TableClass
from planner.ilp.solve import SolverOptions
from planner.policies import (
    compute_precisions,
    kinds_beside,
    must_cache,
    plain_policy,
    quick_policies,
    recompute_choices,
)
from planner.specs.cluster import BridgeSpec, PoolSpec
from planner.specs.device import DeviceProfile
from planner.specs.model import ModelSpec
from planner.specs.plan import KernelPolicy, MemoryPolicy, Placement

GRID_POINTS = 9
"""Local batches at which the work without tables is sampled to guess a balanced split."""


Waits = tuple[tuple[str, float], ...]
"""Operations on the bridge, and when the other pools reach them at the earliest, seconds."""


class Stage(IntEnum):
    """How well the bound of a candidate is known, and for how much it stands."""

    GRAPH = 0
    """From the step graph without tables. For a quick kind and all that is never faster."""
    ROOMY = 1
    """From tables that the relaxation fits beside it. For as much."""
    SHORT = 2
    """Ignoring memory, which is short. For one kind, whatever it recomputes."""
    THRIFTY = 3
    """With the memory of what recomputes most, in the time of what recomputes nothing. For as much.
    """
    MEMBER = 4
    """From its kind and its own step graph. From here on for one policy."""
    RELAXED = 5
    """From its own tables and memory."""
    SOLVED = 6


SETTLED = (Stage.ROOMY, Stage.THRIFTY, Stage.RELAXED, Stage.SOLVED)
"""Stages whose bounds are taken for a pool's."""


@dataclass(frozen=True)
class Candidate:
    """Policies, and a lower bound of the pool's step under each of them."""

    policy: MemoryPolicy
    """The fastest of them where memory is no obstacle."""
    bound_s: float
    stage: Stage = Stage.GRAPH
    roomy_s: float = 0.0
    """A bound that holds whatever the memory."""

    def at_least(self, bound_s: float) -> Candidate:
        """The same with the larger bound."""
        return replace(self, bound_s=max(self.bound_s, bound_s))


@dataclass(frozen=True)
class Solved:
    """A pool's best placements at one local batch."""

    context: PoolContext
    placements: dict[str, Placement]
    step_s: float
    """Of the pool, the other pools' delays included."""


@dataclass
class PoolStudy:
    """Bounds and solutions of one pool (with the nodes it uses) inside a job."""

    pool: PoolSpec
    device: DeviceProfile
    model: ModelSpec
    """With the job's global batch."""
    bridge: BridgeSpec | None
    pools_in_job: int
    interval_steps: int
    options: SolverOptions
    kernels: KernelPolicy = "preselected"
    replica_groups: int = 1
    programs_solved: int = 0
    _graphs: dict[tuple[int, MemoryPolicy], StepGraph] = field(default_factory=dict)
    _programs: dict[tuple[int, MemoryPolicy, bool], PoolProgram | None] = field(
        default_factory=dict
    )
    _classes: dict[tuple[int, bool, int], tuple[TableClass, ...]] = field(default_factory=dict)
    _kinds: dict[tuple[int, MemoryPolicy], list[MemoryPolicy]] = field(default_factory=dict)
    _candidates: dict[tuple[int, Waits], list[Candidate]] = field(default_factory=dict)
    _solved: dict[tuple[int, Waits], Solved | None] = field(default_factory=dict)
    _starts: dict[tuple[int, bool], dict[str, float]] = field(default_factory=dict)
    _grid: tuple[list[float], list[float]] | None = None

    @property
    def ranks(self) -> int:
        return self.pool.devices

    @property
    def kernel_policy(self) -> KernelPolicy:
        """``kernels`` where the device has kernels to choose from."""
        return "vendor" if self.device.triton is None else self.kernels

    @cached_property
    def policies(self) -> list[MemoryPolicy]:
        """Kinds of policy that may be the fastest; communication in the narrowest precision."""
        precision = compute_precisions(self.device, self.model)[0]
        plain = plain_policy(self.device, self.model, precision, self.kernel_policy)
        return quick_policies(self.context(1, plain))

    def context(self, batch: int, policy: MemoryPolicy) -> PoolContext:
        """What the cost model sees."""
        return PoolContext(
            pool=self.pool,
            device=self.device,
            model=self.model,
            local_batch=batch,
            policy=policy,
            bridge=self.bridge,
            pools_in_job=self.pools_in_job,
            embedding_interval_steps=self.interval_steps,
            replica_groups=self.replica_groups,
        )

    def program(self, batch: int, policy: MemoryPolicy, spill: bool) -> PoolProgram | None:
        """Options that matter; None if some table has none that fits."""
        key = (batch, policy, spill)
        if key not in self._programs:
            ctx = self.context(batch, policy)
            shared = (batch, spill, policy.prefetch_depth)
            if shared not in self._classes:
                self._classes[shared] = table_classes(ctx.sharding_group, spill)
            whole = without_hopeless(pool_program(ctx, spill, self._classes[shared]))
            self._programs[key] = whole if whole is None or spill else lean(whole)
        return self._programs[key]

    def graph(self, batch: int, policy: MemoryPolicy) -> StepGraph:
        """The step graph, whatever the placements."""
        key = (batch, policy)
        if key not in self._graphs:
            self._graphs[key] = pool_step_graph(self.context(batch, policy))
        return self._graphs[key]

    def dense_s(self, batch: int, waits: Waits = ()) -> float:
        """Lower bound: the step if tables cost nothing, under the fastest policy."""
        return min(self._dense_s(batch, policy, waits) for policy in self.policies)

    def _dense_s(self, batch: int, policy: MemoryPolicy, waits: Waits) -> float:
        spans = self.graph(batch, policy).schedule({}, dict(waits))
        return max(span.end_s for span in spans.values())

    def bridge_starts(self, batch: int, with_tables: bool = False) -> dict[str, float]:
        """Earliest start of each operation on the bridge, whatever policy and placements.

        Args:
            with_tables: count the tables' part before the last one too (an LP per policy).
        """
        key = (batch, with_tables)
        if key not in self._starts:
            each: dict[MemoryPolicy, dict[str, float]] = {}
            for policy in sorted(self.policies, key=lambda p: self._dense_s(batch, p, ())):
                if not any(self._never_faster(batch, policy, other) for other in each):
                    each[policy] = self._policy_starts(batch, policy, with_tables)
            names = next(iter(each.values()))
            self._starts[key] = {name: min(one[name] for one in each.values()) for name in names}
        return self._starts[key]

    def _policy_starts(
        self, batch: int, policy: MemoryPolicy, with_tables: bool
    ) -> dict[str, float]:
        spans = self.graph(batch, policy).schedule({})
        starts = {n: span.start_s for n, span in spans.items() if n.startswith(EXCHANGE_PREFIX)}
        program = self.program(batch, policy, spill=False) if with_tables and starts else None
        if program is not None:
            last = list(starts)[-1]
            relaxed = relax(program, memory=False, seed=self.options.seed, until=last)
            starts[last] = max(starts[last], relaxed.step_s - spans[last].operation.seconds)
        return starts

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
        return self.candidates(batch, waits)[0].bound_s

    def candidates(self, batch: int, waits: Waits = ()) -> list[Candidate]:
        """Policies by ascending lower bound, the first of which is settled."""
        key = (batch, waits)
        if key not in self._candidates:
            self._candidates[key] = [
                Candidate(policy, self._dense_s(batch, policy, waits)) for policy in self.policies
            ]
        found = self._candidates[key]
        while (first := min(found, key=lambda one: one.bound_s)).stage not in SETTLED:
            found.remove(first)
            found += self._refined(first, found, batch, waits)
        found.sort(key=lambda one: one.bound_s)
        return found

    def thriftiest(self, batch: int) -> PoolContext:
        """The pool under the policy that takes least memory."""
        contexts = [
            self.context(batch, kind.model_copy(update={"recompute": names}))
            for quick in self.policies
            for kind in kinds_beside(self.context(batch, quick), quick)
            for names in recompute_choices(self.context(batch, kind))
        ]
        # Fewer batches ahead leave more room to the tables too.
        return min(
            contexts,
            key=lambda ctx: (ctx.policy.prefetch_depth, sum(base_memory_bytes(ctx).values())),
        )

    def _refined(
        self, candidate: Candidate, others: Sequence[Candidate], batch: int, waits: Waits
    ) -> list[Candidate]:
        """The policies of a candidate, their bounds known better by a stage."""
        policy, known_s = candidate.policy, candidate.bound_s
        if candidate.stage is Stage.GRAPH:
            inherited_s = max(
                (
                    other.roomy_s - self._head_start_s(batch, policy, other.policy)
                    for other in others
                    if other.roomy_s > known_s
                ),
                default=0.0,
            )
            if inherited_s > known_s:
                return [candidate.at_least(inherited_s)]
            return self._roomy(candidate, batch, waits)
        if candidate.stage is Stage.SHORT:
            thrifty = min(
                self._members(batch, policy), key=lambda one: self._base_bytes(batch, one)
            )
            relaxed_s = self._relaxed_s(batch, thrifty, waits, self.graph(batch, policy))
            return [replace(candidate.at_least(relaxed_s), stage=Stage.THRIFTY)]
        if candidate.stage is Stage.THRIFTY:
            return [
                Candidate(member, max(known_s, self._dense_s(batch, member, waits)), Stage.MEMBER)
                for member in self._members(batch, policy)
            ]
        assert candidate.stage is Stage.MEMBER
        relaxed_s = self._relaxed_s(batch, policy, waits, self.graph(batch, policy))
        return [replace(candidate.at_least(relaxed_s), stage=Stage.RELAXED)]

    def _roomy(self, candidate: Candidate, batch: int, waits: Waits) -> list[Candidate]:
        """A quick kind with tables, memory ignored; kind by kind where it is short."""
        policy, known_s = candidate.policy, candidate.bound_s
        program = self.program(batch, policy, spill=False)
        fits = False
        if program is not None:
            relaxed = relax(program.waiting(dict(waits)), memory=False, seed=self.options.seed)
            known_s, fits = max(known_s, relaxed.step_s), relaxed.fits
        known = Candidate(policy, known_s, Stage.ROOMY, roomy_s=known_s)
        return [known] if fits else self._when_short(known, batch)

    def _when_short(self, known: Candidate, batch: int) -> list[Candidate]:
        """The kinds that a quick one stands for."""
        kinds = kinds_beside(self.context(batch, known.policy), known.policy)
        return [
            Candidate(
                kind, known.bound_s, Stage.SHORT, known.roomy_s if kind == known.policy else 0.0
            )
            for kind in kinds
        ]

    def _members(self, batch: int, kind: MemoryPolicy) -> list[MemoryPolicy]:
        """Policies of a kind."""
        key = (batch, kind)
        if key not in self._kinds:
            self._kinds[key] = [
                kind.model_copy(update={"recompute": names})
                for names in recompute_choices(self.context(batch, kind))
            ]
        return self._kinds[key]

    def _base_bytes(self, batch: int, policy: MemoryPolicy) -> int:
        return sum(base_memory_bytes(self.context(batch, policy)).values())

    def _relaxed_s(self, batch: int, policy: MemoryPolicy, waits: Waits, graph: StepGraph) -> float:
        """Bound with the memory of ``policy`` and the operations of ``graph``."""
        program = self.program(batch, policy, spill=True)
        if program is None:
            return float("inf")
        waiting = program.under(graph, dict(waits))
        return relax(waiting, memory=True, seed=self.options.seed).step_s

    def _never_faster(self, batch: int, policy: MemoryPolicy, other: MemoryPolicy) -> bool:
        """Whether no step is shorter under ``policy`` than under ``other``, where memory is no
        obstacle."""
        return self._head_start_s(batch, policy, other) == 0

    def _head_start_s(self, batch: int, policy: MemoryPolicy, other: MemoryPolicy) -> float:
        """How much shorter a step can be under ``policy`` than under ``other`` at most, where
        memory is no obstacle; infinite if nothing is known.

        Then the loads are the same, but for tables that have to be cached.
        """
        if policy.prefetch_depth != other.prefetch_depth and must_cache(self.model):
            return float("inf")
        return head_start_s(self.graph(batch, policy), self.graph(batch, other))

    def solve(self, batch: int, waits: Waits = (), goal: Goal | None = None) -> Solved | None:
        """The best placements over all policies; None if none was found.

        Raises the bounds of the policies that it solves.

        Args:
            goal: of the caller. Ask for less and less of the same batch, not for more: what was
                found for one goal is the answer to the next one too.
        """
        key = (batch, waits)
        if key not in self._solved:
            self._solved[key] = self._solve(batch, waits, goal or Goal())
        return self._solved[key]

    def _solve(self, batch: int, waits: Waits, goal: Goal) -> Solved | None:
        best: tuple[float, MemoryPolicy, PoolSolution] | None = None
        candidates = self.candidates(batch, waits)
        solved: list[Candidate] = []
        settled: list[MemoryPolicy] = []
        deadline = time.monotonic() + self.options.time_limit_s
        while candidates:
            chosen = _most_promising(candidates, self.options.mip_gap)
            policy, bound_s = chosen.policy, min(one.bound_s for one in candidates)
            if not bound_s < goal.hopeless_s:
                break
            if best is not None:
                enough_s = max(bound_s * (1 + self.options.mip_gap), goal.enough_s)
                if best[0] <= enough_s:
                    break
            candidates.remove(chosen)
            if any(self._never_faster(batch, policy, other) for other in settled):
                continue
            if chosen.stage not in (Stage.ROOMY, Stage.RELAXED):
                candidates += [
                    one
                    for one in self._refined(chosen, [*candidates, *solved], batch, waits)
                    if all(one.policy != other.policy for other in solved)
                    or one.stage < Stage.MEMBER
                ]
                continue
            left_s = max(deadline - time.monotonic(), 0.0)
            options = replace(self.options, time_limit_s=left_s)
            solution = self._placements(batch, policy, waits, goal, options)
            done = replace(
                chosen.at_least(solution.bound_s),
                stage=Stage.SOLVED,
                roomy_s=max(chosen.roomy_s, solution.roomy_bound_s),
            )
            solved.append(done)
            if solution.assignment is not None and solution.roomy_bound_s == solution.bound_s:
                # Memory had no part in it: another policy can only be as good if it is faster.
                settled.append(policy)
            elif chosen.stage is Stage.ROOMY:
                rest = replace(chosen.at_least(done.roomy_s), roomy_s=done.roomy_s)
                candidates += self._when_short(rest, batch)
            candidates = [
                other.at_least(done.roomy_s - self._head_start_s(batch, other.policy, policy))
                for other in candidates
            ]
            if solution.assignment is not None and (best is None or solution.step_s < best[0]):
                best = solution.step_s, policy, solution
        self._candidates[batch, waits] = candidates + solved
        if best is None:
            return None
        return self._as_solved(batch, best[1], best[2])

    def solve_under(
        self, batch: int, policy: MemoryPolicy, goal: Goal | None = None
    ) -> Solved | None:
        """The best placements under one policy; None if none was found."""
        solution = self._placements(batch, policy, (), goal or Goal(), self.options)
        if solution.assignment is None:
            return None
        return self._as_solved(batch, policy, solution)

    def _placements(
        self,
        batch: int,
        policy: MemoryPolicy,
        waits: Waits,
        goal: Goal,
        options: SolverOptions,
    ) -> PoolSolution:
        self.programs_solved += 1

        def waiting(spill: bool) -> PoolProgram | None:
            program = self.program(batch, policy, spill)
            return None if program is None else program.waiting(dict(waits))

        return solve_pool(waiting(False), options, lambda: waiting(True), goal)

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


def _most_promising(candidates: Sequence[Candidate], mip_gap: float) -> Candidate:
    """Of those bounded within half the gap of the least the one known best: it may do."""
    enough_s = min(one.bound_s for one in candidates) * (1 + mip_gap / 2)
    near = [one for one in candidates if one.bound_s <= enough_s]
    return max(near, key=lambda one: (one.stage, -one.bound_s))
