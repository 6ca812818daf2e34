"""The joined graph against the pools' own schedules; the critical path and what bounds it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from explain_plans import PLANS, cpu_pools, host_bound, one_pool, one_rank, two_pools
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.assemble import contexts_of
from planner.cost.load import COMPONENTS
from planner.cost.step import Operation, StepGraph, joint_schedule
from planner.evaluate import evaluate
from planner.explain.job import job_of, joint_operations
from planner.explain.resources import RESOURCES, scaled
from planner.explain.step import balances, faster_jobs, path_steps, speedups
from planner.ilp.program import Floats
from planner.specs.load import load_device
from planner.specs.plan import Plan

STREAMS = ("host", "compute", "communication")


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, StepGraph]:
    """Up to three pools with the same bridge operations between random others."""
    bridges = draw(st.integers(0, 3))
    pools = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        operations: list[Operation] = []

        def add(label: str, stream: str, operations: list[Operation] = operations) -> None:
            before = [one.name for one in operations]
            after = draw(st.lists(st.sampled_from(before), max_size=2)) if before else []
            seconds = float(draw(st.integers(0, 9)))
            operations.append(Operation(label, stream, tuple(after), seconds))  # type: ignore[arg-type]

        for bridge in range(bridges + 1):
            for index in range(draw(st.integers(1, 3))):
                add(f"{name}{bridge}{index}", draw(st.sampled_from(STREAMS)))
            if bridge < bridges:
                add(f"bridge:{bridge}", "bridge")
        pools[name] = StepGraph(tuple(operations))
    return pools


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_the_joined_graph_ends_when_the_pools_schedules_do(pools: dict[str, StepGraph]) -> None:
    expected = joint_schedule(pools, {name: {} for name in pools})
    nothing: Floats = np.zeros(len(COMPONENTS))
    ends: list[float] = []
    for one in joint_operations(pools):
        start = max((ends[index] for index in one.before), default=0.0)
        ends.append(start + float(one.duration_s(nothing)))
        assert ends[-1] == expected[one.pool][one.operation.name].end_s
    assert len(ends) == sum(len(graph.operations) for graph in pools.values())


def test_a_plan_is_priced_as_the_planner_prices_it(any_plan: Plan) -> None:
    job = job_of(any_plan)
    placements = {name: pool.placements for name, pool in any_plan.pools.items()}
    assert job.step_s == pytest.approx(
        evaluate(contexts_of(any_plan), placements).step_s, rel=1e-12
    )
    path = job.critical_path
    assert sum(seconds for _, seconds in path) == pytest.approx(job.step_s, rel=1e-9)


@pytest.mark.parametrize("name", ["one_pool", "one_rank", "host_bound", "groups"])
def test_with_one_pool_the_path_is_the_plans(name: str) -> None:
    plan = PLANS[name]()
    (pool,) = plan.pools.values()
    path = tuple(one.operation.name for one, _ in job_of(plan).critical_path)
    assert path == pool.predicted.critical_path


@pytest.mark.parametrize(
    ("batches", "late"),
    [({"amd": 192_000, "nvidia": 9216}, "amd"), ({"amd": 4608, "nvidia": 384_000}, "nvidia")],
)
def test_the_path_before_the_bridge_is_that_of_the_pool_that_comes_last(
    batches: dict[str, int], late: str
) -> None:
    steps = list(path_steps(job_of(two_pools(batches)), {}))
    first = next(i for i, step in enumerate(steps) if step.operation.startswith("bridge:"))
    assert first > 2 and {step.pool for step in steps[:first]} == {late}


def test_a_host_bound_step_is_its_launches_and_a_tenth_faster_host_saves_an_eleventh() -> None:
    job = job_of(host_bound())
    faster = faster_jobs(job)
    (step,) = path_steps(job, faster)
    assert (step.operation, step.bound_by) == ("host", "host launches")
    (one,) = speedups(job, faster)
    assert one.resource == "host launches"
    assert one.saved_ms == pytest.approx(job.step_ms / 11, rel=1e-9)
    assert job.devices_s < job.step_s


def test_resources_are_priced_by_the_cost_model() -> None:
    """Every speed-up equals evaluate() with that constant changed, whatever is left out of it."""
    plan = two_pools()
    job = job_of(plan)
    placements = {name: pool.placements for name, pool in plan.pools.items()}
    found = {(one.pool, one.resource): one.step_ms for one in speedups(job, faster_jobs(job))}
    for resource in RESOURCES:
        for pool in job.pools:
            contexts = {
                name: resource.faster(ctx, 1.1) if resource.of_job or name == pool else ctx
                for name, ctx in contexts_of(plan).items()
            }
            step_ms = evaluate(contexts, placements).step_s * 1e3
            key = ("" if resource.of_job else pool, resource.name)
            assert found.get(key, job.step_ms) == pytest.approx(step_ms, rel=1e-9), key


def test_bridge_operations_are_bound_by_the_bridge() -> None:
    job = job_of(two_pools())
    bounds = {step.operation: step.bound_by for step in path_steps(job, faster_jobs(job))}
    assert bounds["bridge:embedding"] == "bridge"


def test_scaling_touches_what_the_pattern_names() -> None:
    profile = load_device("mi350x")
    faster = scaled(profile, {"scale_up.collectives.*latency_s": 0.5}, "other")
    before, after = (p.scale_up.collectives.all_to_all for p in (profile, faster))
    assert after.latency_s.value == before.latency_s.value / 2
    assert after.per_rank_latency_s.value == before.per_rank_latency_s.value / 2
    assert after.efficiency == before.efficiency and faster.memory == profile.memory


def test_balance_names_the_rank_that_holds_most() -> None:
    job = job_of(one_pool())
    (balance,) = balances(job)
    assert balance.slowest_rank == 0
    seconds = job.pools["amd"].table_seconds
    assert balance.slowest_ms == pytest.approx(1e3 * seconds[0])
    assert balance.excess == pytest.approx(seconds[0] / seconds.mean() - 1)
    (alone,) = balances(job_of(one_rank()))
    assert alone.excess == 0


def test_cpu_pools_share_one_core_with_their_host() -> None:
    job = job_of(cpu_pools())
    names = [one.operation.name for one, _ in job.critical_path]
    assert names[0] == "host" and len(names) > 3
    assert job.devices_s == job.step_s


def test_half_a_step_of_samples_takes_no_longer() -> None:
    job = job_of(one_pool())
    ctx = job.pools["amd"].ctx
    half = job.with_contexts({"amd": replace(ctx, local_batch=ctx.local_batch // 2)})
    assert half.step_s < job.step_s
