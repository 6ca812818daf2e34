"""One training run: check everything, run it on Ray, keep its record in one folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.specs.base import write_atomically
from planner.specs.errors import SpecError, UsageError
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan, save_plan
from runtime.finite import finite
from trainers.task import TrainTask

Event = dict[str, Any]


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


def check_place(address: str | None, data_paths: Sequence[str] = ()) -> None:
    """Whether somebody listens at ``address`` and the files exist: before a plan takes minutes.

    On another cluster the files are on the workers' nodes, and they check for themselves.

    Raises:
        UsageError: no Ray cluster there. SpecError: a file that cannot be read.
    """
    if address is not None:
        from runtime.embedded import check_listening

        check_listening(address)
        return
    for path in data_paths:
        if not os.path.exists(path):
            raise SpecError(
                "this data file does not exist", file=path, fix="check the path given to --data"
            )


class RunFolder:
    """plan.json, metrics.jsonl (one record per report) and result.json of one run.

    The folder appears when training has begun, so that a run that cannot begin leaves nothing.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        """
        Raises:
            UsageError: ``path`` is taken, or cannot be made.
        """
        check_folder(path)
        self.path = path
        self._plan = plan

    @property
    def error_file(self) -> Path:
        """Where tracebacks go."""
        return self.path / "error.txt"

    def begin(self) -> None:
        """Make the folder and put the plan into it.

        Raises:
            SpecError: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(
                f"cannot be made: {error.strerror}", file=self.path, fix="give another --out"
            ) from None
        save_plan(self._plan, self.path / "plan.json")

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(finite(record), allow_nan=False) + "\n")

    def end(self, result: Mapping[str, Any]) -> None:
        """Write result.json."""
        text = json.dumps(finite(result), indent=2, allow_nan=False)
        write_atomically(self.path / "result.json", text + "\n")


def default_folder(plan: Plan) -> Path:
    """runs/<model>-<time>, in the current folder."""
    return Path("runs") / f"{plan.model.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_trainable(model: ModelSpec) -> None:
    """
    Raises:
        UsageError: the model can only be planned: for its architecture, or for a table's width.
    """
    why_not = model.why_not_trainable
    if why_not:
        raise UsageError(
            f"model {model.name} can be planned but not trained: {why_not}",
            field="--model",
            fix="see hwplan models for those that can be trained, or change a copy of its file",
        )


def check_task(task: TrainTask, address: str | None) -> None:
    """What can be known before any process starts.

    Raises:
        UsageError: the model cannot be trained, or does not fit the data.
        SpecError: unusable data.
    """
    check_trainable(task.plan.model)
    if address is None:
        # On another cluster the files are on the workers' nodes, and they check for themselves.
        from trainers.data.source import open_source

        open_source(task)


def train(
    task: TrainTask,
    folder: RunFolder,
    address: str | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> dict[str, Any]:
    """Run ``task`` on the Ray cluster at ``address``, or on an embedded one.

    Returns:
        The summary that result.json holds.

    Raises:
        UsageError, SpecError: bad input. RunError: the run failed.
    """
    check_task(task, address)
    from runtime.embedded import ray_session

    begun = False

    def record(event: Event) -> None:
        nonlocal begun
        if not begun and event["kind"] in ("metrics", "result"):
            folder.begin()
            begun = True
        if event["kind"] == "metrics":
            folder.add_metrics(
                {key: value for key, value in event.items() if key not in ("kind", "task")}
            )
        on_event(event)

    with ray_session(task.plan.cluster, address):
        from runtime.launch import run_tasks

        (event,) = run_tasks([task], record, folder.error_file)
    result = summary(task.plan, event)
    result["out"] = str(folder.path)
    folder.end(result)
    return result


def summary(plan: Plan, event: Mapping[str, Any]) -> dict[str, Any]:
    """A result event as the JSON that users see."""
    result = dict(event["result"])
    bridge = event["bridge"]
    shown = (
        "samples_per_s",
        "loss",
        "auc",
        "ne",
        "calibration",
        "steps",
        "samples",
        "metrics_on",
        "eval_samples",
        "malformed_lines",
        "malformed_examples",
        "dropped_samples",
    )
    answer: dict[str, Any] = finite(
        {
            **{name: result[name] for name in shown},
            "step_ms": {"predicted": plan.predicted.step_ms, "measured": result["step_ms"]},
            "exchange": {
                "dense_bytes": result["dense_exchange_bytes"],
                "embedding_bytes": result["embedding_exchange_bytes"],
                "bridge_bytes_sent": bridge["bytes"],
                "bridge_s": bridge["seconds"],
                "bridge_calls": bridge["calls"],
            },
            "global_batch": plan.global_batch,
            "pools": {
                name: {"ranks": pool.ranks, "local_batch": pool.local_batch}
                for name, pool in plan.pools.items()
            },
            "plan_fingerprint": plan.fingerprint,
        }
    )
    return answer
