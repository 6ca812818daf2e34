"""Dense networks whose optimizer state or parameters are cut train what whole ones train."""

from __future__ import annotations

import pytest

from planner.specs.model import ModelSpec
from planner.specs.plan import MemoryPolicy, Plan
from planner.specs.units import Dtype
from tests.trainers.jobs import (
    model_of,
    place,
    plan_of,
    rank_env,
    run_on_processes,
    whole_on_rank_0,
)
from tests.trainers.test_exact import (
    SEED,
    STEPS,
    TOLERANCE,
    Case,
    Outcome,
    error_against_reference,
    run_case,
)
from trainers.loop import train_rank
from trainers.task import TrainResult, TrainTask

RANKS = 4
MODELS = {
    "sgd": model_of(rate=0.05),
    "adagrad": model_of(dense="adagrad", rate=0.02),
    "adam": model_of(dense="adam", rate=0.002),
}


def policy(parallelism: str, *recompute: str) -> MemoryPolicy:
    return MemoryPolicy(
        compute_precision=Dtype.FP32,
        dense_parallelism=parallelism,  # type: ignore[arg-type]
        recompute=recompute,
    )


def one_pool(model: ModelSpec, policy: MemoryPolicy) -> Plan:
    everyone = range(RANKS)
    placed = (
        place("row_wise", *everyone),
        place("data_parallel", *everyone),
        place("table_wise", 2),
    )
    placements = {t.name: p for t, p in zip(model.all_tables, placed, strict=True)}
    return plan_of({"p": (RANKS, 64, placements)}, model, policy=policy)


def two_pools(model: ModelSpec, policy: MemoryPolicy) -> Plan:
    """Three ranks with 64 samples each and one with 32."""
    tables = whole_on_rank_0(model)
    return plan_of({"a": (3, 64, tables), "b": (1, 64, tables)}, model, policy=policy)


def _cases() -> dict[str, Case]:
    cases = {
        "data_parallel, top recomputed": Case(
            one_pool(MODELS["sgd"], policy("data_parallel", "top"))
        ),
        "fully_sharded, top recomputed": Case(
            one_pool(MODELS["sgd"], policy("fully_sharded", "top"))
        ),
    }
    for name, model in MODELS.items():
        for parallelism in ("data_parallel", "sharded_optimizer", "fully_sharded"):
            cases[f"{parallelism}, {name}"] = Case(one_pool(model, policy(parallelism)))
        cases[f"two pools, {name}"] = Case(two_pools(model, policy("sharded_optimizer")))
    return cases


CASES = _cases()


def run_cases(
    rank: int, cases: dict[str, Case]
) -> tuple[dict[str, Outcome], dict[str, TrainResult]]:
    """Every case's weights, and what a whole job of it answers."""
    outcomes = {name: run_case(case, rank) for name, case in cases.items()}
    results = {}
    for name, case in cases.items():
        task = TrainTask(case.plan, steps=STEPS, seed=SEED)
        results[name] = train_rank(task, rank_env(case.plan, rank), lambda _: None)
    return outcomes, results


@pytest.fixture(scope="module")
def ran() -> list[tuple[dict[str, Outcome], dict[str, TrainResult]]]:
    return run_on_processes(RANKS, run_cases, CASES)


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_pytorch(
    name: str, ran: list[tuple[dict[str, Outcome], dict[str, TrainResult]]]
) -> None:
    outcomes = [outcomes[name] for outcomes, _ in ran]
    assert error_against_reference(CASES[name], outcomes) < TOLERANCE
