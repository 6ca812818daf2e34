"""Measure both sides of a comparison, and the comparison as the JSON that scripts read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from planner.compare import Comparison, Contest, Outcome
from planner.specs.plan import Plan
from runtime.measure import Measurement, measure


@dataclass(frozen=True)
class MeasuredContest:
    """Planned and naive, measured."""

    planned: Measurement
    naive: Measurement | None
    """None: the naive port does not run."""

    @property
    def speedup(self) -> float | None:
        """Planned over naive, samples per second."""
        if self.naive is None:
            return None
        return self.planned.samples_per_s / self.naive.samples_per_s


def measure_comparison(
    comparison: Comparison, steps: int, address: str | None = None
) -> dict[str, MeasuredContest]:
    """Run the plans of a comparison in turns on this machine (or a Ray cluster).

    Equal plans run once.

    Returns:
        By terms, ``matched`` and ``free``.

    Raises:
        UsageError: the model cannot be trained or this machine is not the cluster.
        RunError: a run failed.
    """
    contests = {"matched": comparison.matched, "free": comparison.free}
    plans: list[Plan] = []
    for contest in contests.values():
        for outcome in (contest.naive, contest.planned):
            if outcome is not None and not any(outcome.plan.works_like(plan) for plan in plans):
                plans.append(outcome.plan)
    measured = measure(plans, steps, address)

    def of(outcome: Outcome) -> Measurement:
        return next(
            found
            for plan, found in zip(plans, measured, strict=True)
            if plan.works_like(outcome.plan)
        )

    return {
        terms: MeasuredContest(
            planned=of(contest.planned), naive=of(contest.naive) if contest.naive else None
        )
        for terms, contest in contests.items()
    }


def comparison_json(
    comparison: Comparison, measured: Mapping[str, MeasuredContest] | None = None
) -> dict[str, Any]:
    """Plain data: ``matched``, ``free`` (each with ``measured`` if there is any), ``waterfall``.

    Where the naive port does not run, ``naive`` and ``speedup`` are None, ``waterfall`` is empty
    and ``why_no_naive`` says why.
    """
    data: dict[str, Any] = {
        "model": comparison.matched.planned.plan.model.name,
        "cluster": comparison.matched.planned.plan.cluster.name,
        "global_batch": comparison.matched.planned.plan.global_batch,
        "matched": _contest(comparison.matched),
        "free": _contest(comparison.free),
        "waterfall": [lever.model_dump() for lever in comparison.waterfall],
        "why_no_naive": comparison.why_no_naive or None,
    }
    for terms, contest in (measured or {}).items():
        data[terms]["measured"] = {
            "planned": asdict(contest.planned),
            "naive": asdict(contest.naive) if contest.naive else None,
            "speedup": contest.speedup,
        }
    return data


def _contest(contest: Contest) -> dict[str, Any]:
    return {
        "planned": _outcome(contest.planned),
        "naive": _outcome(contest.naive) if contest.naive else None,
        "speedup": contest.speedup,
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    """Without the placements: ``hwplan plan --json`` has them."""
    return {
        "samples_per_s": outcome.samples_per_s,
        "step_ms": outcome.step_ms,
        "pools": {
            name: {
                "device": pool.device,
                "ranks": pool.ranks,
                "local_batch": pool.local_batch,
                "policy": pool.policy.model_dump(mode="json"),
                "step_ms": pool.predicted.step_ms,
            }
            for name, pool in outcome.plan.pools.items()
        },
    }
