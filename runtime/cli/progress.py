"""The progress line of a run, and its result for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table

from planner.specs.plan import Plan
from trainers.task import DEFAULT_SYNTHETIC_STEPS, TrainTask

PLAIN_INTERVAL_S = 5.0
"""Between lines where stderr is no terminal."""
SLOW_BRIDGE = 0.8
"""Share of the planned bandwidth below which a bridge is worth a line."""


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _pools(plan: Plan) -> str:
    return ", ".join(f"{n} {p.ranks} x {p.local_batch}" for n, p in plan.pools.items())


class Progress:
    """One line on stderr that is rewritten on a terminal, and repeated now and then elsewhere."""

    def __init__(self, task: TrainTask) -> None:
        self._steps = task.steps
        if task.steps is None and task.data.synthetic:
            self._steps = DEFAULT_SYNTHETIC_STEPS
        self._status: Status | None = None
        if sys.stderr.isatty():
            self._status = Console(stderr=True).status("starting Ray and the workers …")
        self._printed_at = 0.0

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        else:
            print("starting Ray and the workers …", file=sys.stderr, flush=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Show what a rank reported."""
        if event["kind"] == "started":
            self._show("building the model …")
        elif event["kind"] == "metrics":
            last = event["step"] == self._steps
            if self._status is not None or last or self._due():
                self._show(self.line(event))
            for slow in event["stragglers"]:
                self._say(
                    f"slow: rank {slow['rank']} (pool {slow['pool']}, rank {slow['pool_rank']}) "
                    f"takes {slow['own_ms']:.1f} ms a step for {slow['part']}, "
                    f"usual are {slow['usual_ms']:.1f} ms"
                )
        elif event["kind"] == "bridge":
            measured, planned = event["measured_bytes_per_s"], event["planned_bytes_per_s"]
            if measured < SLOW_BRIDGE * planned:
                self._say(
                    f"the bridge carries {measured * 8e-9:.2f} Gbit/s, the plan counts on "
                    f"{planned * 8e-9:.2f}: set bridge.gbps in the cluster file and plan again"
                )
        elif event["kind"] == "checkpoint":
            self._show(f"step {event['step']}: checkpoint saved")
        elif event["kind"] == "resumed":
            self._say(f"going on from step {event['step']} ({event['checkpoint']})")
        elif event["kind"] == "damaged":
            self._say(f"warning: left out {event['checkpoint']}: {event['why']}")
        elif event["kind"] == "failure":
            self._say(f"failed: {event['problem']}")
        elif event["kind"] == "replanned":
            self._say(f"{event['why']}: planned again, {_pools(event['plan'])}")
        elif event["kind"] == "attempt" and event["number"] > 1:
            self._say(f"attempt {event['number']}: starting the workers again …")

    def line(self, record: Mapping[str, Any]) -> str:
        """step, samples/s, loss, AUC, predicted and measured step time."""
        total = "" if self._steps is None else f"/{self._steps}"
        return (
            f"step {record['step']}{total}  "
            f"{_number(record['samples_per_s'], ',.0f')} samples/s  "
            f"loss {_number(record['loss'], '.4f')}  AUC {_number(record['auc'], '.4f')}  "
            f"step {_number(record['measured_step_ms'], '.2f')} ms "
            f"(predicted {_number(record['predicted_step_ms'], '.2f')})"
        )

    def _say(self, text: str) -> None:
        """A line that stays."""
        if self._status is not None:
            self._status.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def _due(self) -> bool:
        return time.monotonic() - self._printed_at >= PLAIN_INTERVAL_S

    def _show(self, text: str) -> None:
        self._printed_at = time.monotonic()
        if self._status is not None:
            self._status.update(text)
        else:
            print(text, file=sys.stderr, flush=True)


def render_result(result: Mapping[str, Any], console: Console) -> None:
    """What came out, as a table."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    step = result["step_ms"]
    exchange = result["exchange"]
    measured_on = f"{result['eval_samples']:,} held-out samples"
    if result["metrics_on"] == "training":
        measured_on = "the last training samples"
    rows = {
        "steps": f"{result['steps']:,} of {result['global_batch']:,} samples",
        "samples/s": _number(result["samples_per_s"], ",.0f"),
        "step": f"{_number(step['measured'], '.2f')} ms, predicted {step['predicted']:.2f} ms",
        "metrics on": measured_on,
        "loss": _number(result["loss"], ".5f"),
        "AUC": _number(result["auc"], ".4f"),
        "normalized entropy": _number(result["ne"], ".4f"),
        "calibration": _number(result["calibration"], ".4f"),
        "pools": ", ".join(
            f"{name} {pool['ranks']} x {pool['local_batch']}"
            for name, pool in result["pools"].items()
        ),
        "bridge": f"{exchange['bridge_bytes_sent'] / 1e6:,.1f} MB sent by rank 0 in "
        f"{exchange['bridge_s']:.2f} s",
        "dense exchange": f"{exchange['dense_s']:.2f} s, "
        f"{exchange['dense_exposed_s']:.2f} s of it not hidden behind backward",
        "record": result["out"],
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
