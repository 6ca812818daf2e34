"""Baselines on instances small enough to work out by hand, and on random ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.baselines.balanced import lookup_balanced, size_balanced
from planner.baselines.greedy import CACHE_LOAD_FACTOR, MIN_PARTITION, torchrec_greedy
from planner.baselines.hugectr import hugectr, table_cost
from planner.baselines.league import solve_alone
from planner.baselines.naive import naive_choice
from planner.baselines.problem import (
    Baseline,
    PoolProblem,
    least_burdened,
    placements_of,
    pool_problem,
)
from planner.baselines.registry import BASELINES
from planner.baselines.uniform import row_wise, table_wise
from planner.cost.context import PoolContext
from planner.cost.load import COMPONENTS, Scope
from planner.evaluate import evaluate
from planner.ilp.program import HBM
from planner.search import SearchOptions
from planner.shards import extents
from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.errors import InfeasibleError
from planner.specs.load import load_device, load_model
from planner.specs.model import (
    Architecture,
    ComputeKernel,
    ModelSpec,
    ShardingType,
    TableConstraints,
    TableGroup,
)
from planner.specs.plan import MemoryPolicy, Placement
from planner.specs.units import Dtype

POLICY = MemoryPolicy(compute_precision=Dtype.FP32)


def model_with(*groups: TableGroup) -> ModelSpec:
    small = load_model("dlrm_criteo_small").model_dump()
    changes = {"arch": Architecture.MLP_CONCAT, "interaction": {"type": "none"}}
    tables = tuple(group.model_dump() for group in groups)
    return ModelSpec.model_validate(small | changes | {"tables": tables})


def table(name: str, rows: int, ids: float = 1.0, dim: int = 64, count: int = 1) -> TableGroup:
    return TableGroup(
        name=name, num_embeddings=rows, embedding_dim=dim, pooling_factors=(ids,), count=count
    )


def context(
    model: ModelSpec, ranks: int = 2, nodes: int = 1, device: str = "h100", batch: int = 64
) -> PoolContext:
    pool = PoolSpec(name="pool", device=device, nodes=nodes, devices_per_node=ranks // nodes)
    job = model.model_copy(update={"global_batch": batch * ranks})
    return PoolContext(pool, load_device(device), job, batch, POLICY)


def placed(problem: PoolProblem, baseline: Baseline) -> dict[str, Placement]:
    return placements_of(problem.ctx, problem.program, baseline(problem))


def homes(problem: PoolProblem, baseline: Baseline) -> dict[str, int]:
    found = placed(problem, baseline)
    assert {p.sharding_type for p in found.values()} == {ShardingType.TABLE_WISE}
    return {name: placement.ranks[0] for name, placement in found.items()}


FOUR = (table("a", 100, 1), table("b", 60, 5), table("c", 50, 4), table("d", 30, 2))


def test_size_balanced_puts_the_largest_first_on_the_emptiest_rank() -> None:
    problem = pool_problem(context(model_with(*FOUR)))
    # 100 | 60; 50 to the 60; 30 to the 100, which now has less than 110.
    assert homes(problem, size_balanced) == {"a": 0, "b": 1, "c": 1, "d": 0}


def test_lookup_balanced_looks_at_ids_times_columns_only() -> None:
    problem = pool_problem(context(model_with(*FOUR)))
    # 5 | 4; 2 to the 4; 1 to the 5.
    assert homes(problem, lookup_balanced) == {"a": 0, "b": 0, "c": 1, "d": 1}
    wide = pool_problem(context(model_with(*FOUR, table("e", 30, 1, dim=640))))
    # In units of 64 elements: 10 | 5, 4, 2 on the other, 1 to the 10, which has less than 11.
    assert homes(wide, lookup_balanced) == {"a": 0, "b": 1, "c": 1, "d": 1, "e": 0}


def test_equal_tables_keep_the_models_order() -> None:
    problem = pool_problem(context(model_with(table("t", 1000, count=5))))
    for baseline in (size_balanced, lookup_balanced, table_wise):
        assert list(homes(problem, baseline).values()) == [0, 1, 0, 1, 0]


def test_rank_without_room_is_passed_over() -> None:
    groups = (table("big", 1000, 1), table("large", 900, 2), table("hot", 100, 10))
    problem = pool_problem(context(model_with(*groups)))
    assert homes(problem, lookup_balanced) == {"hot": 0, "large": 1, "big": 1}
    needed = {
        group.tables[0]: float(loads[0].shards[0].load[HBM])
        for group, loads in zip(problem.program.classes, problem.program.loads, strict=True)
    }
    received = sum(float(loads[0].everywhere[HBM]) for loads in problem.program.loads)
    room = received + needed["big"] + max(needed["hot"], needed["large"] / 2)
    tight = replace(problem, program=replace(problem.program, hbm_room_bytes=room))
    assert homes(tight, lookup_balanced) == {"hot": 0, "large": 1, "big": 0}
    full = replace(problem, program=replace(problem.program, hbm_room_bytes=received + 10.0))
    with pytest.raises(InfeasibleError, match="table hot: it takes"):
        lookup_balanced(full)


def test_least_burdened_passes_full_ranks_and_counts_a_node_by_its_worst() -> None:
    program = pool_problem(context(model_with(*FOUR), ranks=4, nodes=2)).program
    ranks, load = np.zeros((4, len(COMPONENTS))), np.zeros(len(COMPONENTS))
    load[HBM] = 5.0
    burden = np.array([1.0, 9.0, 4.0, 4.0])
    assert least_burdened(program, ranks, burden, Scope.RANK, load) == 0
    assert least_burdened(program, ranks, burden, Scope.NODE, load) == 1
    ranks[0, HBM] = program.hbm_room_bytes
    assert least_burdened(program, ranks, burden, Scope.RANK, load) == 2
    assert least_burdened(program, ranks, burden + np.inf, Scope.RANK, load) is None


def test_table_wise_deals_tables_in_turn_whatever_they_weigh() -> None:
    groups = (table("huge", 10_000_000), *FOUR, table("e", 7))
    problem = pool_problem(context(model_with(*groups), ranks=4))
    assert list(homes(problem, table_wise).values()) == [0, 1, 2, 3, 0, 1]


def test_row_wise_replicates_what_has_fewer_rows_than_ranks() -> None:
    problem = pool_problem(context(model_with(table("tiny", 3), table("four", 4)), ranks=4))
    found = placed(problem, row_wise)
    assert found["tiny"].sharding_type is ShardingType.DATA_PARALLEL
    assert found["four"].sharding_type is ShardingType.ROW_WISE
    assert found["tiny"].ranks == found["four"].ranks == (0, 1, 2, 3)


def test_constraints_go_before_the_baselines_wish() -> None:
    group = table("only_rows", 1000).model_copy(
        update={"constraints": TableConstraints(sharding_types=(ShardingType.ROW_WISE,))}
    )
    problem = pool_problem(context(model_with(group, table("free", 1000))))
    for name, baseline in BASELINES.items():
        assert placed(problem, baseline)["only_rows"].sharding_type is ShardingType.ROW_WISE, name


def test_price_of_a_pooled_row() -> None:
    device = load_device("h100")
    hbm, link = device.memory.hbm_bytes_per_s.value, device.scale_up.bytes_per_s.value
    ctx = context(model_with(*FOUR))
    # A row is read and written in fp32, and sent once in fp32: twice the work.
    assert table_cost(pool_problem(ctx)) == pytest.approx(hbm / link / 2)
    half = replace(ctx, policy=POLICY.model_copy(update={"communication_precision": Dtype.FP16}))
    assert table_cost(pool_problem(half)) == pytest.approx(hbm / link / 4)
    far = context(model_with(*FOUR), ranks=4, nodes=2)
    assert table_cost(pool_problem(far)) == pytest.approx(hbm / far.nic_bytes_per_s / 2)


def test_hugectr_splits_the_hottest_table_until_it_costs_more() -> None:
    """Four ranks, ids 80, 1, 1, 1, a pooled row costs p = 3.7: whole max = 80 + p, in two 40 + p,
    in four 21 + 2 p = 28.4, rows of all over all 20.75 + 4 p = 35.6."""
    groups = (table("hot", 40_000, 80), *(table(name, 40_000) for name in "bcd"))
    problem = pool_problem(context(model_with(*groups), ranks=4))
    assert 3 < table_cost(problem) < 4
    found = placed(problem, hugectr)
    assert found["hot"].sharding_type is ShardingType.COLUMN_WISE
    assert sorted(found["hot"].ranks) == [0, 1, 2, 3]
    cold = [found[name] for name in "bcd"]
    assert {p.sharding_type for p in cold} == {ShardingType.TABLE_WISE}
    assert len({p.ranks for p in cold}) == 3


def test_hugectr_replicates_small_tables() -> None:
    problem = pool_problem(context(model_with(table("s", 1000), table("hot", 40_000, 50)), 8))
    found = placed(problem, hugectr)
    assert found["s"].sharding_type is ShardingType.DATA_PARALLEL
    assert found["hot"].sharding_type is not ShardingType.DATA_PARALLEL


def test_hugectr_never_pairs_shards_of_one_table() -> None:
    """60 ids on rank 0, 50 on rank 1: the other 50 of the same table go to rank 0 all the same."""

    def only(kind: ShardingType) -> dict[str, TableConstraints]:
        return {"constraints": TableConstraints(sharding_types=(kind,))}

    halved = table("halved", 40_000, 100).model_copy(update=only(ShardingType.COLUMN_WISE))
    whole = table("whole", 40_000, 60).model_copy(update=only(ShardingType.TABLE_WISE))
    found = placed(pool_problem(context(model_with(halved, whole))), hugectr)
    assert found["whole"].ranks == (0,) and sorted(found["halved"].ranks) == [0, 1]


def test_greedy_keeps_to_the_conventional_options(dlrm: ModelSpec) -> None:
    found = placed(pool_problem(context(dlrm, ranks=16, nodes=2, device="b200")), torchrec_greedy)
    for placement in found.values():
        assert placement.sharding_type is not ShardingType.GRID_SHARD
        assert all(width >= MIN_PARTITION for width in placement.column_widths)
        assert placement.cache_load_factor in (None, CACHE_LOAD_FACTOR)


def test_greedy_baseline_is_the_naive_ports(dlrm: ModelSpec) -> None:
    pool = PoolSpec(name="pool", device="b200", nodes=1, devices_per_node=8)
    choice = naive_choice(ClusterSpec(name="c", pools=(pool,)), dlrm)
    assert (
        placed(pool_problem(choice.contexts["pool"]), torchrec_greedy)
        == (choice.placements["pool"])
    )


def test_greedy_spills_to_the_host_when_device_memory_is_short() -> None:
    big = table("big", 90_000_000, dim=256)
    problem = pool_problem(context(model_with(big, table("small", 1000)), ranks=1))
    found = placed(problem, torchrec_greedy)
    assert found["big"].compute_kernel in (
        ComputeKernel.FUSED_UVM,
        ComputeKernel.FUSED_UVM_CACHING,
    )


@st.composite
def contexts(draw: st.DrawFn) -> PoolContext:
    groups = [
        table(
            f"t{index}",
            rows=draw(st.sampled_from([3, 1_000, 200_000, 40_000_000, 150_000_000])),
            ids=draw(st.sampled_from([1, 3, 40])),
            dim=draw(st.sampled_from([8, 64, 128, 256])),
            count=draw(st.sampled_from([1, 1, 3])),
        )
        for index in range(draw(st.integers(1, 4)))
    ]
    nodes = draw(st.sampled_from([1, 1, 2]))
    ranks = nodes * draw(st.integers(1, 4))
    device = draw(st.sampled_from(["a100", "mi350x", "cpu"]))
    return context(model_with(*groups), ranks, nodes, device, draw(st.sampled_from([8, 2048])))


@settings(max_examples=100, deadline=None)
@given(ctx=contexts())
def test_every_baseline_covers_all_tables_or_says_why_not_and_none_beats_the_bound(
    ctx: PoolContext,
) -> None:
    problem = pool_problem(ctx)
    bound_s, ours = solve_alone(ctx, SearchOptions(time_limit_s=10))
    for name, baseline in BASELINES.items():
        try:
            found = placed(problem, baseline)
        except InfeasibleError as error:
            assert "GiB" in error.problem, name
            continue
        evaluation = evaluate({"pool": ctx}, {"pool": found})
        pool = evaluation.pools["pool"]
        for one in ctx.model.all_tables:
            placement = found[one.name]
            assert max(placement.ranks) < ctx.ranks
            area = sum(part.rows * part.columns for part in extents(one, placement, pool))
            replicated = placement.sharding_type is ShardingType.DATA_PARALLEL
            assert replicated or area == one.parameters, (name, one.name)
        if evaluation.overfull:
            assert name in ("table_wise", "row_wise"), "the others look at memory"
        else:
            assert ours is not None
            assert evaluation.step_s >= bound_s * (1 - 1e-9), name
