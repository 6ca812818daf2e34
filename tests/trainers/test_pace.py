"""Which rank is slow: by hand, and over real ranks one of which is slowed down."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch

from planner.specs.plan import Plan
from tests.trainers.jobs import model_of, plan_of, rank_env, run_on_processes, whole_on_rank_0
from trainers.loop import train_rank
from trainers.pace import Watch
from trainers.task import TrainTask

MODEL = model_of()
PLAN = plan_of({"p": (1, 64, whole_on_rank_0(MODEL)), "q": (2, 96, whole_on_rank_0(MODEL))}, MODEL)


def test_slow_beside_its_pool_twice_in_a_row(world_of_one: None) -> None:
    watch = Watch(PLAN, rank_env(plan_of({"p": (1, 256, whole_on_rank_0(MODEL))}, MODEL), 0))
    calm = torch.tensor([[0.001, 0.030], [0.001, 0.010], [0.001, 0.011]], dtype=torch.double)
    late = torch.tensor([[0.001, 0.030], [0.001, 0.010], [0.030, 0.016]], dtype=torch.double)
    assert watch.judge(calm, 0.1) == []
    assert watch.judge(late, 0.1) == [], "one window may be chance"
    (found,) = watch.judge(late, 0.1)
    assert asdict(found) == {
        "rank": 2,
        "pool": "q",
        "pool_rank": 1,
        "part": "input",
        "own_ms": 30.0,
        "usual_ms": 1.0,
    }
    assert watch.judge(late, 1.0) == [], "29 ms of a second are not worth a word"
    assert watch.judge(late, 0.1) == [], "and the count starts again"


def test_a_lone_rank_is_compared_with_its_own_past(world_of_one: None) -> None:
    watch = Watch(PLAN, rank_env(plan_of({"p": (1, 256, whole_on_rank_0(MODEL))}, MODEL), 0))
    calm = torch.tensor([[0.0, 0.020], [0.0, 0.010], [0.0, 0.010]], dtype=torch.double)
    hot = torch.tensor([[0.0, 0.040], [0.0, 0.010], [0.0, 0.010]], dtype=torch.double)
    assert [watch.judge(one, 0.1) for one in (calm, hot)] == [[], []]
    (found,) = watch.judge(hot, 0.1)
    assert (found.rank, found.pool, found.part, found.usual_ms) == (0, "p", "dense forward", 20.0)


def slowed(rank: int, plan: Plan) -> list[dict[str, Any]]:
    """Rank 2 sleeps in its first block."""
    if rank == 2:
        block = torch.nn.Linear.forward

        def sleepy(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return block(self, x)

        torch.nn.Linear.forward = sleepy  # this process is this test's
    records: list[dict[str, Any]] = []
    task = TrainTask(plan, steps=15, log_interval_steps=5, eval_fraction=0.0)
    train_rank(task, rank_env(plan, rank), records.append)
    return records


def test_the_slowed_rank_is_named_on_every_rank() -> None:
    for records in run_on_processes(3, slowed, PLAN):
        assert records[0]["stragglers"] == []
        (found,) = records[-1]["stragglers"]
        assert (found["rank"], found["pool"], found["pool_rank"]) == (2, "q", 1)
        assert found["part"] == "dense forward" and found["own_ms"] > found["usual_ms"] + 20
