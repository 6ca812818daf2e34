"""Moves of one table against evaluate() on whole plans, all places tried; verdicts."""

from __future__ import annotations

import pytest
from explain_plans import (
    BIG,
    PLANS,
    by_columns,
    groups,
    host_bound,
    make_plan,
    model,
    on,
    one_pool,
    one_rank,
    pool,
    two_pools,
)

from planner.assemble import contexts_of
from planner.evaluate import Evaluation, evaluate
from planner.explain.job import job_of
from planner.explain.moves import Bench, own_loads, way_of
from planner.explain.table import TableExplanation, explain_table
from planner.ilp.options import ways
from planner.specs.errors import UsageError
from planner.specs.model import ComputeKernel, ShardingType, TableConstraints
from planner.specs.plan import Placement, Plan

ONLY_HBM = TableConstraints(
    sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=(ComputeKernel.FUSED,)
)


def moved(plan: Plan, pool_name: str, table: str, placement: Placement) -> Evaluation:
    placements = {name: dict(one.placements) for name, one in plan.pools.items()}
    placements[pool_name][table] = placement
    return evaluate(contexts_of(plan), placements)


def device_bytes(evaluation: Evaluation, pool_name: str) -> int:
    return sum(memory["total"] for memory in evaluation.pools[pool_name].memory_bytes)


@pytest.mark.parametrize("name", PLANS)
def test_every_move_is_priced_as_evaluate_prices_it(name: str) -> None:
    plan = PLANS[name]()
    before = evaluate(contexts_of(plan), {n: p.placements for n, p in plan.pools.items()})
    found = explain_table(plan, "t0")
    for pool_name, one in found.pools.items():
        assert one.moves or plan.pools[pool_name].ranks == 1
        for move in one.moves:
            after = moved(plan, pool_name, "t0", move.placement)
            assert move.step_ms == pytest.approx(after.step_s * 1e3, rel=1e-9)
            assert move.delta_ms == pytest.approx((after.step_s - before.step_s) * 1e3, abs=1e-9)
            assert move.fits == (not after.overfull)
            assert move.memory_delta_bytes == device_bytes(after, pool_name) - device_bytes(
                before, pool_name
            )


@pytest.mark.parametrize("name", ["one_pool", "two_pools", "groups"])
@pytest.mark.parametrize("table", ["t0", "t1"])
def test_a_table_in_one_piece_is_tried_on_every_rank(name: str, table: str) -> None:
    """Brute force: no rank makes the step shorter than the one that was found."""
    plan = PLANS[name]()
    found = explain_table(plan, table)
    for pool_name, one in found.pools.items():
        for move in one.moves:
            way = move.placement
            if way.sharding_type is not ShardingType.TABLE_WISE:
                continue
            steps = [
                moved(plan, pool_name, table, way.model_copy(update={"ranks": (rank,)})).step_s
                for rank in range(plan.pools[pool_name].group_ranks)
                if way_of(way) != way_of(one.placement) or (rank,) != one.placement.ranks
            ]
            assert move.step_ms == pytest.approx(min(steps) * 1e3, rel=1e-9)


def test_node_pieces_are_tried_on_every_node_and_column_shards_spread() -> None:
    plan = one_pool()
    moves = explain_table(plan, "t0").pools["amd"].moves
    rows = next(m for m in moves if m.placement.sharding_type is ShardingType.TABLE_ROW_WISE)
    steps = {
        ranks: moved(plan, "amd", "t0", rows.placement.model_copy(update={"ranks": ranks})).step_s
        for ranks in ((0, 1), (2, 3))
    }
    assert rows.step_ms == pytest.approx(min(steps.values()) * 1e3, rel=1e-9)
    columns = next(m for m in moves if m.placement.column_widths == (16,) * 4)
    assert len(set(columns.placement.ranks)) == 4


def test_all_ways_are_there_once() -> None:
    plan = one_pool()
    job = job_of(plan)
    table = plan.model.all_tables[0]
    expected = set(ways(job.pools["amd"].ctx, table, spill=True))
    found = [way_of(move.placement) for move in explain_table(plan, "t0").pools["amd"].moves]
    assert set(found) == expected and len(found) == len(expected)


def test_own_loads_of_all_tables_are_the_ranks_loads(any_plan: Plan) -> None:
    for state in job_of(any_plan).pools.values():
        tables = any_plan.model.all_tables
        total = sum(own_loads(state, table, state.placements[table.name]) for table in tables)
        assert total == pytest.approx(state.loads, rel=1e-9)


def test_a_plan_that_one_move_improves_says_so() -> None:
    plan = make_plan(
        (pool("amd", "mi350x", 1, 2),),
        model([(2_000_000, 64, 30.0), (2_000_000, 64, 30.0)], 524_288, constraints=ONLY_HBM),
        {"amd": 262_144},
        {"amd": {"t0": on(0), "t1": on(0)}},
    )
    one = explain_table(plan, "t1").pools["amd"]
    assert one.improves and one.share_of_slowest == pytest.approx(0.5, abs=0.01)
    assert one.verdict.startswith("table_wise fused fp32 on rank 1 would shorten the step by")
    assert one.verdict.endswith("this plan can be improved")
    (move,) = one.moves
    assert move.delta_ms < 0 and move.placement.ranks == (1,)


