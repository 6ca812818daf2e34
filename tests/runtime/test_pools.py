"""Which node serves which pool, and which worker becomes which rank."""

from __future__ import annotations

import pytest

from planner.specs.errors import UsageError
from planner.specs.load import DEVICES, load_device, names_in
from runtime.pools import Node, label_selectors, resources_per_worker, slots_for
from tests.runtime.plans import cluster_of, plan_for

CLUSTER = cluster_of({"fast": (1, [0]), "slow": (3, [1])})
PLAN = plan_for(CLUSTER, {"fast": 32, "slow": 8})


def node(name: str, address: str, cpus: int = 8, **labels: str) -> Node:
    return Node(name, address, cpus, 0, {key.replace("__", "/"): v for key, v in labels.items()})


def pool_node(name: str, address: str, pool: str, cpus: int = 8) -> Node:
    return Node(name, address, cpus, 0, {"hwplan.io/pool": pool})


def test_workers_follow_the_plans_pool_order_not_the_nodes():
    nodes = [pool_node("n1", "10.0.0.1", "slow"), pool_node("n2", "10.0.0.2", "fast")]
    slots = slots_for([PLAN], nodes)
    assert [(slot.pool, slot.pool_rank, slot.node.node_id) for slot in slots] == [
        ("fast", 0, "n2"),
        ("slow", 0, "n1"),
        ("slow", 1, "n1"),
        ("slow", 2, "n1"),
    ]
    assert label_selectors(slots) == [{"ray.io/node-id": n} for n in ("n2", "n1", "n1", "n1")]


def test_a_plan_without_a_pool_needs_no_node_for_it():
    alone = PLAN.model_copy(update={"pools": {"fast": PLAN.pools["fast"]}})
    slots = slots_for([alone], [pool_node("n", "10.0.0.1", "fast")])
    assert [slot.pool for slot in slots] == ["fast"]


def test_wrong_labels_are_listed():
    nodes = [pool_node("a", "10.0.0.1", "fast"), pool_node("b", "10.0.0.2", "slwo")]
    with pytest.raises(UsageError) as caught:
        slots_for([PLAN], nodes)
    text = str(caught.value)
    assert "pool slow needs 1 Ray nodes with 3 CPU" in text
    assert "10.0.0.2: 8 CPU, 0 GPU, labels hwplan.io/pool=slwo" in text
    assert "--labels=hwplan.io/pool=slow" in text
    assert caught.value.exit_code == 2


def test_a_node_too_small_for_the_pool_does_not_count():
    nodes = [pool_node("a", "10.0.0.1", "fast"), pool_node("b", "10.0.0.2", "slow", cpus=2)]
    with pytest.raises(UsageError, match="pool slow needs 1"):
        slots_for([PLAN], nodes)


def test_a_long_list_of_nodes_is_cut():
    nodes = [pool_node(f"n{i}", f"10.0.1.{i}", "other") for i in range(40)]
    with pytest.raises(UsageError) as caught:
        slots_for([PLAN], nodes)
    assert "and 24 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 24


def test_cpu_workers_reserve_no_gpu():
    assert resources_per_worker([PLAN]) == {"CPU": 1}


def _gpu_plan(names: dict[str, str]):
    cluster = cluster_of({name: (2, [0]) for name in names})
    pools = tuple(
        pool.model_copy(update={"device": names[pool.name], "cpu_cores": None})
        if names[pool.name] != "cpu"
        else pool
        for pool in cluster.pools
    )
    return plan_for(cluster.model_copy(update={"pools": pools}), dict.fromkeys(names, 8))


def test_gpu_pools_are_found_by_rays_accelerator_label_and_by_ours_first():
    plan = _gpu_plan({"amd": "mi350x", "nvidia": "b200"})
    accelerator = "ray.io/accelerator-type"
    nodes = [
        Node("x", "10.0.0.1", 8, 8, {accelerator: "B200"}),
        Node("y", "10.0.0.2", 8, 8, {accelerator: "AMD-Instinct-MI350X-OAM"}),
        # Labelled for another job's pool, although its device would fit.
        Node("z", "10.0.0.0", 8, 8, {accelerator: "B200", "hwplan.io/pool": "reserved"}),
    ]
    slots = slots_for([plan], nodes)
    assert [(slot.pool, slot.node.node_id) for slot in slots] == [
        ("amd", "y"),
        ("amd", "y"),
        ("nvidia", "x"),
        ("nvidia", "x"),
    ]
    assert resources_per_worker([plan]) == {"CPU": 1, "GPU": 1}


def test_cpu_and_gpu_pools_cannot_share_a_job():
    with pytest.raises(UsageError, match="CPU pools and GPU pools"):
        resources_per_worker([_gpu_plan({"host": "cpu", "gpu": "h200"})])


@pytest.mark.parametrize("name", [name for name in names_in(DEVICES) if name != "cpu"])
def test_profiles_carry_rays_own_names(name):
    from ray.util.accelerators import accelerators

    assert load_device(name).ray_accelerator_type in vars(accelerators).values()
