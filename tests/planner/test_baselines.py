from __future__ import annotations

import pytest

from planner.baselines.naive import naive_port
from planner.compare import compare
from planner.cost.context import PoolContext
from planner.fingerprint import constants_used
from planner.report.inventory import constants_of
from planner.search import SearchOptions, plan_job
from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.errors import InfeasibleError
from planner.specs.load import load_device, load_model
from planner.specs.model import ModelSpec
from planner.specs.plan import MemoryPolicy, Plan
from planner.specs.units import Dtype


@pytest.fixture(scope="module")
def naive(two_vendors: ClusterSpec, dlrm: ModelSpec) -> Plan:
    return naive_port(two_vendors, dlrm, 12 * 512)


def test_naive_port_is_the_same_everywhere(naive: Plan, dlrm: ModelSpec) -> None:
    assert {pool.local_batch for pool in naive.pools.values()} == {512}
    policies = {pool.policy.model_dump_json() for pool in naive.pools.values()}
    assert len(policies) == 1
    for pool in naive.pools.values():
        assert pool.policy.recompute == ()
        assert pool.policy.compute_precision == dlrm.precision.compute[0]
        assert {p.data_type for p in pool.placements.values()} == {dlrm.precision.embeddings[0]}


def test_naive_port_uses_all_devices(naive: Plan, two_vendors: ClusterSpec) -> None:
    assert [pool.ranks for pool in naive.pools.values()] == [p.devices for p in two_vendors.pools]
    assert naive.kind == "naive" and naive.solver.status == "heuristic"


def test_naive_placements_do_not_depend_on_the_pool_device(dlrm: ModelSpec) -> None:
    def placements(device: str) -> object:
        pool = PoolSpec(
            name="pool",
            device=device,
            nodes=1,
            devices_per_node=8,
            nic_gbps_per_device=400.0,
        )
        plan = naive_port(ClusterSpec(name="c", pools=(pool,)), dlrm)
        return {name: p.model_dump() for name, p in plan.pools["pool"].placements.items()}

    # Both have room to spare, so cutting capacities makes no difference.
    assert placements("mi350x") == placements("mi300x")


def test_naive_capacity_is_that_of_the_smallest_device(dlrm: ModelSpec) -> None:
    """A table set that fits the large device alone must leave room on the small one."""
    pools = (
        PoolSpec(name="large", device="mi350x", nodes=1, devices_per_node=2),
        PoolSpec(name="tiny", device="a100", nodes=1, devices_per_node=2),
    )
    cluster = ClusterSpec(name="c", pools=pools, bridge={"gbps": 400.0, "latency_us": 5.0})  # type: ignore[arg-type]
    plan = naive_port(cluster, dlrm, 1024)
    tiny = plan.pools["tiny"].memory_bytes[0]["capacity"]
    assert all(memory["total"] <= tiny for memory in plan.pools["large"].memory_bytes)


def test_batch_that_no_rank_count_divides(two_vendors: ClusterSpec, dlrm: ModelSpec) -> None:
    with pytest.raises(InfeasibleError, match="no split reaches"):
        naive_port(two_vendors, dlrm, 4097)


@pytest.mark.parametrize("batch", [6144, 65536])
def test_planned_is_never_worse(two_vendors: ClusterSpec, dlrm: ModelSpec, batch: int) -> None:
    planned = plan_job(two_vendors, dlrm, batch, SearchOptions(matched=True))
    assert planned.predicted.step_ms <= naive_port(two_vendors, dlrm, batch).predicted.step_ms


def test_comparison_and_its_waterfall(cpu_pools: ClusterSpec, small: ModelSpec) -> None:
    result = compare(cpu_pools, small)
    assert result.matched.planned.plan.world_size == 4
    assert result.free.speedup >= result.matched.speedup > 1
    bars = [lever.step_ms for lever in result.waterfall]
    assert bars == sorted(bars, reverse=True)
    assert bars[0] == result.matched.naive.step_ms
    assert bars[-2:] == [result.matched.planned.step_ms, result.free.planned.step_ms]


@pytest.mark.parametrize("mip_gap", [0.01, 1e-5], ids=["spared search", "search"])
def test_kernel_preselection_is_a_lever_of_its_own(mip_gap: float) -> None:
    """A job that matrix products decide: the bar before it is the best plan without it."""
    pool = PoolSpec(name="pool", device="h200", nodes=1, devices_per_node=2)
    cluster = ClusterSpec(name="one", pools=(pool,), reference_device="h200")
    options = SearchOptions(mip_gap=mip_gap)
    result = compare(cluster, load_model("dlrm_bench"), 131_072, options)
    steps = {lever.name: lever.step_ms for lever in result.waterfall}
    assert list(steps)[-3:] == ["batch split", "kernel preselection", "devices left out"]
    vendor = SearchOptions(mip_gap=mip_gap, matched=True, kernels="vendor")
    without = plan_job(cluster, load_model("dlrm_bench"), 131_072, vendor)
    assert steps["batch split"] == pytest.approx(without.predicted.step_ms, rel=1e-6)
    assert steps["kernel preselection"] == result.matched.planned.step_ms < steps["batch split"]
    bars = list(steps.values())
    assert bars == sorted(bars, reverse=True)
    assert result.matched.planned.plan.pools["pool"].own_kernels
    assert not result.matched.naive.plan.pools["pool"].kernels


def test_constants_of_the_triton_kernels_count_only_where_they_run() -> None:
    pool = PoolSpec(name="pool", device="h200", nodes=1, devices_per_node=2)
    device = load_device("h200")
    policy = MemoryPolicy(compute_precision=Dtype.BF16, kernels="preselected")
    own = PoolContext(pool, device, load_model("dlrm_bench"), 64, policy)
    used, without = (
        {id(constant) for constant in constants_used(ctx)}
        for ctx in (own, own.with_kernels("vendor"))
    )
    assert device.triton is not None
    # Those of loops over 4-byte elements have no part in bf16.
    triton = {id(constant) for constant in constants_of(device.triton)}
    wide = [loop for name, loop in device.triton.loops.items() if name.endswith("_32")]
    assert len(wide) == 3
    unused = {id(constant) for loop in wide for constant in constants_of(loop)}
    assert used - without == triton - unused


def test_fp32_recipe_stays_fp32(cpu_pools: ClusterSpec, small: ModelSpec) -> None:
    plan = naive_port(cpu_pools, small)
    assert {pool.policy.compute_precision for pool in plan.pools.values()} == {Dtype.FP32}
