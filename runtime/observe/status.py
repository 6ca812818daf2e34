"""A run's status file: what it is doing now, for ``hwplan status`` and for scripts.

``ray job submit`` knows one exit code for all failures, so what a run came to stands here too.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from planner.specs.base import (
    NonNegativeInt,
    PositiveInt,
    Spec,
    read_text,
    validate,
    write_atomically,
)
from planner.specs.errors import SpecError, UsageError
from planner.specs.plan import Plan
from runtime.finite import finite

STATUS_FILE = "status.json"
State = Literal["starting", "training", "recovering", "finished", "failed", "stopped"]
STALE_S = 600.0
"""A run that has not written for so long is taken for dead."""


class PoolStatus(Spec):
    """What a pool does in the present plan."""

    device: str
    ranks: PositiveInt
    local_batch: PositiveInt


class RunStatus(Spec):
    """Content of the status file."""

    state: State
    model: str
    cluster: str
    plan_fingerprint: str
    global_batch: PositiveInt
    pools: dict[str, PoolStatus]
    attempt: PositiveInt = 1
    """1, and one more after each failure or change of the cluster."""
    step: NonNegativeInt = 0
    samples: NonNegativeInt = 0
    checkpoint_step: NonNegativeInt | None = None
    loss: float | None = None
    auc: float | None = None
    samples_per_s: float | None = None
    measured_step_ms: float | None = None
    predicted_step_ms: float
    incidents: tuple[str, ...] = Field(default=(), max_length=100)
    """What went wrong so far, oldest first."""
    exit_code: int | None = None
    host: str
    pid: PositiveInt
    started: str
    updated: str
    """UTC, ISO 8601."""

    @property
    def age_s(self) -> float:
        """Seconds since the run last wrote."""
        return (datetime.now(UTC) - datetime.fromisoformat(self.updated)).total_seconds()

    @property
    def alive(self) -> bool:
        """Whether its driver still runs, as far as can be seen from here."""
        if self.state in ("finished", "failed", "stopped"):
            return False
        if self.host == socket.gethostname():
            return Path(f"/proc/{self.pid}").exists()
        return self.age_s < STALE_S


def now() -> str:
    """UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class StatusFile:
    """Keeps the status of a run in its folder."""

    def __init__(self, folder: Path, first: RunStatus) -> None:
        self._path = folder / STATUS_FILE
        self._status = first

    def update(self, **changes: Any) -> None:
        """Write the status with some fields changed.

        Raises:
            SpecError: the folder is not writable.
        """
        self._status = self._status.model_copy(update={**changes, "updated": now()})
        text = json.dumps(finite(self._status.model_dump(mode="json")), indent=2)
        write_atomically(self._path, text + "\n")

    def add_incident(self, text: str) -> None:
        """Note what went wrong (the newest hundred are kept)."""
        self.update(incidents=(*self._status.incidents, f"{now()} {text}")[-100:])

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Write what a job event says."""
        if event["kind"] == "started":
            self.update(state="training")
        elif event["kind"] == "metrics":
            fields = ("step", "samples", "loss", "auc", "samples_per_s", "measured_step_ms")
            self.update(state="training", **{name: event[name] for name in fields})
        elif event["kind"] == "checkpoint":
            self.update(checkpoint_step=event["step"])
        elif event["kind"] == "failure":
            self.add_incident(event["problem"])
            self.update(state="recovering")
        elif event["kind"] == "replanned":
            self.add_incident(f"planned again: {event['why']}")


def first_status(plan: Plan) -> RunStatus:
    """The status of a run that is about to start ``plan`` in this process."""
    return RunStatus(
        state="starting",
        model=plan.model.name,
        cluster=plan.cluster.name,
        plan_fingerprint=plan.fingerprint,
        global_batch=plan.global_batch,
        pools=pools_of(plan),
        predicted_step_ms=plan.predicted.step_ms,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=now(),
        updated=now(),
    )


def pools_of(plan: Plan) -> dict[str, PoolStatus]:
    """Working pools of a plan."""
    return {
        name: PoolStatus(device=pool.device, ranks=pool.ranks, local_batch=pool.local_batch)
        for name, pool in plan.pools.items()
    }


def load_status(folder: Path) -> RunStatus:
    """The status of the run in ``folder``.

    Raises:
        UsageError: no run is there. SpecError: the file is damaged.
    """
    path = folder / STATUS_FILE
    if not path.is_file():
        raise UsageError(
            "no run here: there is no status file",
            field="RUN",
            value=str(folder),
            fix="give the folder that hwplan train printed as record (or gave with --out)",
        )
    try:
        data = json.loads(read_text(path, "status"))
    except ValueError:
        raise SpecError("not valid JSON", file=path, fix="look at the run itself") from None
    return validate(RunStatus, data, path)
