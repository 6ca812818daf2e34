"""Which devices work: no more than pay, and no fewer than the cluster file asks for."""

from __future__ import annotations

import pytest

from planner.search import SearchOptions, plan_job
from planner.specs.cluster import BridgeSpec, ClusterSpec, PoolSpec
from planner.specs.load import load_device, load_model


def two_nodes(min_nodes: int) -> ClusterSpec:
    pool = PoolSpec(name="amd", device="mi350x", nodes=2, devices_per_node=8, min_nodes=min_nodes)
    return ClusterSpec(name="two", pools=(pool,))


def test_devices_that_do_not_shorten_the_step_are_left_out() -> None:
    # The host decides this step (see the framework constants), whatever the number of devices.
    model = load_model("dlrm_v1_1tb")
    free = plan_job(two_nodes(0), model)
    matched = plan_job(two_nodes(0), model, options=SearchOptions(matched=True))
    framework = load_device("mi350x").framework
    assert free.pools["amd"].predicted.critical_path == ("host",)
    assert free.predicted.step_ms > 1e3 * framework.step_s.value
    assert free.pools["amd"].ranks == 8 and matched.pools["amd"].ranks == 16
    assert free.predicted.step_ms <= matched.predicted.step_ms * 1.01
    assert free.predicted.gap <= 0.01
    assert [row.chosen for row in free.considered].count(True) == 1


def test_min_nodes_keeps_nodes_at_work() -> None:
    model = load_model("dlrm_v1_1tb")
    assert plan_job(two_nodes(2), model).pools["amd"].nodes == 2


def test_min_nodes_keeps_a_pool_that_does_not_pay() -> None:
    pools = tuple(
        PoolSpec(name=name, device="cpu", nodes=1, devices_per_node=1, cpu_cores=(core,))
        for core, name in enumerate(("one", "other"))
    )
    slow_bridge = BridgeSpec(gbps=0.01, latency_us=1e5)
    cluster = ClusterSpec(name="far", pools=pools, bridge=slow_bridge, reference_device="cpu")
    model = load_model("dlrm_criteo_small")
    assert len(plan_job(cluster, model).pools) == 1
    kept = tuple(pool.model_copy(update={"min_nodes": 1}) for pool in pools)
    assert len(plan_job(cluster.model_copy(update={"pools": kept}), model).pools) == 2


def test_min_nodes_above_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="min_nodes is 3, but the pool has 2 nodes"):
        two_nodes(3)