def test_a_move_that_lacks_memory_says_how_much() -> None:
    """Tables of 120, 140 and 200 GiB on two MI350X: 140 do not fit beside 200."""
    gib = (1 << 30) // (64 * 4)
    plan = make_plan(
        (pool("amd", "mi350x", 1, 2),),
        model(
            [(90 * gib, 64, 30.0), (140 * gib, 64, 30.0), (200 * gib, 64, 1.0)],
            524_288,
            constraints=ONLY_HBM,
        ),
        {"amd": 262_144},
        {"amd": {"t0": on(0), "t1": on(0), "t2": on(1)}},
    )
    one = explain_table(plan, "t1").pools["amd"]
    after = moved(plan, "amd", "t1", on(1))
    ((name, rank, kind, excess),) = after.overfull
    assert (name, rank, kind) == ("amd", 1, "device")
    assert one.verdict.endswith(f"but rank 1 lacks {excess / 2**30:.1f} GiB of device memory")
    assert not one.improves


def test_a_host_bound_step_hides_the_tables() -> None:
    one = explain_table(host_bound(), "t0").pools["amd"]
    assert one.verdict.startswith("the step is decided by the host's launches of amd")
    assert "tables' time" in one.verdict
    assert one.step_without_ms == pytest.approx(job_of(host_bound()).step_ms)


def test_a_table_with_no_other_place_says_so() -> None:
    plan = make_plan(
        (pool("solo", "h200", 1, 1),),
        model(BIG, 8192, constraints=ONLY_HBM),
        {"solo": 8192},
        {"solo": {"t0": on(0), "t1": on(0), "t2": on(0)}},
    )
    one = explain_table(plan, "t1").pools["solo"]
    assert one.moves == () and one.verdict == "there is no other way to place it"


def test_the_best_move_out_of_a_good_plan_costs_something() -> None:
    plan = make_plan(
        (pool("amd", "mi350x", 1, 2),),
        model([(2_000_000, 64, 30.0), (2_000_000, 64, 30.0)], 524_288, constraints=ONLY_HBM),
        {"amd": 262_144},
        {"amd": {"t0": on(0), "t1": on(1)}},
    )
    one = explain_table(plan, "t1").pools["amd"]
    (move,) = one.moves
    assert move.delta_ms > 0
    assert one.verdict == (
        "no other placement shortens the step; the next best (table_wise fused fp32 on rank 0) "
        f"lengthens it by {move.delta_ms:.3g} ms"
    )


def test_costs_are_those_of_the_rank_it_lies_on() -> None:
    plan = two_pools()
    cost = explain_table(plan, "t1").pools["amd"].cost
    bench = Bench(job_of(plan), "amd", plan.model.all_tables[1])
    own = bench.own
    assert cost.rank == 3
    assert cost.lookup_forward_ms == pytest.approx(1e3 * own[3, 0]) and own[0, 0] == 0
    assert cost.hbm_bytes >= 500_000 * 32 * 4
    assert cost.ids_sent_ms > 0 and cost.host_bytes == 0


def test_replica_groups_count_memory_of_every_copy() -> None:
    one = explain_table(groups(), "t0").pools["amd"]
    assert one.replica_groups == 2
    assert all(max(move.placement.ranks) < 2 for move in one.moves)


def test_an_unknown_table_is_answered_with_its_neighbours() -> None:
    with pytest.raises(UsageError, match="no such table") as caught:
        explain_table(one_pool(), "t9")
    assert "use t0" in caught.value.fix or "use t" in caught.value.fix
    wide = make_plan(
        (pool("solo", "h200", 1, 1),),
        model([(100, 16, 1.0)] * 12, 64),
        {"solo": 64},
        {"solo": {f"t{index}": on(0) for index in range(12)}},
    )
    with pytest.raises(UsageError) as caught:
        explain_table(wide, "t111")
    assert caught.value.fix.startswith("use t11 or ") and "9 more" in caught.value.fix


def test_the_same_plan_is_explained_the_same_and_survives_json() -> None:
    found = explain_table(two_pools(), "t0")
    assert found == explain_table(two_pools(), "t0")
    assert TableExplanation.model_validate_json(found.model_dump_json()) == found


def test_column_shards_that_repeat_ranks_are_priced() -> None:
    plan = make_plan(
        (pool("amd", "mi350x", 1, 2),),
        model([(2_000_000, 64, 30.0), (1000, 64, 1.0)], 524_288),
        {"amd": 262_144},
        {"amd": {"t0": by_columns(0, 0, widths=(32, 32)), "t1": on(1)}},
    )
    one = explain_table(plan, "t0").pools["amd"]
    spread = next(m for m in one.moves if m.placement.column_widths == (32, 32))
    assert sorted(spread.placement.ranks) == [0, 1] and spread.delta_ms < 0


def test_one_rank_is_explained() -> None:
    one = explain_table(one_rank(), "t0").pools["solo"]
    assert {m.placement.compute_kernel for m in one.moves} >= {ComputeKernel.FUSED_UVM}
    assert one.verdict
