"""The considered table of a search: its best plans, and what it gave up by a bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.cost.context import PoolContext
from planner.evaluate import MS
from planner.specs.plan import Alternative

if TYPE_CHECKING:
    from planner.search import Scored, Search


def considered(search: Search) -> Iterator[Alternative]:
    """The best splits that were solved, then the crews that were given up by their bound."""
    ranked = sorted(
        search.scored.values(),
        key=lambda one: (one is not search.best, one.step_s, one.crew.label, one.split),
    )
    top_k = search.options.top_k
    for scored in ranked[:top_k]:
        yield Alternative(
            description=_describe(scored),
            pools=tuple(study.pool.name for study in scored.crew.studies),
            local_batch={
                study.pool.name: batch
                for study, batch in zip(scored.crew.studies, scored.split, strict=True)
            },
            step_ms=scored.step_s * MS,
            samples_per_s=search.model.global_batch / scored.step_s,
            note="chosen" if scored is search.best else "",
            chosen=scored is search.best,
        )
    shown = {scored.crew.label for scored in ranked[:top_k]}
    rest = sorted(
        (bound_s, label) for label, (_, bound_s) in search.crew_bounds.items() if label not in shown
    )
    for bound_s, label in rest[: max(0, top_k - len(ranked))]:
        crew, _ = search.crew_bounds[label]
        fits = bound_s < float("inf")
        root = crew.space.root or ()
        yield Alternative(
            description=label,
            pools=tuple(study.pool.name for study in crew.studies),
            local_batch={
                study.pool.name: low for study, (low, _) in zip(crew.studies, root, strict=True)
            },
            step_ms=None,
            samples_per_s=None,
            note=f"excluded: at least {bound_s * MS:.4g} ms" if fits else "does not fit",
        )


def _describe(scored: Scored) -> str:
    words = ", ".join(_way_of_working(one.context) for one in scored.solved)
    return f"{scored.crew.label}; {words}"


def _way_of_working(ctx: PoolContext) -> str:
    recomputed = " recomputed" if ctx.policy.recompute else ""
    groups = f" in {ctx.replica_groups} groups" if ctx.replica_groups > 1 else ""
    return f"{ctx.policy.compute_precision}{recomputed}{groups}"
