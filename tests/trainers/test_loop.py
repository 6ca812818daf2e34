"""The loop on one rank: records, results, divergence, and that it learns real click logs."""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.specs.errors import RunError, UsageError
from planner.specs.load import load_model
from planner.specs.model import ModelSpec
from tests.trainers.jobs import model_of, plan_of, rank_env, whole_on_rank_0
from trainers.data.criteo import is_held_out
from trainers.loop import Clock, train_rank
from trainers.task import DataSpec, TrainResult, TrainTask

CLICKS = Path(__file__).parents[3] / "shared/data/clicklogs/criteo_kaggle_18k.tsv.gz"


def train(model: ModelSpec, records: list[dict[str, Any]], **options: Any) -> TrainResult:
    plan = plan_of({"p": (1, model.global_batch, whole_on_rank_0(model))}, model)
    return train_rank(TrainTask(plan, **options), rank_env(plan, 0), records.append)


def test_records_and_result(world_of_one: None) -> None:
    records: list[dict[str, Any]] = []
    result = train(model_of(rate=0.5), records, steps=45, log_interval_steps=20)
    assert [record["step"] for record in records] == [20, 40, 45]
    assert records[-1]["samples"] == result.samples == 45 * 256
    assert set(records[0]) == {
        "step",
        "samples",
        "samples_per_s",
        "loss",
        "auc",
        "predicted_step_ms",
        "measured_step_ms",
        "resumed_at_step",
        "stragglers",
    }
    assert result.steps == 45 and result.samples_per_s > 0 and result.step_ms > 0
    assert result.metrics_on == "holdout" and result.eval_samples == 5 * 256
    assert result.auc is not None and result.auc > 0.6
    assert result.ne is not None and result.ne < 0.98


def test_stops_where_it_is_asked_to(world_of_one: None) -> None:
    model, records, answers = model_of(), [], iter([False, True])
    plan = plan_of({"p": (1, 256, whole_on_rank_0(model))}, model)
    task = TrainTask(plan, steps=40, log_interval_steps=5)
    result = train_rank(task, rank_env(plan, 0), records.append, lambda: next(answers))
    assert result.stopped_early and result.steps == 10 and result.eval_samples == 0
    assert [record["step"] for record in records] == [5, 10]


def test_without_holdout(world_of_one: None) -> None:
    result = train(model_of(), [], steps=2, eval_fraction=0.0)
    assert result.metrics_on == "training" and result.eval_samples == 0
    assert result.loss is not None


def test_divergence_names_the_step(world_of_one: None) -> None:
    with pytest.raises(RunError, match=r"step \d+ are not finite") as error:
        train(model_of(rate=1e3), [], steps=60)
    assert error.value.exit_code == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "must be positive"),
        ({"steps": 1, "epochs": 1}, "exclude each other"),
        ({"epochs": 1}, "no epochs"),
        ({"eval_fraction": 1.0}, "held-out share"),
    ],
)
def test_impossible_tasks(options: dict[str, Any], message: str) -> None:
    model = model_of()
    plan = plan_of({"p": (1, 256, whole_on_rank_0(model))}, model)
    with pytest.raises(UsageError, match=message):
        TrainTask(plan, **options)


@pytest.fixture
def clicks() -> Path:
    if not CLICKS.exists():
        assert os.environ.get("CI") != "true", f"{CLICKS} is missing"
        pytest.skip(f"{CLICKS} is not there")
    return CLICKS


def test_learns_real_clicks(world_of_one: None, clicks: Path) -> None:
    result = train(load_model("dlrm_criteo_small"), [], data=DataSpec((str(clicks),)), epochs=1)
    assert result.malformed_lines == 0
    assert result.auc is not None and result.auc >= 0.745
    assert result.ne is not None and result.ne <= 0.88


def test_learns_nothing_from_shuffled_labels(
    world_of_one: None, clicks: Path, tmp_path: Path
) -> None:
    """Labels are shuffled among training samples only: the hold-out's are true."""
    with gzip.open(clicks, "rb") as stream:
        lines = stream.read().splitlines()
    trained = [i for i, line in enumerate(lines) if not is_held_out(line, 0.1)]
    labels = [lines[i][:1] for i in trained]
    random.Random(0).shuffle(labels)
    for i, label in zip(trained, labels, strict=True):
        lines[i] = label + lines[i][1:]
    path = tmp_path / "shuffled.tsv"
    path.write_bytes(b"\n".join(lines) + b"\n")
    small = load_model("dlrm_criteo_small").model_copy(update={"top_mlp": (128, 64, 1)})
    result = train(small, [], data=DataSpec((str(path),)), epochs=1)
    assert result.auc is not None and result.auc <= 0.60


def test_a_typical_step_has_its_share_of_the_exchange() -> None:
    clock = Clock(torch.device("cpu"), 0)
    clock.step_s = [1.0, 1.0, 9.0, 3.0, 1.0, 2.0, 1.0, 90.0, 1.0, 5.0]
    assert clock.typical_step_s(3) == pytest.approx(11 / 3)  # of 11/3, 2, 92/3; the rest is cut
    assert clock.typical_step_s(1) == pytest.approx(1.5)
    assert clock.typical_step_s(100) == pytest.approx(11.4)
