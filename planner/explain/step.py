"""What a step is made of: its critical path, what bounds each part of it, which rank is slowest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.evaluate import MS
from planner.explain.job import Job
from planner.explain.resources import HOST, RESOURCES, TENTH, Resource
from planner.specs.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, Spec

VISIBLE_S = 1e-9
"""Shorter operations on the critical path are not told."""


class PathStep(Spec):
    """One operation on the critical path of the job."""

    pool: str
    operation: str
    ms: NonNegativeFloat
    bound_by: str
    """The resource that, a tenth faster, shortens it most; empty if none does."""


class Balance(Spec):
    """What tables cost the ranks of one pool (of one replica group) if none waited for another."""

    pool: str
    slowest_rank: NonNegativeInt
    slowest_ms: NonNegativeFloat
    mean_ms: NonNegativeFloat
    excess: NonNegativeFloat
    """slowest over mean, less 1."""
    own_step_ms: PositiveFloat
    """When this pool has ended its step, waits for others included."""


class Speedup(Spec):
    """A resource a tenth faster, at fixed placements."""

    pool: str
    """Empty: of the whole job."""
    resource: str
    step_ms: PositiveFloat
    saved_ms: float


def faster_jobs(job: Job) -> dict[tuple[str, Resource], Job]:
    """The job with one resource of one pool a tenth faster, for all that may shorten its step.

    A step is only shortened by what shortens its critical path.
    """
    on_path = dict.fromkeys(one.pool for one, seconds in job.critical_path if seconds > VISIBLE_S)
    launched_only = all(one.operation.name == "host" for one, _ in job.critical_path)
    found = {}
    for resource in (HOST,) if launched_only else RESOURCES:
        if resource.of_job:
            if len(job.pools) > 1:
                changed = {
                    name: resource.faster(state.ctx, 1 + TENTH) for name, state in job.pools.items()
                }
                found["", resource] = job.with_contexts(changed)
            continue
        for pool in on_path:
            ctx = resource.faster(job.pools[pool].ctx, 1 + TENTH)
            found[pool, resource] = job.with_contexts({pool: ctx})
    return found


def speedups(job: Job, faster: Mapping[tuple[str, Resource], Job]) -> Iterator[Speedup]:
    """What each resource is worth, most first."""
    found = [
        Speedup(
            pool=pool,
            resource=resource.name,
            step_ms=changed.step_ms,
            saved_ms=job.step_ms - changed.step_ms,
        )
        for (pool, resource), changed in faster.items()
    ]
    return iter(sorted(found, key=lambda one: -one.saved_ms))


def path_steps(job: Job, faster: Mapping[tuple[str, Resource], Job]) -> Iterator[PathStep]:
    """The critical path; the durations sum to the step."""
    for one, seconds in job.critical_path:
        if seconds <= VISIBLE_S:
            continue
        index = job.operations.index(one)
        best_s, bound_by = seconds * (1 - 1e-6), ""
        for (pool, resource), changed in faster.items():
            if pool in ("", one.pool):
                other_s = changed.duration_s(changed.operations[index])
                if other_s < best_s:
                    best_s, bound_by = other_s, resource.name
        yield PathStep(
            pool=one.pool, operation=one.operation.name, ms=seconds * MS, bound_by=bound_by
        )


def balances(job: Job) -> Iterator[Balance]:
    """Pool by pool."""
    ends_s: dict[str, list[float]] = {name: [] for name in job.pools}
    for one, end in zip(job.operations, job.ends_s(), strict=True):
        ends_s[one.pool].append(float(end))
    for name, state in job.pools.items():
        seconds = state.table_seconds
        mean_s, slowest_s = float(seconds.mean()), float(seconds.max())
        yield Balance(
            pool=name,
            slowest_rank=int(seconds.argmax()),
            slowest_ms=slowest_s * MS,
            mean_ms=mean_s * MS,
            # Rounding may leave the mean of equal numbers above them.
            excess=max(slowest_s / mean_s - 1, 0.0) if mean_s else 0.0,
            own_step_ms=max(ends_s[name]) * MS,
        )
