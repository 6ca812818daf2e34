"""One thing of a plan changed, everything else as planned: what the step would be, does it fit."""

from __future__ import annotations

from planner.evaluate import MS
from planner.explain.job import Job
from planner.specs.base import PositiveFloat, Spec
from planner.specs.units import GIB


class Change(Spec):
    """A plan with one change, priced again."""

    what: str
    planned: str
    """What the plan does."""
    instead: str
    """What the change does; empty if the plan does so already, or nothing else can be done."""
    step_ms: PositiveFloat
    delta_ms: float
    """Over the plan's step; below 0: the change would be faster."""
    fits: bool
    short_of: str = ""
    """Where memory is missing, if any is."""

    @property
    def made(self) -> bool:
        """Whether anything is changed at all."""
        return bool(self.instead)


def changed(what: str, planned: str, instead: str, before: Job, after: Job) -> Change:
    """``after`` against ``before``."""
    return Change(
        what=what,
        planned=planned,
        instead=instead,
        step_ms=after.step_ms,
        delta_ms=(after.step_s - before.step_s) * MS,
        fits=after.shortage() is None,
        short_of=short_of(after),
    )


def unchanged(what: str, planned: str, before: Job) -> Change:
    """The plan does what the change would, or the change cannot be made."""
    return changed(what, planned, "", before, before)


def short_of(job: Job) -> str:
    """The worst shortage of memory in words; empty if all fits."""
    short = job.shortage()
    if short is None:
        return ""
    pool, rank, what, excess = short
    return f"rank {rank} of {pool} lacks {excess / GIB:.1f} GiB of {what} memory"
