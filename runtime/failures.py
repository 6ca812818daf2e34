"""From many workers' errors to the one that caused them, on one screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from planner.specs import errors as hwplan_errors
from planner.specs.base import write_atomically
from planner.specs.errors import HwplanError, RunError
from planner.specs.plan import Plan
from planner.specs.units import GIB
from runtime.heartbeat import Beat
from runtime.pools import Slot

SHOWN_CHARACTERS = 600
STILL_S = 20.0
"""A worker silent for so long while others still beat stands still."""
TIMEOUT_WORDS = ("timed out", "timeout", "time-out", "watchdog")

Cause = Literal["crash", "killed", "hang", "out_of_memory", "cluster"]
RECOVERABLE: tuple[Cause, ...] = ("killed", "hang", "cluster")
"""What another start may cure: the rest would happen again."""


class JobFailed(RunError):
    """A job that its workers or its cluster ended. Exit code 4.

    Args:
        cause: ``killed``: a worker process or its node is gone. ``hang``: a collective timed out.
            ``cluster``: Ray could not start or keep the workers. ``out_of_memory``: of a device or
            the host. ``crash``: any other exception.
    """

    def __init__(self, problem: str, *, cause: Cause, fix: str = "") -> None:
        super().__init__(problem, fix=fix)
        self.cause = cause

    @property
    def recoverable(self) -> bool:
        """Whether another start may go well."""
        return self.cause in RECOVERABLE


def explain(
    reports: Sequence[Mapping[str, Any]],
    ray_error: Exception | None,
    slots: Sequence[Slot],
    error_file: Path,
    *,
    beats: Sequence[Beat] = (),
    plan: Plan | None = None,
) -> HwplanError:
    """The error to raise in the driver; what does not fit on a screen goes to ``error_file``.

    Args:
        reports: errors that workers reported (``runtime.worker.describe``), oldest first. When
            one worker fails, its peers soon report broken connections: the oldest is the cause,
            unless a worker died without a word.
        ray_error: what Ray Train raised, if anything.
        beats: every worker's last sign of life.
        plan: that ran, for its memory table.
    """
    own = next((report for report in reports if report["exit_code"] is not None), None)
    if own is not None:
        return _as_raised(own)
    details = [str(report["traceback"]) for report in reports] + [f"Ray: {ray_error}"]
    error_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(error_file, "\n\n".join(details))
    full = next((report for report in reports if report["out_of_memory"]), None)
    if full is not None:
        return _out_of_memory(full, slots, plan, error_file)
    failures = getattr(ray_error, "worker_failures", {})
    reported = {report["worker"] for report in reports}
    for index in sorted(set(failures) - reported):
        return JobFailed(
            f"{_name(index, slots)} ended without a Python error: killed from outside (out of "
            "memory?) or crashed",
            cause="killed",
            fix="look for the kernel's out-of-memory killer on that node (dmesg) and compare its "
            f"memory with the plan's (hwplan show); what Ray saw is in {error_file}",
        )
    if reports and _timed_out(reports[0]):
        return JobFailed(
            f"a collective timed out: {_who_hangs(reports, beats, slots)}",
            cause="hang",
            fix="look at that process and its node (py-spy dump, nvidia-smi or rocm-smi, dmesg); "
            f"the tracebacks are in {error_file}",
        )
    if reports:
        first = reports[0]
        gone = any(word in str(first["problem"]).lower() for word in ("connection closed", "reset"))
        return JobFailed(
            f"{_name(first['worker'], slots)} failed: {_short(first['problem'])}",
            # A peer's end is noticed by its neighbours before Ray knows of it.
            cause="killed" if gone else "crash",
            fix=f"the whole traceback is in {error_file}",
        )
    return JobFailed(
        f"Ray could not run the job: {_short(ray_error)}",
        cause="cluster",
        fix="see that the cluster's nodes are free (ray status) and run the same Python, Ray, "
        f"torch and hwplan versions as this machine; what Ray saw is in {error_file}",
    )


def _name(index: int, slots: Sequence[Slot]) -> str:
    slot = slots[index]
    return f"worker {index} (pool {slot.pool}, rank {slot.pool_rank}, on {slot.node.address})"


def _timed_out(report: Mapping[str, Any]) -> bool:
    text = str(report["problem"]).lower()
    return any(word in text for word in TIMEOUT_WORDS)


def _who_hangs(
    reports: Sequence[Mapping[str, Any]], beats: Sequence[Beat], slots: Sequence[Slot]
) -> str:
    """The workers that show no sign of life, else those that are behind, else that none is."""
    still = [beat for beat in beats if beat.age_s >= STILL_S]
    if still:
        named = ", ".join(
            f"{_name(beat.worker, slots)} gave no sign of life for {beat.age_s:.0f} s "
            f"(step {beat.step})"
            for beat in still
        )
        return named
    reported = {report["worker"] for report in reports}
    silent = [beat for beat in beats if beat.worker not in reported]
    if silent:
        return "still at work or stuck: " + ", ".join(
            f"{_name(beat.worker, slots)} at step {beat.step}" for beat in silent
        )
    return f"{_name(reports[0]['worker'], slots)} waited in vain: {_short(reports[0]['problem'])}"


def _out_of_memory(
    report: Mapping[str, Any], slots: Sequence[Slot], plan: Plan | None, error_file: Path
) -> JobFailed:
    """Says what was predicted for that rank, category by category."""
    slot, predicted = slots[report["worker"]], ""
    pool = None if plan is None else plan.pools.get(slot.pool)
    if pool is not None and slot.pool_rank < len(pool.memory_bytes):
        usage = pool.memory_bytes[slot.pool_rank]
        rows = sorted(
            ((size, name) for name, size in usage.items() if name not in _TOTALS and size),
            reverse=True,
        )
        predicted = "\n  Predicted for this rank: " + ", ".join(
            [
                f"{usage.get('total', 0) / GIB:.2f} of {usage.get('capacity', 0) / GIB:.2f} GiB",
                *(f"{name.replace('_', ' ')} {size / GIB:.2f}" for size, name in rows),
            ]
        )
    return JobFailed(
        f"{_name(report['worker'], slots)} ran out of memory: "
        f"{_short(report['problem'])}{predicted}",
        cause="out_of_memory",
        fix="plan again with memory to spare (reserved_memory of the pool in the cluster file, or "
        f"--on-out-of-memory replan); the whole traceback is in {error_file}",
    )


_TOTALS = ("total", "capacity", "host", "host_capacity")


def _as_raised(report: Mapping[str, Any]) -> HwplanError:
    """The HwplanError that a worker raised, as the class it was; its text holds the fix."""
    kinds: dict[str, type[HwplanError]] = {
        kind.__name__: kind
        for kind in (
            hwplan_errors.SpecError,
            hwplan_errors.UsageError,
            hwplan_errors.InfeasibleError,
            RunError,
        )
    }
    # Several problems in one file are a SpecError like one: the text already lists them.
    kind = kinds.get(report["type"], hwplan_errors.SpecError)
    return kind(report["problem"])


def _short(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"
