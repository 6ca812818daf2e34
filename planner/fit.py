"""Any plan at all, however slow: a crew and a split at which every pool finds room for its tables.

Whether a job can run is decided here, for the plan itself and for what would cure its lack alike,
by the solver that places the tables of any other plan. A pool that holds its tables at some local
batch is taken to hold them at every smaller one: activations and exchange buffers grow with the
batch. So is a pool under the policy that keeps least: what fits beside more fits beside less. One
copy of the tables is tried before several: only where the exchange's buffers take more than the
rows, or constraints ask for it, do more fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.crew import Crew
from planner.groups import GroupedStudy
from planner.ilp.pool import Goal
from planner.specs.errors import InfeasibleError
from planner.study import Solved

ANY = Goal(enough_s=float("inf"))
"""The first placement found will do."""
CLOSE = 1 / 8
"""The largest local batch of a pool is looked for to within this part."""


@dataclass(frozen=True)
class Fit:
    """A crew at work."""

    crew: Crew
    split: tuple[int, ...]
    solved: tuple[Solved, ...]


def first_fit(crews: Iterable[Crew]) -> Fit | None:
    """Of the first crew that holds the tables; None if none does."""
    return next((found for found in map(_fit_or_refused, crews) if found is not None), None)


def _fit_or_refused(crew: Crew) -> Fit | None:
    try:
        return _fit(crew)
    except InfeasibleError:  # a table's constraints, or a device's precisions, forbid this crew
        return None


def _fit(crew: Crew) -> Fit | None:
    """The equal split, or the nearest to it that the pools' memory allows."""
    box = crew.space.root
    assert box is not None, "crews reach the batch"
    equal = [crew.space.global_batch / crew.devices] * len(crew.studies)
    split = crew.space.nearest(box, equal)
    if split is not None and all(map(_solved, crew.studies, split)):
        return _at(crew, split)
    if len(crew.studies) == 1 or not all(map(_solved, crew.studies, (low for low, _ in box))):
        return None
    allowed = crew.space.tighten(
        tuple(
            (low, _most(study, low, high))
            for study, (low, high) in zip(crew.studies, box, strict=True)
        )
    )
    split = crew.space.nearest(allowed, equal) if allowed is not None else None
    if split is None or not all(map(_solved, crew.studies, split)):
        return None
    return _at(crew, split)


def _at(crew: Crew, split: tuple[int, ...]) -> Fit:
    solved = [_solved(study, batch) for study, batch in zip(crew.studies, split, strict=True)]
    return Fit(crew, split, tuple(one for one in solved if one is not None))


def _solved(study: GroupedStudy, batch: int) -> Solved | None:
    found = (one.solve_under(batch, one.thriftiest(batch).policy, ANY) for one in study.allowed)
    return next((one for one in found if one is not None), None)


def _most(study: GroupedStudy, low: int, high: int) -> int:
    """About the largest local batch in [low, high] that the pool holds; it holds ``low``."""
    while high - low > low * CLOSE:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _solved(study, middle) else (low, middle - 1)
    return low
