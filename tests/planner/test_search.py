from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.baselines.enumerate import best_joint_step_s
from planner.cost.context import PoolContext
from planner.ilp.options import pool_program
from planner.ilp.program import PoolProgram
from planner.search import SearchOptions, plan_job
from planner.specs.cluster import BridgeSpec, ClusterSpec, PoolSpec
from planner.specs.errors import InfeasibleError, UsageError
from planner.specs.load import load_device
from planner.specs.model import (
    Architecture,
    DenseOptimizer,
    ModelSpec,
    Optimizers,
    Precision,
    ShardingType,
    SparseOptimizer,
    TableConstraints,
    TableGroup,
)
from planner.specs.plan import MemoryPolicy, Plan, plan_json
from planner.specs.units import Dtype
from planner.splits import SplitSpace

TIGHT = SearchOptions(mip_gap=0.0, matched=True)


def tiny_model(tables: list[tuple[int, int, float]], batch: int, width: int = 64) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        description="",
        source="made up",
        arch=Architecture.MLP_CONCAT,
        global_batch=batch,
        dense_features=4,
        top_mlp=(width, 1),
        tables=tuple(
            TableGroup(
                name=f"t{index}",
                num_embeddings=rows,
                embedding_dim=columns,
                pooling_factors=(pooling,),
                constraints=TableConstraints(
                    sharding_types=(ShardingType.TABLE_WISE, ShardingType.ROW_WISE)
                ),
            )
            for index, (rows, columns, pooling) in enumerate(tables)
        ),
        optimizer=Optimizers(
            dense=DenseOptimizer(name="sgd", learning_rate=0.1),
            sparse=SparseOptimizer(name="sgd", learning_rate=0.1),
        ),
        precision=Precision(),
    )


def cpu_cluster(fast: int, slow: int) -> ClusterSpec:
    return ClusterSpec(
        name="cpus",
        pools=(
            PoolSpec(
                name="fast",
                device="cpu",
                nodes=1,
                devices_per_node=fast,
                cpu_cores=tuple(range(fast)),
                host_memory_gib_per_node=8.0,
            ),
            PoolSpec(
                name="slow",
                device="cpu",
                nodes=1,
                devices_per_node=slow,
                cpu_cores=(fast,),
                host_memory_gib_per_node=8.0,
            ),
        ),
        bridge=BridgeSpec(gbps=20.0, latency_us=10.0),
        reference_device="cpu",
    )


