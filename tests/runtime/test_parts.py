"""Worker numbering, error explanation, run folder and job store, without Ray's daemons."""

from __future__ import annotations

import json
import math

import pytest

from planner.specs.errors import RunError, SpecError, SpecErrors, UsageError
from planner.specs.plan import load_plan
from runtime.failures import explain
from runtime.finite import finite
from runtime.observe.status import load_status
from runtime.plan_check import check_fingerprint
from runtime.pools import Node, slots_for
from runtime.run_folder import RunFolder
from runtime.store import JobStore
from runtime.train import check_task, summary
from runtime.worker import check_node, describe, own_cores, world_ranks
from tests.runtime.plans import MODEL, cluster_of, plan_for
from trainers.task import DataSpec, TrainTask

CLUSTER = cluster_of({"fast": (1, [0]), "slow": (3, [1])})
PLAN = plan_for(CLUSTER, {"fast": 32, "slow": 8})
NODES = [
    Node("f", "10.0.0.1", 4, 0, {"hwplan.io/pool": "fast"}),
    Node("s", "10.0.0.2", 4, 0, {"hwplan.io/pool": "slow"}),
]
SLOTS = slots_for([PLAN], NODES)


def _without(pool: str):
    return PLAN.model_copy(
        update={"pools": {name: p for name, p in PLAN.pools.items() if name != pool}}
    )


def test_a_plan_that_leaves_a_pool_out_numbers_the_others_from_zero():
    assert world_ranks(PLAN, SLOTS) == [0, 1, 2, 3]
    assert world_ranks(_without("fast"), SLOTS) == [None, 0, 1, 2]
    assert world_ranks(_without("slow"), SLOTS) == [0, None, None, None]


@pytest.mark.parametrize(
    ("cores", "workers", "expected"),
    [
        ([1], 3, [[1], [1], [1]]),
        ([4, 5, 6, 7], 2, [[4, 6], [5, 7]]),
        ([0, 1], 2, [[0], [1]]),
        ([0, 1], 3, [[0, 1]] * 3),
    ],
)
def test_workers_get_cores_of_their_own_where_there_are_enough(cores, workers, expected):
    assert [own_cores(cores, rank, workers) for rank in range(workers)] == expected


def test_a_worker_on_another_pools_node_stops_the_job():
    check_node(SLOTS[1], 1, "s")
    with pytest.raises(RunError, match=r"worker 1 belongs to pool slow on 10\.0\.0\.2"):
        check_node(SLOTS[1], 1, "f")


def _report(worker: int, error: Exception) -> dict:
    try:
        raise error
    except Exception as caught:
        return {"worker": worker, **describe(caught)}


class _Failed(Exception):
    """Stands for ray.train.WorkerGroupError."""

    worker_failures = {1: "gone", 2: "broken pipe"}


def test_the_first_error_is_the_cause(tmp_path):
    reports = [_report(2, ValueError("bad shape")), _report(0, RuntimeError("peer closed"))]
    error = explain(reports, None, SLOTS, tmp_path / "new" / "error.txt")
    assert error.exit_code == 4
    assert "worker 2 (pool slow, rank 1, on 10.0.0.2) failed: ValueError: bad shape" in str(error)
    assert "Traceback" not in str(error)
    assert "Traceback" in (tmp_path / "new" / "error.txt").read_text()


def test_a_worker_that_died_silently_is_the_cause_of_its_peers_errors(tmp_path):
    error = explain([_report(2, RuntimeError("peer"))], _Failed(), SLOTS, tmp_path / "error.txt")
    assert "worker 1 (pool slow, rank 0, on 10.0.0.2) ended without a Python error" in str(error)


@pytest.mark.parametrize(
    "raised",
    [
        SpecError("broken", file="a.tsv", field="line 3", value="x", fix="mend it"),
        UsageError("no such thing", fix="use another"),
        SpecErrors([SpecError("one", fix="a"), SpecError("two", fix="b")]),
    ],
)
def test_a_users_error_comes_back_as_it_was_and_leaves_no_file(raised, tmp_path):
    reports = [_report(1, RuntimeError("peer")), _report(0, raised)]
    error = explain(reports, None, SLOTS, tmp_path / "error.txt")
    assert isinstance(raised, type(error))
    assert str(error) == str(raised)
    assert error.exit_code == 2
    assert not (tmp_path / "error.txt").exists()


def test_job_store_keeps_order_and_gives_each_event_once():
    host = JobStore.host("127.0.0.1")
    worker = JobStore.join("127.0.0.1", host.port)
    assert host.new_events() == []
    for number in range(3):
        worker.put({"n": number})
    assert host.new_events() == [{"n": 0}, {"n": 1}, {"n": 2}]
    worker.put({"n": 3})
    assert host.new_events() == [{"n": 3}]


