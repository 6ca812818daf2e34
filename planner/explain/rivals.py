"""The price of the next best: other crews and splits, and other policies of each pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.cost.context import PoolContext
from planner.cost.memory import FETCHED_AHEAD
from planner.explain.change import Change, changed
from planner.explain.job import Job
from planner.explain.levers import POLICY_LEVERS
from planner.policies import compute_precisions, may_cache, parallelisms, recompute_choices
from planner.specs.plan import Alternative, Plan


def next_best(plan: Plan) -> Alternative | None:
    """The best row of the considered table after the chosen one that was priced."""
    others = (row for row in plan.considered if not row.chosen and row.step_ms is not None)
    return min(others, key=lambda row: row.step_ms or 0.0, default=None)


def policies(job: Job, pool: str) -> Iterator[Change]:
    """Every policy of a pool that differs from its own in one thing, at fixed placements.

    Best first; those that find no room last.
    """
    ctx = job.pools[pool].ctx
    found = []
    for field, value in _other_values(job, pool):
        policy = ctx.policy.model_copy(update={field: value})
        after = job.with_contexts({pool: replace(ctx, policy=policy)})
        planned, instead = (_told(one) for one in (getattr(ctx.policy, field), value))
        found.append(changed(POLICY_LEVERS[field], planned, instead, job, after))
    return iter(sorted(found, key=lambda one: (not one.fits, one.step_ms)))


def _other_values(job: Job, pool: str) -> Iterator[tuple[str, Any]]:
    ctx = job.pools[pool].ctx
    policy = ctx.policy
    choices: dict[str, tuple[Any, ...]] = {
        "compute_precision": compute_precisions(ctx.device, ctx.model),
        "communication_precision": ctx.model.precision.communication,
        "recompute": tuple(recompute_choices(ctx)),
        "dense_parallelism": parallelisms(ctx.ranks, ctx.pools_in_job),
        "prefetch_depth": _depths(ctx),
        "kernels": () if ctx.device.triton is None else ("vendor", "preselected"),
    }
    for field, values in choices.items():
        for value in dict.fromkeys(values):
            if value != getattr(policy, field):
                yield field, value


def _depths(ctx: PoolContext) -> tuple[int, ...]:
    """Prefetch depths of a GPU; fetching ahead needs a table that may be cached."""
    if ctx.device.is_cpu:
        return ()
    return (1, 2, FETCHED_AHEAD) if may_cache(ctx.model) else (1, 2)


def _told(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(value) or "none"
    return str(value).replace("_", " ")


def second_best(job: Job, pool: str) -> Change | None:
    """The policy of a pool that comes next, if any fits."""
    return next((one for one in policies(job, pool) if one.fits), None)
