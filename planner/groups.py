"""One pool of a job over its replica groups: a ``PoolStudy`` of each, answered by the best.

How many groups a pool is cut into is its own affair, as its policy is: the other pools see only
when it reaches the bridge. So bounds are the least over the numbers of groups, and a number that
is bounded without tables by as much as another one with them costs no linear program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planner.cost.step import StepGraph
from planner.ilp.pool import Goal
from planner.ilp.solve import SolverOptions
from planner.pool_ways import Waits
from planner.specs.cluster import BridgeSpec, PoolSpec
from planner.specs.device import DeviceProfile
from planner.specs.load import load_device
from planner.specs.model import ModelSpec
from planner.specs.plan import KernelPolicy, MemoryPolicy
from planner.study import PoolStudy, Solved

SLACK = 0.5
"""Share of the gap by which the earliest start on the bridge may be bounded too low."""


@dataclass
class GroupedStudy:
    """One pool (with the nodes it uses) inside a job, by number of replica groups."""

    studies: Sequence[PoolStudy]
    """The whole pool as one group first, then ever more groups."""

    def __post_init__(self) -> None:
        self._usual = self.studies[0]

    @cached_property
    def allowed(self) -> Sequence[PoolStudy]:
        """Those in whose groups the tables' constraints leave every table a way; all of them where
        none does: they will say why."""
        return [study for study in self.studies if study.placeable] or self.studies

    @property
    def pool(self) -> PoolSpec:
        return self.studies[0].pool

    @property
    def device(self) -> DeviceProfile:
        return self.studies[0].device

    @property
    def ranks(self) -> int:
        return self.studies[0].ranks

    @property
    def kernel_policy(self) -> KernelPolicy:
        return self.studies[0].kernel_policy

    @property
    def programs_solved(self) -> int:
        return sum(study.programs_solved for study in self.studies)

    def limit(self, options: SolverOptions) -> None:
        """Solver options from now on."""
        for study in self.studies:
            study.options = options

    def dense_s(self, batch: int, waits: Waits = ()) -> float:
        """Lower bound: the step if tables cost nothing but the exchange of their copies."""
        return min(study.dense_s(batch, waits) for study in self.allowed)

    def bound_s(self, batch: int, waits: Waits = ()) -> float:
        """Lower bound at this and every larger local batch; infinite if nothing fits."""
        bounds = self._bounds(batch, waits)
        self._usual = min(bounds, key=lambda one: one[0])[1]
        return min(bound_s for bound_s, _ in bounds)

    def _bounds(self, batch: int, waits: Waits) -> list[tuple[float, PoolStudy]]:
        """A lower bound of each number of groups; the least of them is its study's own."""
        found: list[tuple[float, PoolStudy]] = []
        least_s = float("inf")
        known = [(study.dense_s(batch, waits), study) for study in self.allowed]
        for dense_s, study in sorted(known, key=lambda one: one[0]):
            bound_s = study.bound_s(batch, waits) if dense_s < least_s else dense_s
            least_s = min(least_s, bound_s)
            found.append((bound_s, study))
        return found

    def bridge_starts(self, batch: int, with_tables: bool = False) -> dict[str, float]:
        """Earliest start of each operation on the bridge, whatever the groups.

        Args:
            with_tables: count the tables' part before the last one too.
        """
        starts = [study.bridge_starts(batch) for study in self.allowed]
        earliest = {name: min(one[name] for one in starts) for name in starts[0]}
        if with_tables and earliest:
            last = list(earliest)[-1]
            earliest[last] = self._last_start_s(batch, [one[last] for one in starts], last)
        return earliest

    def _last_start_s(self, batch: int, without_tables: list[float], name: str) -> float:
        """Numbers of groups that would delay the start by too little to matter to the job are left
        at their start without tables."""
        slack_s = SLACK * self.studies[0].options.mip_gap * self.dense_s(batch)
        least_s = float("inf")
        for start_s, index in sorted(zip(without_tables, range(len(without_tables)), strict=True)):
            if start_s < least_s - slack_s:
                with_tables = self.allowed[index].bridge_starts(batch, with_tables=True)
                start_s = with_tables[name]
            least_s = min(least_s, start_s)
        return least_s

    def ready_s(self, batch: float) -> float:
        """Rough time until the pool has done its part before the last exchange; no bound. With the
        groups that were best when the pool was bounded last."""
        return self._usual.ready_s(batch)

    def solve(self, batch: int, waits: Waits = (), goal: Goal | None = None) -> Solved | None:
        """The best placements over all policies and groups; None if none was found.

        Copies cost memory and freshness, so of numbers of groups that are bounded within the gap
        of the best the smallest is tried first.

        Args:
            goal: see ``PoolStudy.solve``.
        """
        goal = goal or Goal()
        gap = self.studies[0].options.mip_gap
        bounds = self._bounds(batch, waits)
        least_s = min(bound_s for bound_s, _ in bounds)
        best: Solved | None = None
        for bound_s, study in sorted(
            bounds, key=lambda one: (max(one[0], least_s * (1 + gap)), one[1].replica_groups)
        ):
            if best is not None:
                if best.step_s <= max(bound_s * (1 + gap), least_s * (1 + gap), goal.enough_s):
                    break
                goal = replace(goal, hopeless_s=min(goal.hopeless_s, best.step_s))
            solved = study.solve(batch, waits, goal)
            if solved is not None and (best is None or solved.step_s < best.step_s):
                best = solved
        return best

    def solve_beside(self, batch: int, others: Sequence[StepGraph], goal: Goal) -> Solved | None:
        """The best answer to what the other pools do, over all policies and groups; None if none
        was found. See ``PoolStudy.solve_beside``."""
        best: Solved | None = None
        for study in self.allowed:
            found = study.solve_beside(batch, others, goal)
            if found is not None and (best is None or found.step_s < best.step_s):
                best = found
                goal = replace(goal, hopeless_s=min(goal.hopeless_s, found.step_s))
        return best

    def solve_under(self, batch: int, policy: MemoryPolicy) -> Solved | None:
        """The best placements under one policy, the pool being one group; None if none was
        found."""
        return self.studies[0].solve_under(batch, policy)


def grouped(
    *,
    pool: PoolSpec,
    model: ModelSpec,
    bridge: BridgeSpec | None,
    pools_in_job: int,
    options: SolverOptions,
    kernels: KernelPolicy = "preselected",
) -> GroupedStudy:
    """The study of a pool that may be cut into replica groups.

    Args:
        pool: with the nodes it uses.
        model: with the job's global batch.
    """
    longest = model.max_exchange_interval_steps
    return GroupedStudy(
        [
            PoolStudy(
                pool=pool,
                device=load_device(pool.device),
                model=model,
                bridge=bridge,
                pools_in_job=pools_in_job,
                interval_steps=longest if pools_in_job > 1 or groups > 1 else 1,
                options=options,
                kernels=kernels,
                replica_groups=groups,
            )
            for groups in pool.group_counts
        ]
    )
