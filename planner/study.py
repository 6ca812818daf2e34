"""One pool of a job over all local batches and memory policies: bounds and placements, memoised.

The pools of a job meet only at the bridge, so each pool's best policy at a local batch is its own
affair, and the job's step is at least that of each pool alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from planner.cost.context import PoolContext
from planner.cost.graph import pool_step_graph
from planner.evaluate import placement_of
from planner.ilp.bounds import lean, relax, without_hopeless
from planner.ilp.options import pool_program
from planner.ilp.pool import PoolSolution, solve_pool
from planner.ilp.program import PoolProgram
from planner.ilp.solve import SolverOptions
from planner.specs.cluster import BridgeSpec, PoolSpec
from planner.specs.device import DeviceProfile
from planner.specs.errors import InfeasibleError
from planner.specs.model import ModelSpec
from planner.specs.plan import MemoryPolicy, Placement
from planner.specs.units import Dtype

GRID_POINTS = 9
"""Local batches at which the step without tables is sampled to guess a balanced split."""


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


@dataclass(frozen=True)
class Candidate:
    """A policy, and a lower bound of the pool's step under it."""

    policy: MemoryPolicy
    bound_s: float


@dataclass(frozen=True)
class Solved:
    """A pool's best placements at one local batch."""

    context: PoolContext
    placements: dict[str, Placement]
    step_s: float


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
    programs_solved: int = 0
    _graphs: dict[tuple[int, MemoryPolicy], float] = field(default_factory=dict)
    _candidates: dict[int, list[Candidate]] = field(default_factory=dict)
    _solved: dict[int, Solved | None] = field(default_factory=dict)
    _grid: tuple[list[float], list[float]] | None = None

    @property
    def ranks(self) -> int:
        return self.pool.devices

    @property
    def policies(self) -> list[MemoryPolicy]:
        """One per compute precision, activations kept.

        Communication takes the narrowest precision allowed: fewer bytes never take longer.
        """
        communication = narrowest(self.model.precision.communication)
        return [
            MemoryPolicy(compute_precision=compute, communication_precision=communication)
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
        )

    def program(self, batch: int, policy: MemoryPolicy, spill: bool) -> PoolProgram:
        return pool_program(self.context(batch, policy), spill)

    def dense_s(self, batch: int) -> float:
        """Lower bound: the step if tables cost nothing, under the fastest policy."""
        return min(self._dense_s(batch, policy) for policy in self.policies)

    def _dense_s(self, batch: int, policy: MemoryPolicy) -> float:
        key = (batch, policy)
        if key not in self._graphs:
            self._graphs[key] = pool_step_graph(self.context(batch, policy)).step_s({})
        return self._graphs[key]

    def bound_s(self, batch: int) -> float:
        """Lower bound at this and every larger local batch; infinite if nothing fits."""
        return min(candidate.bound_s for candidate in self.candidates(batch))

    def candidates(self, batch: int) -> list[Candidate]:
        """Policies by ascending lower bound.

        Recomputing activations takes time and saves memory, so it is a candidate of its own only
        where the tables do not fit beside the activations.
        """
        if batch not in self._candidates:
            found: list[Candidate] = []
            best = float("inf")
            for policy in sorted(self.policies, key=lambda p: self._dense_s(batch, p)):
                dense_s = self._dense_s(batch, policy)
                if dense_s >= best:
                    found.append(Candidate(policy, dense_s))
                    continue
                bounds = self._bounds(batch, policy)
                found += bounds
                best = min(best, *(candidate.bound_s for candidate in bounds))
            self._candidates[batch] = sorted(found, key=lambda candidate: candidate.bound_s)
        return self._candidates[batch]

    def _bounds(self, batch: int, policy: MemoryPolicy) -> list[Candidate]:
        again = policy.model_copy(update={"recompute": "full"})
        roomy = without_hopeless(self.program(batch, policy, spill=False))
        ignoring_s = self._dense_s(batch, policy)
        if roomy is not None:
            relaxed = relax(lean(roomy), memory=False, seed=self.options.seed)
            ignoring_s = relaxed.step_s
            if relaxed.fits:
                return [Candidate(policy, relaxed.step_s), Candidate(again, relaxed.step_s)]
        found = []
        for choice in (policy, again):
            usable = without_hopeless(self.program(batch, choice, spill=True))
            bound_s = float("inf")
            if usable is not None:
                bound_s = relax(usable, memory=True, seed=self.options.seed).step_s
                bound_s = max(bound_s, ignoring_s if roomy is not None else 0.0)
            found.append(Candidate(choice, bound_s))
        return found

    def guess_s(self, batch: float) -> float:
        """Rough step for balancing: sampled dense time plus tables in proportion to the batch."""
        if self._grid is None:
            most = max(self.model.global_batch // self.ranks, 1)
            batches = sorted({max(1, round(b)) for b in np.geomspace(1, most, GRID_POINTS)})
            self._grid = [float(b) for b in batches], [self.dense_s(b) for b in batches]
        dense = float(np.interp(batch, *self._grid))
        known = [b for b, found in self._candidates.items() if np.isfinite(found[0].bound_s)]
        if not known:
            return dense
        nearest = min(known, key=lambda b: (abs(b - batch), b))
        tables_s = self._candidates[nearest][0].bound_s - self.dense_s(nearest)
        return dense + max(tables_s, 0.0) * batch / nearest

    def solve(self, batch: int) -> Solved | None:
        """The best placements over all policies; None if none was found."""
        if batch not in self._solved:
            self._solved[batch] = self._solve(batch)
        return self._solved[batch]

    def _solve(self, batch: int) -> Solved | None:
        best: tuple[float, MemoryPolicy, PoolSolution] | None = None
        refined = list(self.candidates(batch))
        for index, candidate in enumerate(refined):
            policy, bound_s = candidate.policy, candidate.bound_s
            if not np.isfinite(bound_s):
                continue
            if best is not None and best[0] <= bound_s * (1 + self.options.mip_gap):
                break
            solution = self._placements(batch, policy)
            refined[index] = replace(candidate, bound_s=max(bound_s, solution.bound_s))
            if solution.assignment is not None and (best is None or solution.step_s < best[0]):
                best = solution.step_s, policy, solution
        self._candidates[batch] = sorted(refined, key=lambda candidate: candidate.bound_s)
        if best is None:
            return None
        return self._as_solved(batch, best[1], best[2])

    def solve_under(self, batch: int, policy: MemoryPolicy) -> Solved | None:
        """The best placements under one policy; None if none was found."""
        solution = self._placements(batch, policy)
        if solution.assignment is None:
            return None
        return self._as_solved(batch, policy, solution)

    def _placements(self, batch: int, policy: MemoryPolicy) -> PoolSolution:
        self.programs_solved += 1
        return solve_pool(
            self.program(batch, policy, spill=False),
            self.options,
            wider=lambda: self.program(batch, policy, spill=True),
        )

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
