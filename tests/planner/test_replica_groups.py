"""Replica groups inside a pool: what they cost, and when the search takes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost.collectives import fabric
from planner.cost.context import PoolContext
from planner.cost.exchange import embedding_exchange_seconds
from planner.cost.graph import pool_step_graph
from planner.cost.zipf import expected_distinct
from planner.evaluate import evaluate, pool_loads
from planner.search import SearchOptions, plan_job
from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.model import ComputeKernel, ModelSpec, ShardingType, TableConstraints, TableGroup
from planner.specs.plan import Placement, Plan
from planner.specs.units import Dtype
from tests.cost.helpers import context, small_model


def place(kind: ShardingType, *ranks: int) -> Placement:
    return Placement(
        sharding_type=kind,
        compute_kernel=ComputeKernel.FUSED,
        data_type=Dtype.FP32,
        ranks=ranks,
    )


def grouped(ctx: PoolContext, groups: int) -> PoolContext:
    return replace(ctx, replica_groups=groups)


def test_exchange_of_two_groups_by_hand() -> None:
    ctx = replace(grouped(context(nodes=2), 2), embedding_interval_steps=2)
    device = ctx.device
    # Two batches of 64 samples touch these rows of 4 columns and one optimizer state.
    rows = expected_distinct(1000, 0.0, 2 * 64 * 3) + expected_distinct(50, 1.1, 2 * 64)
    rows_bytes, id_bytes = int(rows * 4 * (4 + 1)), 8 * rows
    nic = 50e9 * device.network.efficiency.value

    def over_16_ranks(collective: str, total_bytes: float) -> float:
        constants = getattr(device.scale_up.collectives, collective)
        constants = constants or device.scale_up.collectives.all_reduce
        fixed_s = constants.latency_s.value + 7 * constants.per_rank_latency_s.value
        fixed_s += device.network.latency_s.value + device.network.half_bytes.value / nic
        link = device.scale_up.bytes_per_s.value * constants.efficiency.value
        half_s = 7 / 8 * total_bytes / link + 1 / 2 * total_bytes / 8 / nic
        return float(fixed_s + half_s * (2 if collective == "pool_sum" else 1))

    hbm = device.memory.hbm_bytes_per_s.value * device.elementwise.hbm_efficiency.value
    # The buffer is zeroed by every rank; the 8 ranks of a group share the work on its 2 tables.
    local_s = 4 * device.elementwise.launch_s.value + rows_bytes * (1 + 7 / 8) / hbm
    local_s += 20 * 2 / 8 * device.framework.op_s.value
    total_s = over_16_ranks("all_gather", id_bytes) + over_16_ranks("pool_sum", rows_bytes)
    assert embedding_exchange_seconds(ctx) == pytest.approx((total_s + local_s) / 2)


def test_one_group_of_one_pool_exchanges_nothing() -> None:
    assert embedding_exchange_seconds(context(nodes=2)) == 0
    names = [operation.name for operation in pool_step_graph(context(nodes=2)).operations]
    assert "replica_exchange" not in names
    two = pool_step_graph(grouped(context(nodes=2), 2))
    operation = next(item for item in two.operations if item.name == "replica_exchange")
    assert operation.seconds > 0 and operation.after == ("embedding_backward",)
    # Between pools the same exchange runs over the bridge, whatever the groups.
    pools = pool_step_graph(grouped(context(nodes=2, pools=2), 2))
    names = [item.name for item in pools.operations]
    assert "replica_exchange" not in names and "bridge:embedding" in names


@pytest.mark.parametrize(
    ("device", "whole", "groups", "part"),
    [
        ("h200", (2, 8), 2, (1, 8)),
        ("h200", (1, 8), 2, (1, 4)),
        ("mi350x", (2, 8), 4, (1, 4)),
        ("h200", (4, 2), 2, (2, 2)),
    ],
)
def test_tables_of_a_group_cost_what_they_cost_in_a_pool_of_its_size(
    device: str, whole: tuple[int, int], groups: int, part: tuple[int, int]
) -> None:
    pool = grouped(context(device, nodes=whole[0], per_node=whole[1]), groups)
    alone = context(device, nodes=part[0], per_node=part[1])
    ranks = tuple(range(alone.ranks))
    placements = {
        "a": place(ShardingType.ROW_WISE, *ranks),
        "b": place(ShardingType.TABLE_WISE, ranks[-1]),
    }
    loads, memory = pool_loads(pool, placements)
    expected, one = pool_loads(alone, placements)
    np.testing.assert_allclose(loads, expected)
    assert memory == one * groups
    planned = evaluate({"p": pool}, {"p": placements}).pools["p"]
    assert (planned.replica_groups, planned.group_ranks) == (groups, alone.ranks)
    assert planned.group_devices_per_node == part[1]


def test_a_group_of_a_node_has_its_share_of_links_cores_and_memory() -> None:
    mesh = grouped(context("mi350x"), 2)
    whole, half = fabric(mesh, "all_to_all"), fabric(mesh.sharding_group, "all_to_all")
    assert half.link_bytes_per_s == pytest.approx(whole.link_bytes_per_s * 3 / 7)
    cpu = grouped(context("cpu", per_node=4), 4)
    assert cpu.sharding_group.compute_share == cpu.compute_share == 1 / 4
    pool = cpu.pool.model_copy(update={"host_memory_gib_per_node": 64.0})
    cpu = replace(cpu, pool=pool)
    assert cpu.sharding_group.host_capacity_bytes == cpu.host_capacity_bytes == 16 * 2**30


def wide_tables(rows: int, interval_steps: int, zipf: float = 0.0) -> ModelSpec:
    """26 tables, 128 wide, each on a single rank of a group; 4,096 samples per rank of 16."""
    tables = TableGroup(
        name="t",
        count=26,
        num_embeddings=rows,
        embedding_dim=128,
        zipf_exponent=zipf,
        constraints=TableConstraints(
            sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=(ComputeKernel.FUSED,)
        ),
    )
    given = {name: getattr(small_model(), name) for name in ModelSpec.model_fields}
    given |= {"global_batch": 16 * 4096, "bottom_mlp": (64, 128), "tables": (tables,)}
    return ModelSpec(**given | {"max_exchange_interval_steps": interval_steps})


def slow_network(model: ModelSpec, gbps: float) -> Plan:
    pool = PoolSpec(name="p", device="h200", nodes=2, devices_per_node=8, nic_gbps_per_device=gbps)
    cluster = ClusterSpec(name="slow", pools=(pool,))
    return plan_job(cluster, model, options=SearchOptions(matched=True))


def test_groups_win_where_the_network_is_slow_and_few_rows_are_touched() -> None:
    # 214 GB of tables: a node holds a copy, a device does not. Few rows are looked up often.
    plan = slow_network(wide_tables(16_000_000, 16, zipf=1.6), 25.0)
    pool = plan.pools["p"]
    assert pool.replica_groups == 2 and pool.group_ranks == 8
    assert plan.exchange.embedding_bytes_per_exchange > 0
    assert plan.exchange.dense_bytes_per_step == 0
    assert max(max(placement.ranks) for placement in pool.placements.values()) < 8
    assert "replica_exchange" in pool.predicted.breakdown_ms
    assert plan.predicted.gap <= 0.01


def test_every_rank_has_a_copy_of_tables_that_are_small() -> None:
    plan = slow_network(wide_tables(1_000, 16), 25.0)
    assert plan.pools["p"].replica_groups == 16
    assert plan.exchange.embedding_bytes_per_exchange == pytest.approx(26_000 * 4 * 129, rel=1e-3)


def test_groups_lose_where_copies_are_dear() -> None:
    # Ten million rows: hundreds of MB are touched by every batch, and may not be stale.
    assert slow_network(wide_tables(10_000_000, 1), 25.0).pools["p"].replica_groups == 1
    # A host that decides the step gains nothing: of equal plans the one with one copy is taken.
    assert slow_network(small_model(), 400.0).pools["p"].replica_groups == 1
