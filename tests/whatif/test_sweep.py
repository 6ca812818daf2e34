from __future__ import annotations

import time

import pytest
from whatif_jobs import EXACT, TINY, TWO, cpu_cluster, cpu_pool

from planner.search import plan_job
from planner.specs.errors import UsageError
from planner.whatif.sweep import Row, sweep
from planner.whatif.vary import with_nodes

AXES = ["nodes:single=0..2", "nodes:double=0..1", "global_batch=1920,1921"]


@pytest.fixture(scope="module")
def rows() -> dict[tuple[object, ...], Row]:
    started = time.monotonic()
    found = sweep(TWO, TINY, AXES, options=EXACT)
    assert time.monotonic() - started < 10
    assert found.criteria == ("samples_per_s", "devices", "dollars_per_hour", "watts")
    assert found.plans_made < len(found.rows) == 12
    return {tuple(row.settings.values()): row for row in found.rows}


def test_every_point_is_planned_as_if_alone(rows: dict[tuple[object, ...], Row]) -> None:
    """Also those that the plan of a larger cluster answers."""
    for (single, double, batch), row in rows.items():
        cluster = with_nodes(TWO, (int(str(single)), int(str(double))))
        if row.planned is None or cluster is None:
            continue
        alone = plan_job(cluster, TINY, int(str(batch)), EXACT)
        assert row.planned.samples_per_s == pytest.approx(alone.predicted.samples_per_s)
        assert row.planned.nodes == {name: pool.nodes for name, pool in alone.pools.items()}


def test_infeasible_points_say_why(rows: dict[tuple[object, ...], Row]) -> None:
    assert rows[0, 0, 1920].planned is None and rows[0, 0, 1920].why_not == "no nodes"
    # 1921 is odd: two workers alone cannot share it.
    assert "no split reaches the global batch" in rows[0, 1, 1921].why_not
    assert rows[1, 1, 1921].planned is not None


def test_what_a_point_takes(rows: dict[tuple[object, ...], Row]) -> None:
    both = rows[1, 1, 1920].planned
    assert both is not None and both.nodes == {"single": 1, "double": 1}
    assert both.devices == 3
    assert both.dollars_per_hour == pytest.approx(0.5 + 2 * 0.75)
    assert both.watts == pytest.approx(10 + 2 * 8), "8 W is the profile's"


def test_the_front_is_what_nothing_beats(rows: dict[tuple[object, ...], Row]) -> None:
    def costs(row: Row) -> tuple[float, ...]:
        one = row.planned
        assert one is not None and one.dollars_per_hour is not None
        return (-one.samples_per_s, one.devices, one.dollars_per_hour, one.watts)

    planned = [row for row in rows.values() if row.planned]
    for row in planned:
        beaten = any(
            all(a <= b for a, b in zip(costs(other), costs(row), strict=True))
            and costs(other) != costs(row)
            for other in planned
        )
        assert not (row.pareto and beaten)
    front = {costs(row) for row in planned if row.pareto}
    assert len(front) == sum(row.pareto for row in planned), "equal points are marked once"
    assert not any(row.pareto for row in rows.values() if row.planned is None)
    # At the odd batch a second single worker stays idle: the point without it is the one to have.
    idle = rows[2, 1, 1921].planned
    assert idle is not None and idle.nodes == {"single": 1, "double": 1}
    assert rows[1, 1, 1921].pareto and not rows[2, 1, 1921].pareto


def test_a_pool_without_a_price_takes_dollars_out_of_the_comparison() -> None:
    cluster = cpu_cluster(cpu_pool("single", 1, 1), cpu_pool("double", 1, 2))
    found = sweep(cluster, TINY, ["nodes:single=0,1"], options=EXACT)
    assert found.criteria == ("samples_per_s", "devices", "watts")
    assert all(row.planned and row.planned.dollars_per_hour is None for row in found.rows)


def test_other_axes_reach_the_plan() -> None:
    found = sweep(TWO, TINY, ["bridge_gbps=0.001,100"], options=EXACT)
    slow, fast = (row.planned for row in found.rows)
    assert slow is not None and fast is not None
    assert len(slow.nodes) == 1 and len(fast.nodes) == 2


def test_min_nodes_keep_larger_plans_from_answering() -> None:
    """With two nodes forced, the plan of the larger cluster says nothing about one node."""
    cluster = cpu_cluster(cpu_pool("single", 3, 1, min_nodes=2))
    found = sweep(cluster, TINY, ["nodes:single=1..3"], options=EXACT)
    assert [row.planned.nodes for row in found.rows if row.planned] == [
        {"single": 1}, {"single": 2}, {"single": 3},
    ]  # fmt: skip
    assert found.plans_made == 3


def test_progress_and_limits() -> None:
    seen: list[tuple[int, int]] = []
    sweep(
        TWO,
        TINY,
        ["nodes:single=0", "nodes:double=1,2"],
        options=EXACT,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(0, 2), (1, 2), (2, 2)]
    with pytest.raises(UsageError, match="3 points"):
        sweep(TWO, TINY, ["nodes:single=1..3"], max_points=2)
