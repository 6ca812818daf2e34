"""What a run tells the outside."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from planner.specs.errors import SpecError, UsageError
from runtime.observe.mllog import MlperfLog
from runtime.observe.status import STATUS_FILE, StatusFile, first_status, load_status
from runtime.observe.tensorboard import TensorBoard
from tests.cli.cli_run import hwplan
from tests.runtime.plans import cluster_of, plan_for

PLAN = plan_for(cluster_of({"fast": (1, [0]), "slow": (2, [1])}), {"fast": 32, "slow": 16})
RECORD = {
    "kind": "metrics",
    "step": 10,
    "samples": 640,
    "samples_per_s": 1000.0,
    "loss": 0.5,
    "auc": None,
    "predicted_step_ms": 60.0,
    "measured_step_ms": 64.0,
}
RESULT = {
    "kind": "result",
    "result": {
        "steps": 20,
        "samples": 1280,
        "metrics_on": "holdout",
        "eval_samples": 100,
        "loss": 0.4,
        "auc": 0.75,
        "ne": 0.8,
        "calibration": 1.0,
    },
}


def mllog_lines(path: Path) -> list[dict]:
    lines = path.read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def test_mlperf_lines_of_a_run(tmp_path: Path) -> None:
    log = MlperfLog(tmp_path / "log", PLAN, seed=7)
    for event in ({"kind": "started"}, RECORD, RESULT):
        log.on_event(event)
    log.close()
    lines = mllog_lines(tmp_path / "log")
    keys = [line["key"] for line in lines]
    order = [keys.index(key) for key in ("init_start", "init_stop", "run_start", "run_stop")]
    assert order == sorted(order)
    values = {line["key"]: line["value"] for line in lines}
    assert values["seed"] == 7 and values["global_batch_size"] == PLAN.global_batch
    assert values["eval_accuracy"] == 0.75 and values["train_samples"] == 1280
    stats = lines[keys.index("tracked_stats")]
    assert stats["value"] == {"loss": 0.5, "samples_per_s": 1000.0, "step_time": 0.064}
    assert stats["metadata"] == {"samples_count": 640}
    assert lines[-1]["metadata"] == {"status": "success"}
    assert all({"namespace", "time_ms", "event_type"} <= set(line) for line in lines)


def test_a_run_that_breaks_off_is_logged_as_aborted(tmp_path: Path) -> None:
    log = MlperfLog(tmp_path / "log", PLAN, seed=0)
    log.on_event({"kind": "started"})
    # A second attempt after a failure is the same run.
    log.on_event({"kind": "started"})
    log.close()
    lines = mllog_lines(tmp_path / "log")
    assert [line["key"] for line in lines].count("run_start") == 1
    assert lines[-1]["key"] == "run_stop" and lines[-1]["metadata"] == {"status": "aborted"}


def test_unwritable_outputs_are_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="--mllog"):
        MlperfLog(tmp_path / "file" / "log", PLAN, seed=0)
    with pytest.raises(SpecError, match="--tensorboard"):
        TensorBoard(tmp_path / "file" / "board")


def test_curves_reach_tensorboard(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "board")
    board.on_event(RECORD)
    board.on_event(RESULT)
    board.close()
    (file,) = (tmp_path / "board").iterdir()
    content = file.read_bytes()
    for curve in (b"quality/loss", b"speed/step_ms_measured", b"holdout/auc"):
        assert curve in content
    assert b"quality/auc" not in content, "an undefined AUC has no point"


def test_status_follows_the_run(tmp_path: Path) -> None:
    status = StatusFile(tmp_path, first_status(PLAN))
    status.update()
    assert load_status(tmp_path).state == "starting"
    status.on_event({"kind": "started"})
    status.on_event(RECORD | {"loss": float("nan")})
    status.on_event({"kind": "checkpoint", "step": 8})
    status.add_incident("worker 1 was killed")
    found = load_status(tmp_path)
    assert (found.state, found.step, found.samples, found.checkpoint_step) == (
        "training",
        10,
        640,
        8,
    )
    assert found.loss is None, "JSON has no NaN"
    assert found.alive and found.pools["slow"].ranks == 2
    assert found.incidents[0].endswith("worker 1 was killed")


def test_a_driver_that_is_gone_is_noticed(tmp_path: Path) -> None:
    gone = first_status(PLAN).model_copy(update={"pid": 2**22 + 1, "state": "training"})
    StatusFile(tmp_path, gone).update()
    assert not load_status(tmp_path).alive
    elsewhere = gone.model_copy(update={"host": "another-host"})
    assert elsewhere.alive
    old = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    assert not elsewhere.model_copy(update={"updated": old}).alive


@pytest.mark.parametrize(
    ("state", "pid", "code", "words"),
    [
        ("training", os.getpid(), 0, "toy_criteo on|training"),
        ("training", 2**22 + 1, 4, "gone while training"),
        ("finished", 2**22 + 1, 0, "finished"),
        ("failed", 2**22 + 1, 4, "failed"),
    ],
)
def test_status_command(tmp_path: Path, state: str, pid: int, code: int, words: str) -> None:
    StatusFile(
        tmp_path, first_status(PLAN).model_copy(update={"state": state, "pid": pid})
    ).update()
    done = hwplan("status", str(tmp_path))
    assert done.code == code
    assert any(word in done.out for word in words.split("|"))
    data = json.loads(hwplan("status", str(tmp_path), "--json").out)
    assert data["state"] == state and data["alive"] == (state == "training" and code == 0)


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run here"):
        load_status(tmp_path)
    (tmp_path / STATUS_FILE).write_text("{")
    with pytest.raises(SpecError, match="not valid JSON"):
        load_status(tmp_path)
