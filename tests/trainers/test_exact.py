"""Every plan trains exactly what plain PyTorch trains on the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from planner.specs.model import ModelSpec
from planner.specs.plan import Placement, Plan
from tests.trainers.jobs import (
    model_of,
    place,
    plan_of,
    rank_env,
    run_on_processes,
    whole_on_rank_0,
)
from tests.trainers.reference import train_reference
from trainers.data.source import Slice, open_source
from trainers.loop import Stepper, rank_slice, train_rank
from trainers.setup import set_up
from trainers.task import TrainResult, TrainTask

SEED = 7
STEPS = 6
TOLERANCE = 2e-6
SGD, ADAGRAD, ROW_WISE = model_of(), model_of("adagrad", rate=0.02), model_of("rowwise_adagrad")


@dataclass
class Case:
    plan: Plan
    unweighted: bool = False
    """Average copies and ranks as if all had the same number of samples."""
    share_factor: float = 1.0
    """On every copy's share: 2 counts two groups as if each were their pool."""
    steps: int = STEPS


@dataclass
class Held:
    """One shard as a rank held it in the end."""

    table: str
    row: int
    column: int
    weight: torch.Tensor
    state: list[torch.Tensor]


@dataclass
class Outcome:
    pool: str
    group: int
    """Replica group in the pool."""
    losses: list[float]
    shards: list[Held]
    dense: dict[str, torch.Tensor]
    sent: int = field(default=0)
    dense_state_bytes: int = field(default=0)
    """Of the dense network's optimizer on this rank."""


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    # ZeroRedundancyOptimizer keeps this rank's part in an optimizer of its own.
    state = getattr(optimizer, "optim", optimizer).state
    held = [x for values in state.values() for x in values.values() if x.dim()]
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in held)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def run_case(case: Case, world_rank: int) -> Outcome:
    plan = case.plan
    rank = rank_env(plan, world_rank)
    trainable = set_up(plan, rank, SEED)
    if case.unweighted:
        assert trainable.dense_exchange is not None and trainable.embedding_exchange is not None
        trainable.dense_exchange._weight = 1.0 / plan.world_size
        trainable.embedding_exchange._share = 1.0 / plan.table_copies
    if trainable.embedding_exchange is not None:
        trainable.embedding_exchange._share *= case.share_factor
    task = TrainTask(plan, steps=case.steps, seed=SEED)
    stepper = Stepper(trainable, rank, open_source(task).train_batches(rank_slice(task, rank)))
    trainable.model.train()
    losses = []
    for _ in range(case.steps):
        loss = stepper.step()[0] * (plan.pools[rank.pool].local_batch / plan.global_batch)
        dist.all_reduce(loss)
        losses.append(float(loss))
    if trainable.dense_exchange is not None:
        trainable.dense_exchange.close()
    return Outcome(
        pool=rank.pool,
        group=rank.pool_rank // plan.pools[rank.pool].group_ranks,
        losses=losses,
        shards=[
            Held(
                s.table,
                s.row_offset,
                s.column_offset,
                s.weight.float().clone(),
                [x.clone() for x in s.state],
            )
            for s in trainable.shards
        ],
        dense={
            name.rsplit("network.", 1)[1]: whole(p)
            for name, p in trainable.model.module.head.named_parameters()
        },
        sent=0 if trainable.embedding_exchange is None else trainable.embedding_exchange.bytes,
        dense_state_bytes=state_bytes(trainable.optimizer.dense),
    )


def run_cases(
    rank: int, cases: dict[str, Case], task: TrainTask
) -> tuple[dict[str, Outcome], TrainResult, list[dict[str, Any]]]:
    """All cases, and one whole training job."""
    outcomes = {name: run_case(case, rank) for name, case in cases.items()}
    records: list[dict[str, Any]] = []
    result = train_rank(task, rank_env(task.plan, rank), records.append)
    return outcomes, result, records


