"""Checkpoints over real ranks: any plan goes on from any other's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from planner.specs.model import ModelSpec
from planner.specs.plan import MemoryPolicy, Placement, Plan
from planner.specs.units import Dtype
from tests.trainers.jobs import (
    model_of,
    place,
    plan_of,
    rank_env,
    run_on_processes,
)
from trainers.checkpoint.checkpointer import Checkpointer
from trainers.checkpoint.folder import name_of
from trainers.loop import train_rank
from trainers.setup import set_up
from trainers.task import TrainTask

SAVED, END = 4, 7
MODELS = {
    "rowwise": model_of("rowwise_adagrad", dense="adam", rate=0.02),
    "adagrad": model_of("adagrad", dense="adam", rate=0.02),
}
SAVING = (
    ("rowwise", "4 cut"),
    ("rowwise", "4 groups"),
    ("adagrad", "4 cut"),
    ("adagrad", "4 dealt"),
    ("adagrad", "4 fully sharded"),
)
"""Models and plans that save, and that go on from their own checkpoint."""
GOING_ON = ("4 dealt", "3 two pools", "2 cut", "2 dealt", "1")

Held = list[tuple[str, int, int, torch.Tensor]]
"""(name, row, column, values): what a rank holds of tables and state."""


def plans(model: ModelSpec) -> dict[str, Plan]:
    """By name; its number is that of the ranks."""
    everyone, pair = (0, 1, 2, 3), (0, 1)
    all_dp, pair_dp = place("data_parallel", *everyone), place("data_parallel", *pair)
    all_rw, pair_rw = place("row_wise", *everyone), place("row_wise", *pair)
    cut, halves = (
        place("column_wise", 2, 0, widths=(12, 4)),
        place("column_wise", 1, 0, widths=(8, 8)),
    )
    grid = place("grid_shard", *everyone, widths=(4, 12))
    first, second = place("table_wise", 0), place("table_wise", 1)

    def placed(*placements: Placement) -> dict[str, Placement]:
        return {t.name: p for t, p in zip(model.all_tables, placements, strict=True)}

    def plan(
        ranks: int, *placements: Placement, dense: str = "data_parallel", **options: Any
    ) -> Plan:
        policy = MemoryPolicy(compute_precision=Dtype.FP32, dense_parallelism=dense)
        pools = {"p": (ranks, 256 // ranks, placed(*placements))}
        return plan_of(pools, model, policy=policy, **options)

    two_pools = {"a": (2, 96, placed(pair_rw, pair_dp, halves)), "b": (1, 64, placed(*[first] * 3))}
    return {
        "4 cut": plan(4, cut, all_dp, all_rw),
        "4 dealt": plan(4, grid, cut, grid, node_size=2, dense="sharded_optimizer"),
        "4 fully sharded": plan(4, all_rw, all_rw, cut, dense="fully_sharded"),
        "4 groups": plan(4, second, pair_rw, pair_dp, groups={"p": 2}),
        "3 two pools": plan_of(two_pools, model),
        "2 cut": plan(2, place("column_wise", 1, 0, widths=(4, 12)), second, pair_rw),
        "2 dealt": plan(2, second, first, second, dense="sharded_optimizer"),
        "1": plan(1, first, first, first),
    }  # fmt: skip


def task_of(plan: Plan, folder: Path) -> TrainTask:
    return TrainTask(
        plan,
        steps=END,
        eval_fraction=0.0,
        log_interval_steps=1,
        checkpoint_dir=str(folder),
        checkpoint_interval_steps=SAVED,
    )


def restored(plan: Plan, rank: int, folder: Path) -> Held:
    """What a rank holds after restoring the checkpoint of step SAVED."""
    env = rank_env(plan, rank)
    trainable = set_up(plan, env, seed=99)
    checkpointer = Checkpointer(task_of(plan, folder), env, trainable, lambda event: None)
    assert checkpointer.restore() == SAVED
    checkpointer.close()
    if trainable.dense_exchange is not None:
        trainable.dense_exchange.close()
    held = []
    for shard in trainable.shards:
        where = shard.row_offset, shard.column_offset
        held.append((shard.table, *where, shard.weight.detach().clone()))
        for index, state in enumerate(shard.state):
            wide = state.view(shard.rows, -1).expand(-1, shard.columns)
            held.append((f"{shard.table} state {index}", *where, wide.clone()))
    return held


def run(plan: Plan, rank: int, folder: Path) -> tuple[list[float], int, list[str]]:
    """Losses of the steps, the step that it went on from, and what was told."""
    records: list[dict[str, Any]] = []
    told: list[dict[str, Any]] = []
    env = rank_env(plan, rank)
    result = train_rank(task_of(plan, folder), env, records.append, tell=told.append)
    losses = [record["loss"] for record in records]
    return losses, result.resumed_at_step, [event["kind"] for event in told]


def drop_last(rank: int, folder: Path) -> None:
    """Take the run back to SAVED."""
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder / name_of(END))
    dist.barrier()


def save_and_go_on(rank: int, folder: Path) -> dict[str, Any]:
    """Train all saving plans, then again from SAVED under the same plan."""
    answers = {}
    for sparse, name in SAVING:
        plan, own = plans(MODELS[sparse])[name], folder / sparse / name
        whole = run(plan, rank, own)
        drop_last(rank, own)
        held = restored(plan, rank, own)
        again = run(plan, rank, own)
        drop_last(rank, own)
        answers[f"{sparse} {name}"] = whole, held, again
    return answers


def go_on(rank: int, folder: Path, name: str) -> dict[str, Any]:
    """Go on from every saved run under another plan; they are left as they were."""
    answers = {}
    for sparse, saved in SAVING:
        plan, own = plans(MODELS[sparse])[name], folder / sparse / saved
        held = restored(plan, rank, own)
        answers[f"{sparse} {saved}"] = held, run(plan, rank, own)
        drop_last(rank, own)
    return answers


def whole(held: list[Held], model: ModelSpec) -> dict[str, torch.Tensor]:
    """Whole tensors from what the ranks hold; every element must be held."""
    sizes = {t.name: (t.num_embeddings, t.embedding_dim) for t in model.all_tables}
    tensors: dict[str, torch.Tensor] = {}
    for name, row, column, values in (one for rank in held for one in rank):
        full = tensors.setdefault(name, torch.full(sizes[name.split(" ")[0]], torch.nan))
        rows, columns = values.shape
        full[row : row + rows, column : column + columns] = values
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder: Path) -> list[dict[str, Any]]:
    """By rank."""
    return run_on_processes(4, save_and_go_on, folder)


def test_the_same_plan_goes_on_where_it_was(saved: list[dict[str, Any]]) -> None:
    for answers in saved:
        for case, ((losses, start, _), _, (later, resumed, _)) in answers.items():
            assert (start, resumed) == (0, SAVED)
            assert losses[SAVED] == later[0], case
            # DDP sums the gradients of its first step in other buckets: other roundings.
            assert losses[SAVED:] == pytest.approx(later, rel=1e-6), case
    (_, _, told), _, (_, _, told_again) = saved[0]["adagrad 4 cut"]
    assert told == ["checkpoint", "checkpoint"] and told_again == ["resumed", "checkpoint"]
    assert saved[1]["adagrad 4 cut"][0][2] == [], "rank 0 speaks for all"


@pytest.mark.parametrize("name", GOING_ON)
def test_another_plan_goes_on_with_the_same_numbers(
    folder: Path, saved: list[dict[str, Any]], name: str
) -> None:
    answers = run_on_processes(int(name[0]), go_on, folder, name)
    for sparse, source in SAVING:
        case, model = f"{sparse} {source}", MODELS[sparse]
        (losses, _, _), _, _ = saved[0][case]
        before = whole([rank[case][1] for rank in saved], model)
        after = whole([rank[case][0] for rank in answers], model)
        for tensor, values in before.items():
            if sparse == "rowwise" and "state" in tensor:
                # What each column shard has summed; their mean by width is the row's.
                values, found = values.mean(1), after[tensor].mean(1)
                torch.testing.assert_close(found, values, rtol=1e-6, atol=0)
            else:
                torch.testing.assert_close(after[tensor], values, rtol=0, atol=0)
        _, (later, resumed, _) = answers[0][case]
        assert resumed == SAVED and len(later) == END - SAVED
        # Column shards have row-wise state, and pools state, of their own gradients.
        exact = END if sparse == "adagrad" and "pools" not in name else SAVED + 1
        assert later[: exact - SAVED] == pytest.approx(losses[SAVED:exact], rel=2e-5), case
