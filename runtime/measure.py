"""Time several plans against each other on one set of workers."""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.specs.plan import Plan
from runtime.stdout import stdout_for_results
from runtime.train import check_task
from trainers.task import TrainTask

ROUNDS = 4
WARMUP_STEPS = 4


@dataclass(frozen=True)
class Measurement:
    """Measured speed of one plan."""

    step_ms: float
    """Median over the rounds of the typical step."""
    samples_per_s: float
    """Global batch over that step."""
    predicted_step_ms: float
    rounds_ms: tuple[float, ...]
    """Typical step of each round (whole exchange intervals count), in time order."""


def measure(
    plans: Sequence[Plan],
    steps: int,
    address: str | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> list[Measurement]:
    """Run every plan on synthetic samples for at least ``steps`` timed steps.

    All plans must be for one cluster. They take turns (A B A B ...), so that a machine that slows
    down or speeds up meanwhile does so for all of them; workers start only once.

    Raises:
        UsageError: the model cannot be trained, this machine is not the cluster, nobody listens
            at ``address``. RunError: a run failed.
    """
    tasks = [_round(plan, steps, seed) for _ in range(ROUNDS) for plan in plans]
    check_task(tasks[0], address)
    from runtime.embedded import ray_session

    def tell(event: dict[str, Any]) -> None:
        if event["kind"] == "result":
            number = event["task"]
            say(
                f"round {number // len(plans) + 1}/{ROUNDS}, plan {number % len(plans) + 1}/"
                f"{len(plans)}: {event['result']['step_ms']:.2f} ms a step "
                f"(predicted {tasks[number].plan.predicted.step_ms:.2f})"
            )

    say("starting Ray and the workers …")
    error_file = Path(tempfile.gettempdir()) / "hwplan-measure-error.txt"
    with stdout_for_results(), ray_session(plans[0].cluster, address):
        from runtime.launch import run_tasks

        results = run_tasks(tasks, tell, error_file)
    answer = []
    for index, plan in enumerate(plans):
        rounds = tuple(
            float(result["result"]["step_ms"])
            for result in sorted(results, key=lambda result: int(result["task"]))
            if result["task"] % len(plans) == index
        )
        step_ms = statistics.median(rounds)
        answer.append(
            Measurement(
                step_ms=step_ms,
                samples_per_s=1e3 * plan.global_batch / step_ms,
                predicted_step_ms=plan.predicted.step_ms,
                rounds_ms=rounds,
            )
        )
    return answer


def _round(plan: Plan, steps: int, seed: int) -> TrainTask:
    """One round of a plan: its part of ``steps``, in whole exchange intervals."""
    interval = plan.exchange.embedding_interval_steps
    timed = interval * math.ceil(max(steps / ROUNDS, WARMUP_STEPS) / interval)
    return TrainTask(
        plan=plan,
        steps=WARMUP_STEPS + timed,
        seed=seed,
        eval_fraction=0.0,
        warmup_steps=WARMUP_STEPS,
        log_interval_steps=WARMUP_STEPS + timed,
    )