def record(step: int, loss: float) -> dict:
    known = {"samples": 64 * step, "auc": None, "samples_per_s": 1.0, "measured_step_ms": 2.0}
    return {"kind": "metrics", "task": 0, "step": step, "loss": loss, **known}


def test_run_folder_appears_only_when_training_begins(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "a", PLAN)
    folder.on_event({"kind": "attempt", "number": 1, "plan": PLAN})
    folder.on_event({"kind": "placed", "worker": 0, "pool": "fast"})
    folder.on_event({"kind": "started", "task": 0})
    assert not folder.path.exists()
    folder.on_event(record(1, math.nan))
    folder.on_event(record(2, 0.5))
    folder.end({"auc": math.inf})
    assert load_plan(folder.path / "plan.json").pools.keys() == PLAN.pools.keys()
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").open()]
    assert [line["loss"] for line in lines] == [None, 0.5]
    assert json.loads((folder.path / "result.json").read_text()) == {"auc": None}
    events = [json.loads(line) for line in (folder.path / "events.jsonl").open()]
    assert [event["event"] for event in events] == ["attempt", "placed", "started"]
    assert events[0]["plan"] == PLAN.fingerprint
    assert load_status(folder.path).state == "finished"


def test_run_folder_tells_attempts_apart(tmp_path):
    folder = RunFolder(tmp_path / "a", PLAN)
    folder.on_event(record(1, 0.7))
    folder.on_event({"kind": "failure", "problem": "worker 1 (pool fast) ended", "step": 0})
    assert load_status(folder.path).state == "recovering"
    other = PLAN.model_copy(update={"name": "other"})
    folder.on_event({"kind": "attempt", "number": 2, "plan": other})
    folder.on_event(record(1, 0.7))
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").open()]
    assert [line["attempt"] for line in lines] == [1, 2]
    assert (folder.path / "plan-2.json").exists()
    folder.fail("no node is left", 4)
    status = load_status(folder.path)
    assert (status.state, status.attempt, status.exit_code) == ("failed", 2, 4)
    assert [text.split(" ", 1)[1] for text in status.incidents] == [
        "worker 1 (pool fast) ended",
        "no node is left",
    ]


def test_run_folder_never_overwrites(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "result.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for taken in ("old", "file", "file/below"):
        with pytest.raises(UsageError, match="--out"):
            RunFolder(tmp_path / taken, PLAN)
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty", PLAN)


def test_finite_goes_all_the_way_down():
    assert finite({"a": [1, (math.nan, {"b": -math.inf})], "c": "x"}) == {
        "a": [1, [None, {"b": None}]],
        "c": "x",
    }


def test_a_missing_file_is_noticed_before_anything_starts(tmp_path):
    task = TrainTask(PLAN, DataSpec((str(tmp_path / "none.tsv"),)))
    with pytest.raises((SpecError, UsageError)):
        check_task(task, None)


def test_fingerprint_mismatch_names_the_part(tmp_path):
    from planner.fingerprint import fingerprint_parts

    saved = PLAN.model_copy(update={"fingerprint_parts": fingerprint_parts(CLUSTER, MODEL)})
    check_fingerprint(saved, tmp_path / "plan.json", CLUSTER, MODEL)
    other = MODEL.model_copy(update={"global_batch": 128})
    with pytest.raises(UsageError, match="model file differs") as caught:
        check_fingerprint(saved, tmp_path / "plan.json", CLUSTER, other)
    assert "--ignore-fingerprint" in str(caught.value)
    assert "cluster" not in caught.value.problem


def test_summary_has_the_promised_fields():
    result = {
        "samples_per_s": 10.0,
        "loss": 0.5,
        "auc": None,
        "ne": math.nan,
        "calibration": 1.0,
        "steps": 3,
        "samples": 9,
        "metrics_on": "holdout",
        "eval_samples": 2,
        "malformed_lines": 1,
        "malformed_examples": ("a.tsv:3",),
        "dropped_samples": 0,
        "step_ms": 7.0,
        "dense_exchange_bytes": 1,
        "dense_exchange_s": 0.5,
        "dense_exchange_exposed_s": 0.1,
        "embedding_exchange_bytes": 2,
    }
    bridge = {"calls": 4, "bytes": 5, "seconds": 6.0}
    shown = summary(PLAN, {"result": result, "bridge": bridge})
    for field in ("samples_per_s", "loss", "auc", "ne", "steps", "samples"):
        assert field in shown
    assert shown["ne"] is None
    assert shown["step_ms"] == {"predicted": 1.0, "measured": 7.0}
    assert shown["exchange"]["bridge_bytes_sent"] == 5
    json.dumps(shown, allow_nan=False)