tables = st.lists(
    st.tuples(
        st.sampled_from([1000, 100_000]),
        st.sampled_from([8, 64]),
        st.sampled_from([1.0, 30.0]),
    ),
    min_size=1,
    max_size=2,
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(tables, st.integers(1, 2), st.integers(1, 3), st.integers(2, 24), st.sampled_from([16, 512]))
def test_plan_equals_enumeration_of_splits_and_placements(
    tables: list[tuple[int, int, float]], fast: int, slow: int, samples: int, width: int
) -> None:
    cluster = cpu_cluster(fast, slow)
    model = tiny_model(tables, samples * 6, width)
    space = SplitSpace(tuple(pool.devices for pool in cluster.pools), model.global_batch)
    if space.root is None:
        with pytest.raises(InfeasibleError):
            plan_job(cluster, model, options=TIGHT)
        return

    def programs(pool: str, batch: int) -> list[PoolProgram]:
        return [
            pool_program(
                PoolContext(
                    cluster.pool(pool),
                    load_device("cpu"),
                    model,
                    batch,
                    MemoryPolicy(compute_precision=Dtype.FP32),
                    cluster.bridge,
                    2,
                    replica_groups=groups,
                ),
                spill=False,
            )
            for groups in cluster.pool(pool).group_counts
        ]

    splits = [dict(zip(("fast", "slow"), split, strict=True)) for split in space.all()]
    best = best_joint_step_s(splits, programs)
    plan = plan_job(cluster, model, options=TIGHT)
    assert plan.predicted.step_ms == pytest.approx(best * 1e3, rel=1e-6)
    assert plan.predicted.lower_bound_ms <= best * 1e3 * (1 + 1e-6)


def test_equal_inputs_give_equal_bytes(two_vendors: ClusterSpec, dlrm: ModelSpec) -> None:
    def text() -> str:
        return json.dumps(plan_json(plan_job(two_vendors, dlrm, 8192)))

    assert text() == text()


@pytest.fixture(scope="module")
def matched(two_vendors: ClusterSpec, dlrm: ModelSpec) -> Plan:
    return plan_job(two_vendors, dlrm, 8192, SearchOptions(matched=True))


def test_matched_plan_uses_all_devices_and_the_whole_batch(
    matched: Plan, two_vendors: ClusterSpec
) -> None:
    assert {name: pool.ranks for name, pool in matched.pools.items()} == {
        pool.name: pool.devices for pool in two_vendors.pools
    }
    assert sum(pool.ranks * pool.local_batch for pool in matched.pools.values()) == 8192


def test_gap_is_proven_and_within_what_was_asked(matched: Plan) -> None:
    assert matched.predicted.lower_bound_ms <= matched.predicted.step_ms
    assert matched.predicted.gap <= 0.01
    assert matched.solver.status == "optimal"


def test_every_rank_has_room(matched: Plan) -> None:
    for pool in matched.pools.values():
        assert len(pool.memory_bytes) == pool.ranks
        for memory in pool.memory_bytes:
            parts = set(memory) - {"total", "capacity", "host", "host_capacity"}
            assert memory["total"] == sum(memory[part] for part in parts) <= memory["capacity"]
            assert memory["host"] <= memory["host_capacity"]


def test_every_table_is_placed_in_every_pool(matched: Plan, dlrm: ModelSpec) -> None:
    for pool in matched.pools.values():
        assert list(pool.placements) == [table.name for table in dlrm.all_tables]
        for table in dlrm.all_tables:
            placement = pool.placements[table.name]
            assert all(0 <= rank < pool.ranks for rank in placement.ranks)
            if placement.column_widths:
                assert sum(placement.column_widths) == table.embedding_dim
                assert all(width % 4 == 0 for width in placement.column_widths)


def test_free_plan_is_no_slower_than_matched(
    matched: Plan, two_vendors: ClusterSpec, dlrm: ModelSpec
) -> None:
    free = plan_job(two_vendors, dlrm, 8192)
    assert free.predicted.lower_bound_ms <= matched.predicted.step_ms * (1 + 1e-9)
    assert free.predicted.step_ms <= matched.predicted.step_ms * 1.01


def test_exchange_interval_respects_the_staleness_limit(matched: Plan, dlrm: ModelSpec) -> None:
    assert 1 <= matched.exchange.embedding_interval_steps <= dlrm.max_exchange_interval_steps
    assert matched.exchange.embedding_bytes_per_exchange > 0


def test_chosen_row_of_the_considered_table(matched: Plan) -> None:
    chosen = [row for row in matched.considered if row.chosen]
    assert len(chosen) == 1
    assert chosen[0].local_batch == {n: p.local_batch for n, p in matched.pools.items()}


def test_lower_precision_and_recompute_only_where_they_help(matched: Plan) -> None:
    assert all(pool.policy.recompute == () for pool in matched.pools.values())


def test_unreachable_batch_names_the_nearest(small: ModelSpec) -> None:
    cluster = ClusterSpec(
        name="even",
        pools=(PoolSpec(name="eight", device="h100", nodes=1, devices_per_node=8),),
    )
    with pytest.raises(
        InfeasibleError, match=r"all devices reach: 96 or 104 \(got 100\)"
    ) as caught:
        plan_job(cluster, small, 100, SearchOptions(matched=True))
    assert caught.value.exit_code == 3


def test_model_that_does_not_fit_says_by_how_much_and_what_would_help() -> None:
    cluster = ClusterSpec(
        name="one",
        pools=(
            PoolSpec(
                name="lonely",
                device="h100",
                nodes=1,
                devices_per_node=8,
                host_memory_gib_per_node=64.0,
            ),
        ),
    )
    huge = tiny_model([(10_000_000_000, 64, 1.0)], 1024)
    with pytest.raises(InfeasibleError) as caught:
        plan_job(cluster, huge)
    text = str(caught.value)
    assert "pool lonely" in text and "bytes per rank" in text
    assert "nodes instead of 1" in text


@pytest.mark.parametrize("batch", [0, -8])
def test_batch_must_be_positive(small: ModelSpec, cpu_pools: ClusterSpec, batch: int) -> None:
    with pytest.raises(UsageError, match="not positive"):
        plan_job(cpu_pools, small, batch)


@pytest.mark.parametrize(
    "bad",
    [{"mip_gap": -0.1}, {"time_limit_s": float("nan")}, {"top_k": 0}, {"kernels": "own"}],
    ids=str,
)
def test_search_options_out_of_range(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SearchOptions(**bad)  # type: ignore[arg-type]


def test_sharing_a_core_shifts_samples_to_the_fast_pool(
    cpu_pools: ClusterSpec, small: ModelSpec
) -> None:
    plan = plan_job(cpu_pools, small, options=SearchOptions(matched=True))
    assert plan.pools["fast"].local_batch > 2 * plan.pools["slow"].local_batch
