"""What a run says on the terminal beside its progress line."""

from __future__ import annotations

import pytest

from runtime.cli.progress import Progress
from tests.runtime.plans import cluster_of, plan_for
from trainers.task import TrainTask

PLAN = plan_for(cluster_of({"fast": (1, [0]), "slow": (2, [1])}), {"fast": 32, "slow": 16})
RECORD = {
    "kind": "metrics",
    "step": 10,
    "samples_per_s": 1e3,
    "loss": 0.5,
    "auc": None,
    "measured_step_ms": 64.0,
    "predicted_step_ms": 60.0,
    "stragglers": [],
}
SLOW = {
    "rank": 2,
    "pool": "slow",
    "pool_rank": 1,
    "part": "dense forward",
    "own_ms": 30.0,
    "usual_ms": 10.0,
}


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (RECORD, ["step 10/100", "1,000 samples/s", "AUC -", "64.00 ms (predicted 60.00)"]),
        (
            {**RECORD, "stragglers": [SLOW]},
            ["rank 2 (pool slow, rank 1)", "30.0 ms a step for dense forward, usual are 10.0 ms"],
        ),
        (
            {"kind": "bridge", "measured_bytes_per_s": 0.5e9, "planned_bytes_per_s": 1e9},
            ["carries 4.00 Gbit/s, the plan counts on 8.00", "bridge.gbps"],
        ),
        ({"kind": "checkpoint", "step": 7}, ["step 7: checkpoint saved"]),
        ({"kind": "failure", "problem": "worker 1 ended", "step": 7}, ["failed: worker 1 ended"]),
        (
            {"kind": "replanned", "why": "nodes are missing", "plan": PLAN},
            ["nodes are missing: planned again, fast 1 x 32, slow 2 x 16"],
        ),
        ({"kind": "attempt", "number": 2, "plan": PLAN}, ["attempt 2"]),
    ],
)
def test_events_are_told(capsys, event, said) -> None:
    with Progress(TrainTask(PLAN)) as progress:
        progress.on_event(event)
    err = capsys.readouterr().err
    for words in said:
        assert words in err


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "bridge", "measured_bytes_per_s": 0.9e9, "planned_bytes_per_s": 1e9},
        {"kind": "attempt", "number": 1, "plan": PLAN},
        {"kind": "placed", "worker": 0},
    ],
)
def test_what_is_as_planned_is_not_worth_a_line(capsys, event) -> None:
    with Progress(TrainTask(PLAN)) as progress:
        progress.on_event(event)
    assert capsys.readouterr().err.splitlines() == ["starting Ray and the workers …"]