def tables_of(
    outcomes: list[Outcome], pool: str, model: ModelSpec, group: int = 0
) -> dict[str, torch.Tensor]:
    """A replica group's whole tables, put together from its ranks' shards: NaN where none is."""
    whole = {
        t.name: torch.full((t.num_embeddings, t.embedding_dim), torch.nan) for t in model.all_tables
    }
    for outcome in outcomes:
        for held in outcome.shards if (outcome.pool, outcome.group) == (pool, group) else []:
            rows, columns = held.weight.shape
            whole[held.table][held.row : held.row + rows, held.column : held.column + columns] = (
                held.weight
            )
    return whole


def copies(plan: Plan) -> list[tuple[str, int]]:
    """Pool and replica group of every copy of the tables."""
    return [(name, g) for name, pool in plan.pools.items() for g in range(pool.replica_groups)]


def error_against_reference(case: Case, outcomes: list[Outcome]) -> float:
    """Largest difference in any loss, table element or dense weight."""
    model = case.plan.model
    task = TrainTask(case.plan, steps=case.steps, seed=SEED)
    batches = list(open_source(task).train_batches(Slice(0, case.plan.global_batch)))
    losses, reference = train_reference(model, batches, SEED)
    differences = [
        (torch.tensor(outcome.losses) - torch.tensor(losses)).abs().max() for outcome in outcomes
    ]
    for pool, group in copies(case.plan):
        for name, table in tables_of(outcomes, pool, model, group).items():
            differences.append((table - reference.tables[name].weight).abs().max())
    for outcome in outcomes:
        for name, value in outcome.dense.items():
            part, layer = name.split(".layers.")
            expected = getattr(reference, part).get_parameter(layer)
            differences.append((value - expected).abs().max())
    worst = torch.stack(differences).max()
    return float(worst.detach())


def _placements(model: ModelSpec, *placements: Placement) -> dict[str, Placement]:
    return {t.name: p for t, p in zip(model.all_tables, placements, strict=True)}


def _four_rank_cases() -> dict[str, Case]:
    everyone = (0, 1, 2, 3)
    dp, rw = place("data_parallel", *everyone), place("row_wise", *everyone)
    cw = place("column_wise", 2, 0, widths=(12, 4))
    repeated = place("column_wise", 1, 1, 3, widths=(4, 4, 8))
    twrw, grid = (
        place("table_row_wise", 2, 3),
        place("grid_shard", 0, 1, 2, 3, widths=(12, 4)),
    )

    def one_pool(model: ModelSpec, *placements: Placement) -> Case:
        pools = {"p": (4, 64, _placements(model, *placements))}
        return Case(plan_of(pools, model, node_size=2))

    cases = {
        "table_wise": one_pool(
            SGD, place("table_wise", 3), place("table_wise", 0), place("table_wise", 3)
        ),
        "row_wise": one_pool(SGD, rw, rw, rw),
        "column_wise": one_pool(SGD, cw, repeated, cw),
        "data_parallel": one_pool(SGD, dp, dp, dp),
        "table_row_wise": one_pool(SGD, twrw, place("table_row_wise", 0, 1), twrw),
        "grid_shard": one_pool(SGD, grid, grid, grid),
        "mixed": one_pool(SGD, cw, dp, rw),
        "mixed nodes": one_pool(SGD, twrw, dp, grid),
        "adagrad": one_pool(ADAGRAD, cw, dp, rw),
        "adagrad data_parallel": one_pool(ADAGRAD, dp, dp, dp),
        "rowwise_adagrad": one_pool(ROW_WISE, place("table_wise", 1), dp, rw),
        "rowwise_adagrad nodes": one_pool(ROW_WISE, twrw, rw, dp),
    }

    def two_pools(
        ranks: tuple[int, int], batch: tuple[int, int], first: Any, second: Any, **options: Any
    ) -> Case:
        model = options.pop("model", SGD)
        pools = {
            "a": (ranks[0], batch[0], _placements(model, *first)),
            "b": (ranks[1], batch[1], _placements(model, *second)),
        }
        case_options = {k: options.pop(k) for k in ("unweighted", "steps") if k in options}
        return Case(plan_of(pools, model, **options), **case_options)

    tw, pair = place("table_wise", 0), (0, 1)
    three_rw, three_dp = place("row_wise", 0, 1, 2), place("data_parallel", 0, 1, 2)
    wide = (place("column_wise", 1, 0, widths=(12, 4)), place("data_parallel", *pair), tw)
    cases |= {
        "equal pools": two_pools((2, 2), (64, 64), wide, (place("row_wise", *pair),) * 3),
        "unequal pools": two_pools((2, 2), (96, 32), wide, (place("row_wise", *pair),) * 3),
        "three and one": two_pools((3, 1), (64, 64), (three_rw, three_dp, tw), (tw, tw, tw)),
        "unweighted": two_pools(
            (2, 2), (96, 32), wide, (place("row_wise", *pair),) * 3, unweighted=True
        ),
    }
    for name, model in {"sgd": SGD, "rowwise": ROW_WISE, "adagrad": ADAGRAD}.items():
        for label, interval in (("apart", 1000), ("combined", 3)):
            cases[f"{name} {label}"] = two_pools(
                (2, 2), (96, 32), wide, (place("row_wise", *pair), tw, tw),
                model=model, interval=interval, steps=3,
            )  # fmt: skip
    return cases | _two_group_cases()


