from __future__ import annotations

import pytest

from planner.assemble import contexts_of
from planner.baselines.league import (
    ILP,
    ILP_RECIPE,
    Entry,
    League,
    OtherCost,
    Placed,
    league,
    leagues,
)
from planner.baselines.registry import BASELINES
from planner.cost.context import PoolContext
from planner.evaluate import evaluate
from planner.search import SearchOptions, plan_job
from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.errors import InfeasibleError
from planner.specs.load import load_model
from planner.specs.model import ComputeKernel, ModelSpec, ShardingType
from planner.specs.plan import PoolPlan

ONE = ClusterSpec(
    name="one", pools=(PoolSpec(name="pool", device="b200", nodes=1, devices_per_node=8),)
)
BATCH = 262_144
"""Large enough for the tables, not the host, to decide the step."""
LOOSE = SearchOptions(mip_gap=0.05, matched=True)


@pytest.fixture(scope="module")
def found(two_vendors: ClusterSpec, dlrm: ModelSpec) -> tuple[League, ...]:
    return leagues(two_vendors, dlrm, 12 * 8192)


def test_job_first_then_every_pool_alone(
    found: tuple[League, ...], two_vendors: ClusterSpec
) -> None:
    job, *pools = found
    assert [one.name for one in found] == ["two_vendors", "amd", "nvidia"]
    assert job.samples == sum(p.samples * p.replica_groups for p in pools) == 12 * 8192
    devices = [pool.devices for pool in two_vendors.pools]
    assert [pool.ranks * pool.replica_groups for pool in pools] == devices
    assert job.standings[0].step_ms is not None
    for pool in pools:
        assert pool.standings[0].step_ms is not None
        assert pool.standings[0].step_ms <= job.standings[0].step_ms, "no bridge, no waiting"


def test_plan_leads_and_nobody_is_below_the_bound(found: tuple[League, ...]) -> None:
    for one in found:
        first, *rest = one.standings
        assert first.planner == ILP and first.ratio == 1.0 and first.fits
        assert {standing.planner for standing in rest} == set(BASELINES)
        fitting = [standing.fits for standing in rest]
        assert fitting == sorted(fitting, reverse=True) and fitting[0]
        steps = [standing.step_ms for standing in rest if standing.fits]
        assert None not in steps
        assert steps == sorted(steps, key=lambda step_ms: step_ms or 0.0)
        assert first.step_ms == pytest.approx(one.lower_bound_ms * (1 + one.gap))
        for standing in rest:
            if standing.fits:
                assert standing.step_ms is not None and first.step_ms is not None
                assert standing.step_ms >= one.lower_bound_ms * (1 - 1e-9)
                assert standing.ratio == pytest.approx(standing.step_ms / first.step_ms)
            else:
                assert "GiB" in standing.note


def test_one_pool_is_one_league_with_the_plans_own_bound(dlrm: ModelSpec) -> None:
    (only,) = leagues(ONE, dlrm, BATCH, LOOSE)
    plan = plan_job(ONE, dlrm, BATCH, LOOSE)
    assert only.name == "one"
    assert only.standings[0].step_ms == pytest.approx(plan.predicted.step_ms)
    assert only.lower_bound_ms == pytest.approx(plan.predicted.lower_bound_ms)
    memory = plan.pools["pool"].memory_bytes[plan.pools["pool"].predicted.slowest_rank]
    assert only.standings[0].slowest_rank_bytes == memory["total"]
    assert only.standings[1].ratio is not None and only.standings[1].ratio > 1.01


def test_planners_from_outside_and_their_cost_model(dlrm: ModelSpec) -> None:
    plan = plan_job(ONE, dlrm, BATCH, LOOSE)

    def ours_again(ctx: PoolContext) -> Placed:
        return Placed(plan.pools["pool"].placements, "copied")

    def none(ctx: PoolContext) -> Placed:
        raise InfeasibleError("nothing to offer")

    def rate(ctx: PoolContext, pool: PoolPlan) -> OtherCost:
        return OtherCost(step_ms=float(len(pool.placements)), fits=False)

    (only,) = leagues(
        ONE, dlrm, BATCH, LOOSE, placers={"copy": ours_again, "none": none}, rate=rate
    )
    copy = next(standing for standing in only.standings if standing.planner == "copy")
    assert copy.ratio == pytest.approx(1.0) and copy.note == "copied"
    assert copy.other == OtherCost(step_ms=26.0, fits=False)
    last = only.standings[-1]
    assert last.planner == "none" and last.note == "nothing to offer"
    assert last.step_ms is None and last.other is None and not last.fits


def test_overfull_ranks_are_named_and_stand_behind(dlrm: ModelSpec) -> None:
    """All tables on one rank of a device that cannot hold them."""
    small = replace_device(ONE, "a100")
    plan = plan_job(small, dlrm, 8192, SearchOptions(matched=True))
    contexts = contexts_of(plan)
    placements = plan.pools["pool"].placements
    heap = {
        name: placement.model_copy(
            update={
                "sharding_type": ShardingType.TABLE_WISE,
                "compute_kernel": ComputeKernel.FUSED,
                "ranks": (3,),
                "column_widths": (),
                "cache_load_factor": None,
            }
        )
        for name, placement in placements.items()
    }
    result = league(
        "pool",
        contexts,
        [
            Entry(ILP, {"pool": placements}),
            Entry("heap", {"pool": heap}),
            Entry("copy", {"pool": placements}),
        ],
        plan.predicted.lower_bound_ms / 1e3,
    )
    assert [standing.planner for standing in result.standings] == [ILP, "copy", "heap"]
    assert not result.standings[-1].fits
    assert "rank 3 of pool pool lacks" in result.standings[-1].note
    assert result.standings[-1].step_ms is not None


def replace_device(cluster: ClusterSpec, device: str) -> ClusterSpec:
    pools = tuple(pool.model_copy(update={"device": device}) for pool in cluster.pools)
    return cluster.model_copy(update={"pools": pools})


def test_contexts_of_a_plan_evaluate_to_the_plan(two_vendors: ClusterSpec) -> None:
    model = load_model("de_tiny")
    plan = plan_job(two_vendors, model, 12 * 1024, SearchOptions(matched=True))
    contexts = contexts_of(plan)
    again = evaluate(contexts, {name: pool.placements for name, pool in plan.pools.items()})
    assert again.step_s * 1e3 == pytest.approx(plan.predicted.step_ms)


def test_recipe_weights_take_the_narrower_weights_out() -> None:
    model = load_model("de_tiny")
    assert len(model.precision.embeddings) > 1
    (both,) = leagues(ONE, model, BATCH, LOOSE)
    rows = {standing.planner: standing for standing in both.standings}
    with_recipe, greedy = rows[ILP_RECIPE].step_ms, rows["torchrec_greedy"].step_ms
    assert with_recipe is not None and greedy is not None
    assert both.lower_bound_ms <= with_recipe <= greedy * 1.05
    recipe = model.precision.model_copy(update={"embeddings": model.precision.embeddings[:1]})
    fixed = model.model_copy(update={"precision": recipe})
    (only,) = leagues(ONE, fixed, BATCH, LOOSE)
    assert ILP_RECIPE not in {standing.planner for standing in only.standings}
    assert only.standings[0].step_ms == pytest.approx(with_recipe, rel=0.05)
