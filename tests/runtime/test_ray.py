"""Real Ray workers on an embedded cluster of two pools. One cluster serves one class."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.fingerprint import fingerprint_parts
from planner.specs.errors import SpecError, UsageError
from planner.specs.load import load_model
from planner.specs.plan import Plan, save_plan
from tests.runtime.plans import cluster_of, plan_for
from trainers.task import DataSpec, TrainTask

CORES = sorted(os.sched_getaffinity(0))
CLUSTER = cluster_of({"fast": (1, CORES[:1]), "slow": (2, CORES[-1:])})
PLAN = plan_for(CLUSTER, {"fast": 32, "slow": 16})


def saved(folder: Path, plan: Plan = PLAN) -> Path:
    parts = fingerprint_parts(plan.cluster, plan.model)
    save_plan(plan.model_copy(update={"fingerprint_parts": parts}), folder / "plan.json")
    return folder / "plan.json"


@pytest.fixture(scope="class")
def ray_cluster() -> Iterator[None]:
    from runtime.embedded import ray_session

    with ray_session(CLUSTER, None):
        yield


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_cluster")
class TestOnOneCluster:
    def test_tasks_run_in_turn_on_the_right_nodes_until_one_fails(self, tmp_path):
        from runtime.launch import run_tasks

        alone = PLAN.model_copy(update={"pools": {"slow": PLAN.pools["slow"]}, "global_batch": 32})
        tasks = [
            TrainTask(plan, steps=6, warmup_steps=1, log_interval_steps=3, eval_fraction=0.0)
            for plan in (PLAN, alone, PLAN)
        ]
        criteo = plan_for(CLUSTER, {"fast": 32, "slow": 16}, load_model("dlrm_criteo_small"))
        tasks.append(TrainTask(criteo, DataSpec((str(tmp_path / "missing.tsv"),)), epochs=1))
        events: list[dict] = []
        with pytest.raises(SpecError, match=r"missing\.tsv"):
            run_tasks(tasks, events.append, tmp_path / "error.txt")
        assert not (tmp_path / "error.txt").exists(), "a user's error has no traceback to keep"

        placed = {event["worker"]: event for event in events if event["kind"] == "placed"}
        assert [placed[index]["pool"] for index in range(3)] == ["fast", "slow", "slow"]
        assert placed[0]["node"] != placed[1]["node"] == placed[2]["node"]
        assert [placed[index]["cores"] for index in range(3)] == [
            CORES[:1],
            CORES[-1:],
            CORES[-1:],
        ]
        bridges = [event for event in events if event["kind"] == "bridge"]
        # The last task ends at its missing file, with the bridge measured or not.
        assert [event["task"] for event in bridges][:2] == [0, 2], "a single pool has no bridge"
        assert all(event["measured_bytes_per_s"] > 1e6 for event in bridges)
        assert bridges[0]["planned_bytes_per_s"] == 1e9
        results = [event for event in events if event["kind"] == "result"]
        assert [result["task"] for result in results] == [0, 1, 2]
        assert [result["result"]["samples"] for result in results] == [6 * 64, 6 * 32, 6 * 64]
        assert results[0]["bridge"]["bytes"] > 0
        assert results[1]["bridge"]["bytes"] == 0, "a single pool has no bridge to cross"
        # The same plan, seed and samples in a new world of the same processes.
        assert results[0]["result"]["loss"] == pytest.approx(results[2]["result"]["loss"], rel=1e-5)
        steps = [e["step"] for e in events if e["kind"] == "metrics" and e["task"] == 0]
        assert steps == [3, 6]

    def test_wrong_labels(self, tmp_path):
        from runtime.launch import run_tasks

        other = cluster_of({"fast": (1, CORES[:1]), "sluggish": (2, CORES[-1:])})
        task = TrainTask(plan_for(other, {"fast": 32, "sluggish": 16}), steps=2)
        with pytest.raises(UsageError) as caught:
            run_tasks([task], lambda event: None, tmp_path / "error.txt")
        assert "pool sluggish needs 1 Ray nodes" in str(caught.value)
        assert "hwplan.io/pool=slow" in str(caught.value)


def processes_marked(mark: str) -> list[str]:
    """Command lines of all processes that carry ``mark`` in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " ")[:120])
        except (OSError, ValueError):
            continue
    return found


def hwplan(*arguments: object, mark: str = "", **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [Path(sys.executable).with_name("hwplan"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HWPLAN_TEST_MARK": mark},
        **options,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "code", "moment"),
    [(signal.SIGINT, 130, "step "), (signal.SIGTERM, 143, "building the model")],
)
def test_interrupted_training_leaves_no_process(tmp_path, number, code, moment):
    mark = uuid.uuid4().hex
    run = hwplan(
        "train", "--plan", saved(tmp_path), "--steps", 1_000_000, "--out", tmp_path / "out",
        mark=mark,
        start_new_session=True,
    )  # fmt: skip
    assert run.stderr is not None
    lines = []
    for line in run.stderr:
        lines.append(line)
        if line.startswith(moment):
            break
    assert len(processes_marked(mark)) > 5, lines
    if number == signal.SIGINT:
        os.killpg(run.pid, number)  # as a terminal does: every process of the group gets it
    else:
        run.send_signal(number)
    out, err = run.communicate(timeout=60)
    assert run.returncode == code, err
    assert out == ""
    assert "Traceback" not in err
    deadline = time.monotonic() + 10
    while (left := processes_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def test_bad_input_ends_before_ray_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    plan = saved(tmp_path)
    for arguments, said in (
        (["--plan", plan, "--address", address], "no Ray cluster answers"),
        (["--plan", plan, "--cluster", "local"], "the cluster file differs"),
        (["--plan", plan, "--data", "criteo:nowhere.tsv"], "--data"),
    ):
        run = hwplan("train", *arguments, "--out", tmp_path / "out")
        out, err = run.communicate(timeout=60)
        assert (run.returncode, out) == (2, ""), err
        assert said in err
        assert len(err.splitlines()) < 24
        assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