def _two_group_cases() -> dict[str, Case]:
    """One pool of four ranks: two replica groups of two, each with a copy of the tables."""
    both = (0, 1)
    dp, rw = place("data_parallel", *both), place("row_wise", *both)
    cw = place("column_wise", 1, 0, widths=(12, 4))
    tw, last = place("table_wise", 0), place("table_wise", 1)
    one_node, second_node = place("table_row_wise", *both), place("table_row_wise", 1)
    grid = place("grid_shard", *both, widths=(4, 12))

    def groups(model: ModelSpec, node_size: int, *placements: Placement, **options: Any) -> Case:
        interval = options.pop("interval", 1)
        pools = {"p": (4, 64, _placements(model, *placements))}
        plan = plan_of(pools, model, node_size=node_size, groups={"p": 2}, interval=interval)
        return Case(plan, **options)

    return {
        "groups in a node": groups(SGD, 4, cw, dp, rw),
        "groups, tables whole": groups(SGD, 4, last, tw, last),
        "groups of a node": groups(SGD, 2, one_node, rw, dp),
        "groups of two nodes": groups(SGD, 1, second_node, dp, grid),
        "groups, pool's share": groups(SGD, 4, cw, dp, rw, share_factor=2.0),
        "groups, every two steps": groups(ROW_WISE, 2, one_node, dp, rw, steps=4, interval=2),
    }


CASES = _four_rank_cases()


JOB = TrainTask(CASES["three and one"].plan, steps=12, seed=SEED, log_interval_steps=5)


@pytest.fixture(scope="module")
def ran() -> list[tuple[dict[str, Outcome], TrainResult, list[dict[str, Any]]]]:
    """Everything on four ranks in one group of processes: starting them costs more than running."""
    return run_on_processes(4, run_cases, CASES, JOB)


@pytest.fixture(scope="module")
def outcomes(ran: list[Any]) -> dict[str, list[Outcome]]:
    return {name: [outcomes[name] for outcomes, _, _ in ran] for name in CASES}


def test_a_job_over_two_pools_answers_alike_on_every_rank(
    ran: list[Any], world_of_one: None
) -> None:
    """Its quality is also that of one rank alone: neither samples nor steps depend on the plan."""
    alone = plan_of({"p": (1, 256, whole_on_rank_0(SGD))}, SGD)
    expected = train_rank(replace(JOB, plan=alone), rank_env(alone, 0), lambda _: None)
    for _, result, records in ran:
        assert (result.steps, result.samples, result.eval_samples) == (12, 12 * 256, 256)
        assert [record["step"] for record in records] == [5, 10, 12]
        assert [r["loss"] for r in records] == [r["loss"] for r in ran[0][2]]
        for name in ("loss", "auc", "ne", "calibration"):
            assert getattr(result, name) == getattr(ran[0][1], name)
            assert getattr(result, name) == pytest.approx(getattr(expected, name), abs=1e-5)
        assert result.dense_exchange_bytes > 0 and result.embedding_exchange_bytes > 0


def is_exact(case: Case) -> bool:
    """SGD or one copy, every step, right weights."""
    return not case.unweighted and case.share_factor == 1.0 and case.steps == STEPS


