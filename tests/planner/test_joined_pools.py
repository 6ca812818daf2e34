"""Linked pools: which may work as one, and when the search lets them."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from planner.assemble import contexts_of
from planner.baselines.enumerate import best_joint_step_s
from planner.baselines.naive import naive_port
from planner.compare import compare
from planner.cost.context import PoolContext
from planner.evaluate import MS, evaluate
from planner.ilp.options import pool_program
from planner.ilp.program import PoolProgram
from planner.search import SearchOptions, plan_job
from planner.specs.base import sha256
from planner.specs.cluster import BridgeSpec, ClusterSpec, JoinedPool, LinkSpec, PoolSpec
from planner.specs.errors import SpecError
from planner.specs.load import load_cluster, load_device, load_model
from planner.specs.model import (
    Architecture,
    DenseOptimizer,
    ModelSpec,
    Optimizers,
    ShardingType,
    SparseOptimizer,
    TableConstraints,
    TableGroup,
)
from planner.specs.plan import MemoryPolicy, load_plan, save_plan
from planner.specs.units import Dtype
from planner.splits import SplitSpace
from planner.whatif.price import plan_dollars_per_hour, plan_watts
from planner.whatif.sweep import sweep

MATCHED = SearchOptions(matched=True, mip_gap=0.05)


def cluster(*pools: PoolSpec, link_gbps: float | None, bridge_gbps: float = 10.0) -> ClusterSpec:
    links = ()
    if link_gbps is not None:
        names = tuple(pool.name for pool in pools)
        links = (LinkSpec(pools=names, gbps_per_device=link_gbps),)
    return ClusterSpec(
        name="linked",
        pools=pools,
        bridge=BridgeSpec(gbps=bridge_gbps, latency_us=20.0),
        links=links,
        reference_device=pools[0].device,
    )


def pool(name: str, nodes: int, **fields: Any) -> PoolSpec:
    return PoolSpec(
        **{"name": name, "device": "h200", "nodes": nodes, "devices_per_node": 8} | fields
    )


def test_every_way_to_join_linked_pools_is_considered_once() -> None:
    pools = (pool("a", 1), pool("b", 2), pool("c", 1))
    assert [[p.name for p in way] for way in cluster(*pools, link_gbps=None).ways()] == [
        ["a", "b", "c"]
    ]
    every = {"/".join(p.name for p in way) for way in cluster(*pools, link_gbps=100.0).ways()}
    assert every == {"a/b/c", "a/b+c", "a+b/c", "a+c/b", "a+b+c"}
    some = ClusterSpec(
        name="some",
        pools=pools,
        bridge=BridgeSpec(gbps=1.0, latency_us=1.0),
        links=tuple(
            LinkSpec(pools=pair, gbps_per_device=speed)
            for pair, speed in ((("a", "b"), 50.0), (("b", "c"), 100.0))
        ),
    )
    # Each needs a link with each: a and c have none.
    assert {"/".join(p.name for p in way) for way in some.ways()} == {"a/b/c", "a/b+c", "a+b/c"}


def test_a_joined_pool() -> None:
    linked = cluster(
        pool("a", 2, nic_gbps_per_device=400.0),
        pool("b", 3, min_nodes=2, nic_gbps_per_device=400.0),
        link_gbps=100.0,
    )
    both = linked.pool("a+b")
    assert (both.nodes, both.devices, both.min_nodes) == (5, 40, 4)
    part = both.model_copy(update={"nodes": 4})
    assert [(p.name, p.nodes) for p in part.parts] == [("a", 2), ("b", 2)]
    device = load_device("h200")
    policy = MemoryPolicy(compute_precision=Dtype.FP32)
    ctx = PoolContext(part, device, load_model("dlrm"), 64, policy)
    assert ctx.nic_bytes_per_s == 100e9 / 8
    # Two groups of two nodes each lie inside a and b: their tables do not see the link.
    inside = PoolContext(part, device, load_model("dlrm"), 64, policy, replica_groups=2)
    assert inside.sharding_group.nic_bytes_per_s == 400e9 / 8
    assert isinstance(both.group(1), JoinedPool)
    with pytest.raises(KeyError):
        cluster(pool("a", 2), pool("b", 3), link_gbps=None).pool("a+b")


@pytest.mark.parametrize(
    ("links", "problem"),
    [
        ([("a", "x")], "names pool 'x'"),
        ([("a", "a")], "names pool 'a' twice"),
        ([("a", "b")], "differ in devices_per_node"),
    ],
)
def test_links_that_cannot_be_are_refused(links: list[tuple[str, str]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ClusterSpec(
            name="wrong",
            pools=(pool("a", 1), pool("b", 1, devices_per_node=4)),
            bridge=BridgeSpec(gbps=1.0, latency_us=1.0),
            links=tuple(LinkSpec(pools=names, gbps_per_device=1.0) for names in links),
        )


def tiny_model(batch: int) -> ModelSpec:
    kinds = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE)
    return ModelSpec(
        name="tiny",
        description="",
        source="made up",
        arch=Architecture.MLP_CONCAT,
        global_batch=batch,
        dense_features=4,
        top_mlp=(256, 1),
        tables=(
            TableGroup(
                name="t",
                num_embeddings=50_000,
                embedding_dim=32,
                pooling_factors=(20.0,),
                constraints=TableConstraints(sharding_types=kinds),
            ),
        ),
        optimizer=Optimizers(
            dense=DenseOptimizer(name="sgd", learning_rate=0.1),
            sparse=SparseOptimizer(name="sgd", learning_rate=0.1),
        ),
    )


@pytest.mark.parametrize(
    ("link_gbps", "bridge_gbps", "samples"),
    list(product((0.5, 40.0), (0.5, 40.0), (24, 120))),
)
def test_plan_equals_enumeration_of_ways_groups_and_splits(
    link_gbps: float, bridge_gbps: float, samples: int
) -> None:
    fields = {"device": "cpu", "devices_per_node": 1, "host_memory_gib_per_node": 4.0}
    job = cluster(
        pool("a", 1, cpu_cores=(0,), **fields),
        pool("b", 1, cpu_cores=(1,), **fields),
        link_gbps=link_gbps,
        bridge_gbps=bridge_gbps,
    )
    model = tiny_model(samples)

    def best_of(way: tuple[PoolSpec, ...]) -> float:
        def programs(name: str, batch: int) -> list[PoolProgram]:
            one = job.pool(name)
            return [
                pool_program(
                    PoolContext(
                        one,
                        load_device("cpu"),
                        model,
                        batch,
                        MemoryPolicy(compute_precision=Dtype.FP32),
                        job.bridge,
                        len(way),
                        replica_groups=groups,
                    ),
                    spill=False,
                )
                for groups in one.group_counts
            ]

        space = SplitSpace(tuple(one.devices for one in way), samples)
        names = [one.name for one in way]
        return best_joint_step_s(
            (dict(zip(names, split, strict=True)) for split in space.all()), programs
        )

    best_s = min(map(best_of, job.ways()))
    plan = plan_job(job, model, options=SearchOptions(mip_gap=0.0, matched=True))
    assert plan.predicted.step_ms == pytest.approx(best_s * MS, rel=1e-6)
    assert plan.predicted.lower_bound_ms <= best_s * MS * (1 + 1e-6)


def two_of(link_gbps: float, bridge_gbps: float) -> ClusterSpec:
    pools = (pool("a", 1, dollars_per_device_hour=2.0), pool("b", 1, dollars_per_device_hour=3.0))
    return cluster(*pools, link_gbps=link_gbps, bridge_gbps=bridge_gbps)


def test_a_fast_link_joins_pools_and_a_slow_one_does_not(tmp_path: Path) -> None:
    model = load_model("dlrm")
    fast = plan_job(two_of(400.0, 5.0), model, options=MATCHED)
    assert list(fast.pools) == ["a+b"] and fast.pools["a+b"].ranks == 16
    assert fast.nodes_at_work == {"a": 1, "b": 1}
    slow = plan_job(two_of(0.1, 400.0), model, options=MATCHED)
    assert list(slow.pools) == ["a", "b"]
    # Everything that looks pools up by name.
    assert plan_dollars_per_hour(fast) == plan_dollars_per_hour(slow) == 8 * (2.0 + 3.0)
    assert plan_watts(fast) == plan_watts(slow)
    again = evaluate(contexts_of(fast), {n: p.placements for n, p in fast.pools.items()})
    assert again.step_s * MS == pytest.approx(fast.predicted.step_ms)
    save_plan(fast, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").parts == fast.parts
    apart = json.loads((tmp_path / "plan.json").read_text())
    apart["cluster"]["links"] = []
    apart.pop("digest")
    (tmp_path / "other.json").write_text(json.dumps({**apart, "digest": sha256(apart)}))
    with pytest.raises(SpecError, match="no pools that can be joined so"):
        load_plan(tmp_path / "other.json")


def test_links_follow_the_pools_of_a_variant() -> None:
    linked = cluster(pool("a", 1), pool("b", 1), pool("c", 1), link_gbps=100.0)
    a, b, c = linked.pools
    other = c.model_copy(update={"device": "b200"})
    left = linked.with_pools((a, b, other))
    assert [link.pools for link in left.links] == [("a", "b")]
    assert linked.with_pools((a,)).links == ()
    # A variant of the job is checked like a file, with every link it kept.
    assert len(list(ClusterSpec.model_validate(dict(left)).ways())) == 2


def test_points_of_a_sweep_know_who_works_in_a_joined_pool() -> None:
    fields = {"device": "cpu", "devices_per_node": 1, "host_memory_gib_per_node": 4.0}
    job = cluster(
        pool("a", 1, cpu_cores=(0,), **fields),
        pool("b", 1, cpu_cores=(1,), **fields),
        link_gbps=40.0,
        bridge_gbps=0.5,
    )
    found = sweep(job, tiny_model(512), ["nodes:a=0..1"])
    nodes = [row.planned.nodes if row.planned else None for row in found.rows]
    assert nodes == [{"b": 1}, {"a+b": 2}]


def test_the_naive_port_keeps_pools_apart_and_is_compared() -> None:
    linked, model = two_of(400.0, 5.0), load_model("dlrm")
    naive = naive_port(linked, model)
    assert list(naive.pools) == ["a", "b"]
    assert all(one.replica_groups == 1 for one in naive.pools.values())
    matched = compare(linked, model, options=SearchOptions(mip_gap=0.05)).matched
    assert list(matched.planned.plan.pools) == ["a+b"] and matched.speedup > 1
    assert naive.predicted.lower_bound_ms <= matched.planned.step_ms * (1 + 1e-9)


def test_the_shipped_example_is_joined_over_its_link() -> None:
    linked = load_cluster("linked")
    assert [len(way) for way in linked.ways()] == [2, 1]
