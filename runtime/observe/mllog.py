"""MLPerf's log lines, ``:::MLLOG {json}``, for tools that read the logs of MLPerf training runs.

Keys and event types are those of MLCommons' logging package (mlperf_logging.mllog.constants);
``tracked_stats`` is the key for what a benchmark does not ask for. ``run_start`` is when workers
begin to train, as the rules want it: before the first sample is read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from planner.specs.errors import SpecError
from planner.specs.plan import Plan

START, END, POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"


class MlperfLog:
    """One run's log file, a line per event."""

    def __init__(self, path: Path, plan: Plan, seed: int) -> None:
        """
        Raises:
            SpecError: the file cannot be made.
        """
        try:
            self._stream: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise SpecError(
                f"cannot be written: {error.strerror}", file=path, fix="give another --mllog"
            ) from None
        self._running = False
        optimizer = plan.model.optimizer
        for key, value in (
            ("submission_benchmark", plan.model.name),
            ("submission_platform", plan.cluster.name),
            ("global_batch_size", plan.global_batch),
            ("seed", seed),
            ("opt_name", optimizer.dense.name),
            ("opt_base_learning_rate", optimizer.dense.learning_rate),
            ("embedding_opt_name", optimizer.sparse.name),
            ("embedding_opt_base_learning_rate", optimizer.sparse.learning_rate),
        ):
            self._line(POINT, key, value)
        self._line(START, "init_start", None)

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Write the lines of a job event."""
        if event["kind"] == "started" and not self._running:
            self._running = True
            self._line(END, "init_stop", None)
            self._line(START, "run_start", None)
        elif event["kind"] == "metrics":
            stats = {name: event[name] for name in ("loss", "auc", "samples_per_s")}
            step_ms = event["measured_step_ms"]
            stats["step_time"] = None if step_ms is None else step_ms / 1e3
            known = {name: value for name, value in stats.items() if value is not None}
            self._line(POINT, "tracked_stats", known, {"samples_count": event["samples"]})
        elif event["kind"] == "result":
            result = event["result"]
            count = {"samples_count": result["samples"]}
            if result["metrics_on"] == "holdout" and result["auc"] is not None:
                self._line(POINT, "eval_accuracy", result["auc"], count)
            self._line(POINT, "eval_samples", result["eval_samples"])
            self._line(POINT, "train_samples", result["samples"])
            self._stop("success")

    def close(self) -> None:
        """End the log; a run that has not ended well was aborted."""
        if self._running:
            self._stop("aborted")
        self._stream.close()

    def _stop(self, status: str) -> None:
        self._line(END, "run_stop", None, {"status": status})
        self._running = False

    def _line(
        self, event_type: str, key: str, value: Any, metadata: Mapping[str, Any] | None = None
    ) -> None:
        line = {
            "namespace": "",
            "time_ms": time.time_ns() // 1_000_000,
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": dict(metadata or {}),
        }
        self._stream.write(f":::MLLOG {json.dumps(line)}\n")
        self._stream.flush()
