from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from whatif_jobs import EXACT, TINY, TWO, cpu_cluster, cpu_pool

import planner.whatif.size as under_test
from planner.search import SearchOptions, plan_job
from planner.specs.cluster import ClusterSpec
from planner.specs.errors import InfeasibleError, UsageError
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan
from planner.whatif.price import Objective
from planner.whatif.size import size
from planner.whatif.vary import with_nodes

ALL_AT_WORK = SearchOptions(mip_gap=0.0, matched=True)
PER_NODE = {
    Objective.DEVICES: (1.0, 2.0),
    Objective.DOLLARS: (0.5, 1.5),
    Objective.WATTS: (10.0, 16.0),
}


@pytest.fixture(scope="module")
def rates() -> dict[tuple[int, int], float]:
    """Samples per second of every combination of nodes, all of them at work."""
    found = {}
    for nodes in product(range(4), range(3)):
        cluster = with_nodes(TWO, nodes)
        if cluster is not None:
            plan = plan_job(cluster, TINY, options=ALL_AT_WORK)
            found[nodes] = plan.predicted.samples_per_s
    return found


@pytest.fixture(scope="module")
def plans_kept() -> Iterator[None]:
    """The same jobs are planned for every target: once is enough."""
    kept: dict[tuple[object, ...], Plan] = {}

    def planned(
        cluster: ClusterSpec, model: ModelSpec, batch: int | None, options: SearchOptions
    ) -> Plan:
        key = cluster.model_dump_json(), model.model_dump_json(), batch, options
        if key not in kept:
            kept[key] = plan_job(cluster, model, batch, options)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_test, "plan_job", planned)
        yield


@pytest.mark.usefixtures("plans_kept")
@pytest.mark.parametrize("objective", Objective)
def test_size_equals_enumeration(objective: Objective, rates: dict[tuple[int, int], float]) -> None:
    single, double = PER_NODE[objective]
    for target in sorted(rate * 0.99 for rate in rates.values())[::2]:
        cheapest = min(a * single + b * double for (a, b), rate in rates.items() if rate >= target)
        found = size(TWO, TINY, target, objective=objective, options=EXACT)
        sizing = found.sizing
        assert sizing.cost == pytest.approx(cheapest), (target, sizing.nodes)
        nodes = sizing.nodes.get("single", 0), sizing.nodes.get("double", 0)
        assert nodes[0] * single + nodes[1] * double == pytest.approx(cheapest)
        assert rates[nodes] == pytest.approx(sizing.planned.samples_per_s)
        assert sizing.planned.samples_per_s >= target
        assert sizing.undecided == 0 and sizing.candidates == len(rates)
        assert sizing.plans_made < len(rates)


def test_one_pool_is_bisected() -> None:
    cluster = cpu_cluster(cpu_pool("single", 40, 1))
    found = size(cluster, TINY, 70_000.0, options=EXACT).sizing
    enough = found.nodes["single"]
    rates = [
        plan_job(with_nodes(cluster, [count]), TINY, options=ALL_AT_WORK).predicted.samples_per_s  # type: ignore[arg-type]
        for count in (enough - 1, enough)
    ]
    assert rates[0] < 70_000 <= rates[1]
    assert found.plans_made <= 7


def test_limits_and_min_nodes() -> None:
    coarse = SearchOptions(mip_gap=0.05)
    wide = size(TWO, TINY, 40_000.0, most_nodes={"double": 3}, options=coarse).sizing
    assert wide.candidates == 4 * 4 - 1 and wide.nodes == {"single": 1}
    forced = cpu_cluster(cpu_pool("single", 3, 1), cpu_pool("double", 2, 2, min_nodes=1))
    assert size(forced, TINY, 40_000.0, options=EXACT).sizing.nodes == {"double": 1}
    with pytest.raises(UsageError, match="at least 1 nodes"):
        size(forced, TINY, 1.0, most_nodes={"double": 0})
    with pytest.raises(UsageError, match="no pool 'triple'"):
        size(forced, TINY, 1.0, most_nodes={"triple": 1})
    with pytest.raises(UsageError, match="combinations of nodes"):
        size(TWO, TINY, 1.0, most_nodes={"single": 90_000, "double": 90_000})


def test_a_larger_batch_may_do_with_less() -> None:
    one = size(TWO, TINY, 52_000.0, options=EXACT).sizing
    either = size(TWO, TINY, 52_000.0, global_batches=(1920, 7680), options=EXACT).sizing
    assert either.cost < one.cost and either.global_batch == 7680


def test_unreachable_says_what_is_possible(rates: dict[tuple[int, int], float]) -> None:
    with pytest.raises(InfeasibleError) as caught:
        size(TWO, TINY, 1e6, options=EXACT)
    fastest = max(rates.values())
    assert f"the most that was found is {fastest:,.0f}" in str(caught.value)
    assert "--max-nodes" in str(caught.value)


def test_nothing_fits_says_why() -> None:
    fields = TINY.model_dump()
    fields["tables"][0]["num_embeddings"] = 10**9
    huge = ModelSpec.model_validate(fields)
    with pytest.raises(InfeasibleError, match="host memory of pool"):
        size(TWO, huge, 1.0, options=EXACT)


def test_dollars_need_prices() -> None:
    cluster = cpu_cluster(cpu_pool("single", 1, 1))
    with pytest.raises(UsageError, match="dollars_per_device_hour: pool single has no price"):
        size(cluster, TINY, 1.0, objective=Objective.DOLLARS)


@pytest.mark.parametrize("target", [0.0, -1.0, float("nan"), float("inf")])
def test_targets_are_rates(target: float) -> None:
    with pytest.raises(UsageError, match="target_samples_per_s"):
        size(TWO, TINY, target)
