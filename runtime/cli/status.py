"""``hwplan status``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli.options import AsJson
from runtime.cli.output import write_json, write_report

if TYPE_CHECKING:
    from rich.console import Console

    from runtime.observe.status import RunStatus


def status(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder (hwplan train --out).")
    ],
    as_json: AsJson = False,
) -> None:
    """Say what a run is doing: its step, speed, checkpoint, and what went wrong so far.

    Exit code: 0 while it runs or once it has finished, 4 if it failed or its driver is gone.

    In Python: runtime.observe.status.load_status(folder).
    """
    from runtime.observe.status import load_status

    found = load_status(run)
    if as_json:
        write_json(found.model_dump(mode="json") | {"alive": found.alive})
    else:
        write_report(lambda console: render_status(found, console))
    if found.state == "failed" or not (found.alive or found.state in ("finished", "stopped")):
        raise typer.Exit(4)


def render_status(found: RunStatus, console: Console) -> None:
    """A run's status for people."""
    from rich.markup import escape

    from planner.report.text import indented, milliseconds, rate

    state: str = found.state
    if not found.alive and state not in ("finished", "failed", "stopped"):
        state = f"gone while {state}"
    console.print(f"[bold]{escape(f'{found.model} on {found.cluster}: {state}')}[/bold]")
    speed = "" if found.samples_per_s is None else f", {rate(found.samples_per_s)}"
    indented(console, f"step {found.step:,}, {found.samples:,} samples{speed}")
    measured = found.measured_step_ms
    indented(
        console,
        f"step time {'-' if measured is None else milliseconds(measured)} ms, "
        f"predicted {milliseconds(found.predicted_step_ms)} ms",
    )
    if found.loss is not None:
        auc = "" if found.auc is None else f", AUC {found.auc:.4f}"
        indented(console, f"loss {found.loss:.5f}{auc}")
    kept = "none" if found.checkpoint_step is None else f"of step {found.checkpoint_step:,}"
    indented(console, f"last checkpoint: {kept}")
    pools = ", ".join(
        f"{name} {pool.ranks} x {pool.local_batch:,} ({Path(pool.device).stem})"
        for name, pool in found.pools.items()
    )
    indented(console, escape(f"pools: {pools}; attempt {found.attempt}"))
    for incident in found.incidents:
        indented(console, escape(incident))
    indented(
        console,
        escape(f"driver: process {found.pid} on {found.host}; last word {found.updated}"),
    )
