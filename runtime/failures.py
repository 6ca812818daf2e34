"""From many workers' errors to the one that caused them, on one screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.specs import errors as hwplan_errors
from planner.specs.base import write_atomically
from planner.specs.errors import HwplanError, RunError
from runtime.pools import Slot

SHOWN_CHARACTERS = 600


def explain(
    reports: Sequence[Mapping[str, Any]],
    ray_error: Exception | None,
    slots: Sequence[Slot],
    error_file: Path,
) -> HwplanError:
    """The error to raise in the driver; what does not fit on a screen goes to ``error_file``.

    Args:
        reports: errors that workers reported (``runtime.worker.describe``), oldest first. When
            one worker fails, its peers soon report broken connections: the oldest is the cause,
            unless a worker died without a word.
        ray_error: what Ray Train raised, if anything.
    """
    own = next((report for report in reports if report["exit_code"] is not None), None)
    if own is not None:
        return _as_raised(own)
    details = [str(report["traceback"]) for report in reports] + [f"Ray: {ray_error}"]
    error_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(error_file, "\n\n".join(details))
    failures = getattr(ray_error, "worker_failures", {})
    reported = {report["worker"] for report in reports}
    for index in sorted(set(failures) - reported):
        slot = slots[index]
        return RunError(
            f"worker {index} (pool {slot.pool}, rank {slot.pool_rank}, on {slot.node.address}) "
            "ended without a Python error: killed from outside (out of memory?) or crashed",
            fix="look for the kernel's out-of-memory killer on that node (dmesg) and compare its "
            f"memory with the plan's (hwplan show); what Ray saw is in {error_file}",
        )
    if reports:
        first = reports[0]
        slot = slots[first["worker"]]
        return RunError(
            f"worker {first['worker']} (pool {slot.pool}, rank {slot.pool_rank}, "
            f"on {slot.node.address}) failed: {_short(first['problem'])}",
            fix=f"the whole traceback is in {error_file}",
        )
    return RunError(
        f"Ray could not run the job: {_short(ray_error)}",
        fix="see that the cluster's nodes are free (ray status) and run the same Python, Ray, "
        f"torch and hwplan versions as this machine; what Ray saw is in {error_file}",
    )


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
