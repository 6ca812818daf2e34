"""One pool of a job over all local batches and memory policies: bounds and placements, memoised.

The pools of a job meet only at the bridge, so each pool's best policy at a local batch is its own
affair, and the job's step is at least that of each pool alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from planner.cost.context import PoolContext
from planner.cost.dense import recomputable
from planner.cost.graph import pool_step_graph
from planner.cost.step import EXCHANGE_PREFIX, StepGraph
from planner.evaluate import placement_of
from planner.ilp.bounds import lean, relax, without_hopeless
from planner.ilp.options import pool_program, table_classes
from planner.ilp.pool import Goal, PoolSolution, solve_pool
from planner.ilp.program import PoolProgram, TableClass
from planner.ilp.solve import SolverOptions
from planner.specs.cluster import BridgeSpec, PoolSpec
from planner.specs.device import DeviceProfile
from planner.specs.errors import InfeasibleError
from planner.specs.model import ModelSpec
from planner.specs.plan import KernelPolicy, MemoryPolicy, Placement
from planner.specs.units import Dtype

GRID_POINTS = 9
"""Local batches at which the work without tables is sampled to guess a balanced split."""


def compute_precisions(device: DeviceProfile, model: ModelSpec) -> tuple[Dtype, ...]:
    """Precisions that the model allows and the device has.

    Raises:
        InfeasibleError: there is none.
    """
    allowed = tuple(d for d in model.precision.compute if d in device.compute.peak_flops_per_s)
    if not allowed:
        raise InfeasibleError(
            f"{device.name} cannot compute in any precision that the model allows",
            field="precision.compute",
            value=[str(dtype) for dtype in model.precision.compute],
            fix=f"allow one of {', '.join(device.compute.peak_flops_per_s)}",
        )
    return allowed


def narrowest(dtypes: tuple[Dtype, ...]) -> Dtype:
    """The precision with the fewest bytes; of equals the one the recipe names first."""
    return min(dtypes, key=lambda dtype: dtype.bytes)


Waits = tuple[tuple[str, float], ...]
"""Operations on the bridge, and when the other pools reach them at the earliest, seconds."""


@dataclass(frozen=True)
class Candidate:
    """A policy, and a lower bound of the pool's step under it."""

    policy: MemoryPolicy
    bound_s: float
    roomy: bool = False
    """The bound holds whatever the memory."""


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
    _classes: dict[tuple[int, bool], tuple[TableClass, ...]] = field(default_factory=dict)
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

    @property
    def policies(self) -> list[MemoryPolicy]:
        """One per compute precision, activations kept.

        Communication takes the narrowest precision allowed: fewer bytes never take longer.
        """
        communication = narrowest(self.model.precision.communication)
        return [
            MemoryPolicy(
                compute_precision=compute,
                communication_precision=communication,
                kernels=self.kernel_policy,
            )
            for compute in compute_precisions(self.device, self.model)
        ]

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
            if (batch, spill) not in self._classes:
                self._classes[batch, spill] = table_classes(ctx.sharding_group, spill)
            whole = without_hopeless(pool_program(ctx, spill, self._classes[batch, spill]))
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
        """Policies by ascending lower bound.

        Recomputing activations takes time and saves memory, so it is a candidate of its own only
        where the tables do not fit beside the activations.

        Args:
            waits: operations on the bridge, and until when other pools delay them at least.
        """
        key = (batch, waits)
        if key not in self._candidates:
            found: list[Candidate] = []
            best = float("inf")
            for policy in sorted(self.policies, key=lambda p: self._dense_s(batch, p, waits)):
                known_s = self._dense_s(batch, policy, waits)
                for other in found:
                    if other.roomy and self._never_faster(batch, policy, other.policy):
                        known_s = max(known_s, other.bound_s)
                if known_s >= best:
                    found.append(Candidate(policy, known_s, roomy=True))
                    continue
                bounds = self._bounds(batch, policy, waits)
                found += bounds
                best = min(best, *(candidate.bound_s for candidate in bounds))
            self._candidates[key] = sorted(found, key=lambda candidate: candidate.bound_s)
        return self._candidates[key]

    def _never_faster(self, batch: int, policy: MemoryPolicy, other: MemoryPolicy) -> bool:
        """Whether no operation is faster under ``policy`` than under ``other``.

        Then neither is the step, where memory is no obstacle: the loads are the same.
        """
        return self._head_start_s(batch, policy, other) == 0

    def _head_start_s(self, batch: int, policy: MemoryPolicy, other: MemoryPolicy) -> float:
        """How much shorter a step can be under ``policy`` than under ``other`` at most, where
        memory is no obstacle.

        The loads are the same and a path holds each operation once, so the longest path is shorter
        by the sum of what operations are faster at most.
        """
        pairs = zip(
            self.graph(batch, policy).operations,
            self.graph(batch, other).operations,
            strict=True,
        )
        return sum(max(0.0, theirs.seconds - mine.seconds) for mine, theirs in pairs)

    def _bounds(self, batch: int, policy: MemoryPolicy, waits: Waits) -> list[Candidate]:
        again = policy.model_copy(update={"recompute": recomputable(self.model)})
        roomy = self.program(batch, policy, spill=False)
        ignoring_s = self._dense_s(batch, policy, waits)
        if roomy is not None:
            relaxed = relax(roomy.waiting(dict(waits)), memory=False, seed=self.options.seed)
            ignoring_s = max(ignoring_s, relaxed.step_s)
            if relaxed.fits:
                return [Candidate(policy, ignoring_s, roomy=True), Candidate(again, ignoring_s)]
        found = []
        for choice in (policy, again):
            usable = self.program(batch, choice, spill=True)
            bound_s = float("inf")
            if usable is not None:
                relaxed = relax(usable.waiting(dict(waits)), memory=True, seed=self.options.seed)
                bound_s = max(relaxed.step_s, ignoring_s)
            found.append(Candidate(choice, bound_s))
        return found

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
        refined = list(self.candidates(batch, waits))
        settled: list[MemoryPolicy] = []
        deadline = time.monotonic() + self.options.time_limit_s
        for index in range(len(refined)):
            candidate = refined[index]
            policy, bound_s = candidate.policy, candidate.bound_s
            if not np.isfinite(bound_s) or bound_s >= goal.hopeless_s:
                continue
            enough_s = max(bound_s * (1 + self.options.mip_gap), goal.enough_s)
            if best is not None and best[0] <= enough_s:
                break
            if any(self._never_faster(batch, policy, other) for other in settled):
                continue
            left_s = max(deadline - time.monotonic(), 0.0)
            options = replace(self.options, time_limit_s=left_s)
            solution = self._placements(batch, policy, waits, goal, options)
            if solution.assignment is not None and solution.roomy_bound_s == solution.bound_s:
                # Memory had no part in it: another policy can only be as good if it is faster.
                settled.append(policy)
            refined[index] = replace(candidate, bound_s=max(bound_s, solution.bound_s))
            for later in range(index + 1, len(refined)):
                other = refined[later]
                known_s = solution.roomy_bound_s - self._head_start_s(batch, other.policy, policy)
                refined[later] = replace(other, bound_s=max(other.bound_s, known_s))
            if solution.assignment is not None and (best is None or solution.step_s < best[0]):
                best = solution.step_s, policy, solution
        key = (batch, waits)
        self._candidates[key] = sorted(refined, key=lambda candidate: candidate.bound_s)
        if best is None:
            return None
        return self._as_solved(batch, best[1], best[2])

    def solve_under(self, batch: int, policy: MemoryPolicy) -> Solved | None:
        """The best placements under one policy; None if none was found."""
        solution = self._placements(batch, policy, (), Goal(), self.options)
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
