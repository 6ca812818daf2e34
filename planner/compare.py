"""Planned against naive: on the same devices (matched), with devices left out (free), by lever."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate

from planner.assemble import contexts_of, with_batch
from planner.baselines.naive import naive_choice, naive_policy, naive_port
from planner.evaluate import MS, evaluate
from planner.search import Search, SearchOptions, plan_job
from planner.specs.base import PositiveFloat, Spec
from planner.specs.cluster import ClusterSpec
from planner.specs.errors import InfeasibleError
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan


class Outcome(Spec):
    """One side of a comparison."""

    samples_per_s: PositiveFloat
    step_ms: PositiveFloat
    plan: Plan


class Contest(Spec):
    """Planned and naive at the same global batch."""

    planned: Outcome
    naive: Outcome | None
    """None: the naive port does not run (``Comparison.why_no_naive``)."""
    speedup: PositiveFloat | None
    """Planned over naive, samples per second."""


class Lever(Spec):
    """One bar of the waterfall."""

    name: str
    step_ms: PositiveFloat
    """After this lever and all before it."""


class Comparison(Spec):
    """``matched``: all devices of all pools work. ``free``: the planner may leave some out."""

    matched: Contest
    free: Contest
    waterfall: tuple[Lever, ...]
    """From the naive port to the free plan, every bar from the same cost code; empty without it."""
    why_no_naive: str = ""
    """Why the naive port does not run, where it does not."""


def compare(
    cluster: ClusterSpec,
    model: ModelSpec,
    global_batch: int | None = None,
    options: SearchOptions | None = None,
) -> Comparison:
    """Plan both ways and take the difference apart; where the naive port does not fit, plan alone.

    Raises:
        InfeasibleError: the job cannot run on all devices.
        UsageError: an option out of range.
    """
    options = options or SearchOptions()
    matched_options = replace(options, matched=True)
    naive, why_no_naive = _naive(cluster, model, global_batch)
    matched = plan_job(cluster, model, global_batch, matched_options)
    free = plan_job(cluster, model, global_batch, replace(options, matched=False))
    if matched.predicted.step_ms < free.predicted.step_ms:
        # Both searches stop within their gap; the free one may use all devices, too.
        free = matched
    job = with_batch(model, global_batch)
    return Comparison(
        matched=_contest(matched, naive),
        free=_contest(free, naive),
        waterfall=_waterfall(cluster, job, matched_options, naive, matched, free) if naive else (),
        why_no_naive=why_no_naive,
    )


def _naive(
    cluster: ClusterSpec, model: ModelSpec, global_batch: int | None
) -> tuple[Plan | None, str]:
    """The naive port, or why it does not run."""
    try:
        return naive_port(cluster, model, global_batch), ""
    except InfeasibleError as error:
        return None, error.problem


def _contest(planned: Plan, naive: Plan | None) -> Contest:
    if naive is None:
        return Contest(planned=_outcome(planned), naive=None, speedup=None)
    return Contest(
        planned=_outcome(planned),
        naive=_outcome(naive),
        speedup=planned.predicted.samples_per_s / naive.predicted.samples_per_s,
    )


def _outcome(plan: Plan) -> Outcome:
    return Outcome(
        samples_per_s=plan.predicted.samples_per_s, step_ms=plan.predicted.step_ms, plan=plan
    )


def _waterfall(
    cluster: ClusterSpec,
    job: ModelSpec,
    options: SearchOptions,
    naive: Plan,
    matched: Plan,
    free: Plan,
) -> tuple[Lever, ...]:
    """Levers one after another; a lever that does not help leaves the bar where it is.

    Every search stops within its gap, so a bar is never shown below the plan that it leads to.
    """
    planned_ms = matched.predicted.step_ms
    vendor = replace(options, kernels="vendor")
    bars = [
        ("naive port", naive.predicted.step_ms),
        ("embedding placement", max(planned_ms, _placed_ms(cluster, job, vendor))),
        ("memory policy", max(planned_ms, _equal_split_ms(cluster, job, vendor, naive))),
        ("batch split", max(planned_ms, _vendor_ms(cluster, job, vendor, matched))),
        ("kernel preselection", planned_ms),
        ("devices left out", free.predicted.step_ms),
    ]
    lowest = accumulate((step_ms for _, step_ms in bars), min)
    return tuple(
        Lever(name=name, step_ms=step_ms) for (name, _), step_ms in zip(bars, lowest, strict=True)
    )


def _placed_ms(cluster: ClusterSpec, job: ModelSpec, options: SearchOptions) -> float:
    """The naive port with each pool's tables placed by the ILP: same batches, same policy."""
    recipe = job.precision.model_copy(update={"embeddings": job.precision.embeddings[:1]})
    same_tables = job.model_copy(update={"precision": recipe})
    choice = naive_choice(cluster, same_tables)
    search = Search(cluster, same_tables, options, time.monotonic() + options.time_limit_s)
    contexts, placements = {}, {}
    for study in next(search.crews()).studies:
        name = study.pool.name
        solved = study.solve_under(
            choice.contexts[name].local_batch, naive_policy(study.device, job)
        )
        contexts[name] = choice.contexts[name]
        placements[name] = solved.placements if solved else choice.placements[name]
    return evaluate(contexts, placements).step_s * MS


def _equal_split_ms(
    cluster: ClusterSpec, job: ModelSpec, options: SearchOptions, naive: Plan
) -> float:
    """Placements and policies free, batches and kernels as in the naive port."""
    search = Search(cluster, job, options, time.monotonic() + options.time_limit_s)
    crew = next(search.crews())
    split = tuple(naive.pools[study.pool.name].local_batch for study in crew.studies)
    scored = search.score(crew, split)
    return scored.step_s * MS if scored else naive.predicted.step_ms


def _vendor_ms(
    cluster: ClusterSpec, job: ModelSpec, options: SearchOptions, matched: Plan
) -> float:
    """Everything free but the kernels.

    A search of its own: the matched plan's split is balanced for its own kernels. It is spared
    where it could say no more: with the vendor's kernels, too, the matched plan is within the gap
    of the best (host, tables or bridge decide its step).
    """
    contexts = {name: ctx.with_kernels("vendor") for name, ctx in contexts_of(matched).items()}
    placements = {name: pool.placements for name, pool in matched.pools.items()}
    same_ms = evaluate(contexts, placements).step_s * MS
    if same_ms <= matched.predicted.step_ms * (1 + options.mip_gap):
        return same_ms
    return min(same_ms, plan_job(cluster, job, options=options).predicted.step_ms)