SAME_AS_PLAIN = [name for name, case in CASES.items() if is_exact(case)]


@pytest.mark.parametrize("name", SAME_AS_PLAIN)
def test_equals_plain_pytorch(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    assert error_against_reference(CASES[name], outcomes[name]) < TOLERANCE


def test_unweighted_average_is_noticed(outcomes: dict[str, list[Outcome]]) -> None:
    assert error_against_reference(CASES["unweighted"], outcomes["unweighted"]) > 500 * TOLERANCE


def test_a_groups_share_is_not_its_pools(outcomes: dict[str, list[Outcome]]) -> None:
    name = "groups, pool's share"
    assert not error_against_reference(CASES[name], outcomes[name]) < 500 * TOLERANCE


def test_groups_hold_the_same_after_an_exchange(outcomes: dict[str, list[Outcome]]) -> None:
    """Weights and state; with Adagrad and K = 2 they are not plain PyTorch's."""
    name = "groups, every two steps"
    first, second = ([o for o in outcomes[name] if o.group == group] for group in (0, 1))
    for one, other in zip(first, second, strict=True):
        assert one.sent == other.sent > 0
        for held, copy in zip(one.shards, other.shards, strict=True):
            assert (held.table, held.row, held.column) == (copy.table, copy.row, copy.column)
            torch.testing.assert_close(held.weight, copy.weight, rtol=0, atol=0)
            torch.testing.assert_close(held.state, copy.state, rtol=0, atol=0)
    assert error_against_reference(CASES[name], outcomes[name]) > 10 * TOLERANCE


def test_one_rank_equals_plain_pytorch() -> None:
    for model in (SGD, ROW_WISE):
        case = Case(plan_of({"p": (1, 256, whole_on_rank_0(model))}, model))
        assert error_against_reference(case, [run_alone(case)]) < TOLERANCE


def run_alone(case: Case) -> Outcome:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return run_case(case, 0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise", "adagrad"])
def test_exchange_combines_by_share_of_samples(
    optimizer: str, outcomes: dict[str, list[Outcome]]
) -> None:
    """After K steps, weights are sum_p a_p w_p of the replicas that trained apart."""
    apart, combined = outcomes[f"{optimizer} apart"], outcomes[f"{optimizer} combined"]
    plan = CASES[f"{optimizer} combined"].plan
    replicas = {pool: tables_of(apart, pool, plan.model) for pool in plan.pools}
    drift = max(float((replicas["a"][t] - replicas["b"][t]).abs().max()) for t in replicas["a"])
    assert drift > 1e-4
    for pool in plan.pools:
        for table, weight in tables_of(combined, pool, plan.model).items():
            expected = sum(plan.share(p) * replicas[p][table] for p in plan.pools)
            torch.testing.assert_close(weight, expected, atol=1e-6, rtol=1e-5)
    assert all(outcome.sent > 0 for outcome in combined)
    assert all(outcome.sent == 0 for outcome in apart)


def _row_state(outcomes: list[Outcome], pool: str, table: str, rows: int) -> torch.Tensor:
    """Row-wise state of a whole table: the mean over its column shards, by width."""
    state, width = torch.zeros(rows), torch.zeros(rows)
    for outcome in outcomes:
        for held in outcome.shards if outcome.pool == pool else []:
            if held.table == table:
                part = slice(held.row, held.row + len(held.weight))
                state[part] += held.weight.shape[1] * held.state[0]
                width[part] += held.weight.shape[1]
    return state / width


def test_exchange_combines_optimizer_state(outcomes: dict[str, list[Outcome]]) -> None:
    apart, combined = outcomes["rowwise apart"], outcomes["rowwise combined"]
    plan = CASES["rowwise combined"].plan
    for table in plan.model.all_tables:
        rows = table.num_embeddings
        expected = sum(plan.share(p) * _row_state(apart, p, table.name, rows) for p in plan.pools)
        for outcome in combined:
            for held in outcome.shards:
                if held.table == table.name:
                    part = expected[held.row : held.row + len(held.weight)]
                    torch.testing.assert_close(held.state[0], part, atol=1e-7, rtol=1e-4)
    assert float(expected.max()) > 0
