"""The folder of one run: its plan, its records, its result, its status.

* ``plan.json``: the plan at work now; ``plan-N.json``: the one of attempt N, after planning again.
* ``metrics.jsonl``: one training record a line. After a restart the steps since the checkpoint come
  again, with their ``attempt``.
* ``events.jsonl``: everything else that happened, with time, attempt, rank and pool.
* ``status.json``: see ``runtime.observe.status``. ``result.json``: the outcome.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.specs.base import write_atomically
from planner.specs.errors import SpecError, UsageError
from planner.specs.plan import Plan, save_plan
from runtime.finite import finite
from runtime.observe.status import StatusFile, first_status, now, pools_of

CHECKPOINTS = "checkpoints"
"""Where a run saves, in its folder, unless told otherwise."""
FIRST_SIGNS = ("metrics", "checkpoint", "result")
"""Events that show that a run has begun to train."""


def check_folder(path: Path) -> None:
    """
    Raises:
        UsageError: ``path`` is taken, or cannot be made.
    """
    existing = next(parent for parent in [path, *path.absolute().parents] if parent.exists())
    if not existing.is_dir():
        raise UsageError(
            f"{existing} is a file", field="--out", value=str(path), fix="name a folder"
        )
    if existing == path and any(path.iterdir()):
        raise UsageError(
            "this folder is not empty",
            field="--out",
            value=str(path),
            fix="name a new folder, so that no earlier run is overwritten",
        )
    if not os.access(existing, os.W_OK):
        raise UsageError(
            f"{existing} cannot be written", field="--out", value=str(path), fix="name another one"
        )


def default_folder(plan: Plan) -> Path:
    """runs/<model>-<time>, in the current folder."""
    return Path("runs") / f"{plan.model.name}-{time.strftime('%Y%m%d-%H%M%S')}"


class RunFolder:
    """The record of one run.

    The folder appears when training has begun, so that a run that cannot begin leaves nothing.

    Args:
        resumed: the folder holds an earlier part of this run, which is added to.
    """

    def __init__(self, path: Path, plan: Plan, resumed: bool = False) -> None:
        """
        Raises:
            UsageError: ``path`` is taken, or cannot be made.
        """
        if not resumed:
            check_folder(path)
        self.path = path
        self.attempt = 1
        self._plan = plan
        self._status: StatusFile | None = None
        self._waiting: list[dict[str, Any]] = []
        """Events from before the folder."""

    @property
    def error_file(self) -> Path:
        """Where tracebacks go."""
        return self.path / "error.txt"

    @property
    def begun(self) -> bool:
        """Whether the folder is there."""
        return self._status is not None

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Record a job event.

        Raises:
            SpecError: the folder cannot be written.
        """
        kind = event["kind"]
        if kind in FIRST_SIGNS and not self.begun:
            self._begin()
        if kind == "attempt":
            self.attempt = event["number"]
            self._plan = event["plan"]
            self._on_attempt()
        if kind == "metrics":
            self._append("metrics.jsonl", {**_plain(event), "attempt": self.attempt})
        elif kind != "result":
            self._log({"time": now(), "event": kind, "attempt": self.attempt, **_plain(event)})
        if self._status is not None:
            self._status.on_event(event)

    def end(self, result: Mapping[str, Any]) -> None:
        """Write result.json; the run has finished."""
        text = json.dumps(finite(result), indent=2, allow_nan=False)
        write_atomically(self.path / "result.json", text + "\n")
        if self._status is not None:
            self._status.update(state="finished", exit_code=0)

    def fail(self, problem: str, exit_code: int) -> None:
        """The run has ended without a result."""
        if self._status is not None:
            self._status.add_incident(problem)
            self._status.update(state="failed", exit_code=exit_code)

    def _begin(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(
                f"cannot be made: {error.strerror}", file=self.path, fix="give another --out"
            ) from None
        save_plan(self._plan, self.path / "plan.json")
        self._status = StatusFile(self.path, first_status(self._plan))
        self._status.update(attempt=self.attempt)
        for record in self._waiting:
            self._append("events.jsonl", record)
        self._waiting = []

    def _on_attempt(self) -> None:
        if self._status is None or self.attempt == 1:
            return
        save_plan(self._plan, self.path / "plan.json")
        save_plan(self._plan, self.path / f"plan-{self.attempt}.json")
        self._status.update(
            attempt=self.attempt,
            plan_fingerprint=self._plan.fingerprint,
            pools=pools_of(self._plan),
            predicted_step_ms=self._plan.predicted.step_ms,
        )

    def _log(self, record: dict[str, Any]) -> None:
        if self.begun:
            self._append("events.jsonl", record)
        else:
            self._waiting.append(record)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(finite(record), allow_nan=False) + "\n")


def _plain(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event as JSON data; a plan as its fingerprint."""
    return {
        key: value.fingerprint if isinstance(value, Plan) else value
        for key, value in event.items()
        if key not in ("kind", "task")
    }
