"""A plan explained: its step, its limits, its levers, and what came next."""

from __future__ import annotations

from planner.evaluate import MS
from planner.explain.change import Change
from planner.explain.job import job_of
from planner.explain.levers import idle_pools, levers
from planner.explain.limits import WORTH, Limit, limits
from planner.explain.rivals import next_best, second_best
from planner.explain.step import (
    Balance,
    PathStep,
    Speedup,
    balances,
    faster_jobs,
    path_steps,
    speedups,
)
from planner.specs.base import PositiveFloat, PositiveInt, Spec
from planner.specs.plan import Alternative, Plan


class Explanation(Spec):
    """Why a plan is as it is. All steps but the considered table's are at fixed placements."""

    cluster: str
    model: str
    kind: str
    global_batch: PositiveInt
    step_ms: PositiveFloat
    devices_ms: PositiveFloat
    """When devices and links have done their work; above it the hosts' launches decide the step."""
    critical_path: tuple[PathStep, ...]
    balance: tuple[Balance, ...]
    speedups: tuple[Speedup, ...]
    """Resources a tenth faster, what they save, most first."""
    limits: tuple[Limit, ...]
    levers: tuple[Change, ...]
    next_best: Alternative | None
    second_policies: dict[str, Change | None]
    """By pool: the best policy that differs from its own in one thing."""
    considered: tuple[Alternative, ...]
    idle_pools: tuple[str, ...]

    @property
    def worth(self) -> tuple[Change, ...]:
        """Levers that change something, the most valuable first."""
        made = [lever for lever in self.levers if lever.made]
        return tuple(sorted(made, key=lambda lever: -lever.delta_ms))

    @property
    def improvements(self) -> dict[str, Change]:
        """Single changes that fit and make the step shorter: what the search left within its gap,
        or was not free to do."""
        tried = {f"{one.what} {one.instead}": one for one in self.levers if one.made}
        for pool, one in self.second_policies.items():
            if one is not None:
                tried[f"{pool} with {one.what} {one.instead}"] = one
        return {
            name: one
            for name, one in sorted(tried.items(), key=lambda item: item[1].delta_ms)
            if one.fits and one.delta_ms < -WORTH * self.step_ms
        }


def explain_plan(plan: Plan) -> Explanation:
    """Explain a plan by pricing it again under the device profiles of now.

    Raises:
        UsageError: a device profile of the plan is not there any more.
    """
    job = job_of(plan)
    faster = faster_jobs(job)
    return Explanation(
        cluster=plan.cluster.name,
        model=plan.model.name,
        kind=plan.kind,
        global_batch=plan.global_batch,
        step_ms=job.step_ms,
        devices_ms=job.devices_s * MS,
        critical_path=tuple(path_steps(job, faster)),
        balance=tuple(balances(job)),
        speedups=tuple(speedups(job, faster)),
        limits=tuple(limits(plan, job)),
        levers=tuple(levers(plan, job)),
        next_best=next_best(plan),
        second_policies={name: second_best(job, name) for name in job.pools},
        considered=plan.considered,
        idle_pools=idle_pools(plan),
    )
