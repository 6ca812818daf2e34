"""Damaged and foreign checkpoints, on one rank."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.specs.errors import RunError, UsageError
from tests.trainers.jobs import model_of, plan_of, rank_env, whole_on_rank_0
from trainers.checkpoint.folder import MANIFEST, digest, name_of, saved_steps
from trainers.loop import train_rank
from trainers.task import TrainTask

MODEL = model_of("adagrad", dense="adam", rate=0.02)
PLAN = plan_of({"p": (1, 256, whole_on_rank_0(MODEL))}, MODEL)


def go(folder: Path, steps: int, **options: Any) -> tuple[int, list[dict[str, Any]]]:
    """Train to ``steps``, saving every two; the step that it went on from, and what was told."""
    told: list[dict[str, Any]] = []
    task = TrainTask(
        PLAN,
        steps=steps,
        eval_fraction=0.0,
        checkpoint_dir=str(folder),
        checkpoint_interval_steps=2,
        **{"keep_checkpoints": 2, **options},
    )
    result = train_rank(task, rank_env(PLAN, 0), lambda record: None, tell=told.append)
    return result.resumed_at_step, told


@pytest.fixture
def two(world_of_one: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("two")
    go(folder, 4)
    return folder


def test_only_the_newest_are_kept_and_what_was_not_finished_goes(two: Path, tmp_path: Path) -> None:
    assert saved_steps(two) == [4, 2]
    own = tmp_path / "own"
    shutil.copytree(two, own)
    (own / "step-00000003.partial").mkdir()
    (own / "step-00000009.partial").mkdir()
    resumed, told = go(own, 7)
    assert resumed == 4 and [event["kind"] for event in told] == ["resumed"] + ["checkpoint"] * 2
    assert saved_steps(own) == [7, 6]
    assert not (own / "step-00000003.partial").exists()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
def test_the_one_before_a_damaged_one_is_used(
    two: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    names = sorted(path.name for path in (two / name_of(4)).iterdir())
    assert MANIFEST in names and len(names) == 3
    for name in names:
        own = tmp_path / name
        shutil.copytree(two, own)
        harm(own / name_of(4) / name)
        resumed, told = go(own, 4)
        assert resumed == 2, name
        assert told[0]["kind"] == "damaged" and name_of(4) in told[0]["checkpoint"]
        assert told[0]["why"]


def test_no_pickle_is_executed(two: Path, tmp_path: Path) -> None:
    """Data replaced by a pickle that runs code, its digest put right."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    own = tmp_path / "own"
    shutil.copytree(two, own)
    newest = own / name_of(4)
    (data,) = newest.glob("*.distcp")
    data.write_bytes(pickle.dumps(Bomb()))
    manifest = json.loads((newest / MANIFEST).read_text())
    manifest["files"][data.name] = digest(data).model_dump()
    (newest / MANIFEST).write_text(json.dumps(manifest))
    resumed, told = go(own, 4)
    assert not (tmp_path / "executed").exists()
    assert resumed == 2 and told[0]["kind"] == "damaged"


def test_names_outside_the_folder_are_refused(two: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(two, own)
    manifest = json.loads((own / name_of(4) / MANIFEST).read_text())
    manifest["files"]["../../etc/passwd"] = {"bytes": 1, "sha256": ""}
    (own / name_of(4) / MANIFEST).write_text(json.dumps(manifest))
    assert go(own, 4)[0] == 2


def test_nothing_whole_is_an_error_not_a_new_start(two: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(two, own)
    for step in (2, 4):
        flip(own / name_of(step) / MANIFEST)
    with pytest.raises(RunError, match="none of the 2 checkpoints"):
        go(own, 4)


def test_another_run_is_refused(two: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(two, own)
    with pytest.raises(UsageError, match="another run: it has seed 0"):
        go(own, 6, seed=1)
    task = TrainTask(PLAN, checkpoint_dir=str(own), checkpoint_interval_steps=2)
    with pytest.raises(UsageError, match="keep"):
        replace(task, keep_checkpoints=0)
