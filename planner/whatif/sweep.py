"""Plans at every point of a sweep, and which of them are worth having."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.search import SearchOptions, plan_job
from planner.specs.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Spec
from planner.specs.cluster import ClusterSpec
from planner.specs.errors import InfeasibleError
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan
from planner.whatif.pareto import non_dominated
from planner.whatif.price import plan_devices, plan_dollars_per_hour, plan_watts
from planner.whatif.vary import Point, Value, parse_axes, points

MOST_POINTS = 200
"""Unless the caller allows more."""
NO_NODES = "no nodes"

Progress = Callable[[int, int], None]
"""Called with the points done and their number."""


class PlannedPoint(Spec):
    """What the plan of one point reaches, and what it takes."""

    samples_per_s: PositiveFloat
    step_ms: PositiveFloat
    gap: NonNegativeFloat
    """(step - proven lower bound) / proven lower bound."""
    nodes: dict[str, PositiveInt]
    """Working nodes by pool; a plan may leave some of the point's nodes out."""
    local_batch: dict[str, PositiveInt]
    devices: PositiveInt
    """At work, as are those that dollars and watts count."""
    dollars_per_hour: NonNegativeFloat | None
    """None: a working pool has no price."""
    watts: NonNegativeFloat


class Row(Spec):
    """One point."""

    settings: dict[str, Value]
    """By axis."""
    planned: PlannedPoint | None
    """None: infeasible."""
    why_not: str = ""
    pareto: bool = False
    """No other point is as good in every criterion and better in one; of points that come to the
    same, the one with the fewest devices."""


class Sweep(Spec):
    """All points in the order of the axes."""

    cluster: str
    model: str
    axes: dict[str, tuple[Value, ...]]
    criteria: tuple[str, ...]
    """More samples/s; less of the others."""
    rows: tuple[Row, ...]
    plans_made: NonNegativeInt
    """Points less those that the proven plan of a larger cluster answered."""


def planned_point(plan: Plan) -> PlannedPoint:
    """A plan's numbers."""
    return PlannedPoint(
        samples_per_s=plan.predicted.samples_per_s,
        step_ms=plan.predicted.step_ms,
        gap=plan.predicted.gap,
        nodes={name: pool.nodes for name, pool in plan.pools.items()},
        local_batch={name: pool.local_batch for name, pool in plan.pools.items()},
        devices=plan_devices(plan),
        dollars_per_hour=plan_dollars_per_hour(plan),
        watts=plan_watts(plan),
    )


@dataclass(frozen=True)
class _Known:
    """A point that was planned."""

    point: Point
    plan: Plan

    @property
    def proven(self) -> bool:
        """Whether the search ended within its gap; else one of a smaller cluster may do better."""
        return self.plan.solver.status == "optimal"

    def answers(self, point: Point) -> bool:
        """Whether this plan is a plan of ``point`` too, with a bound that holds there.

        The search may leave nodes out, so it covered every plan of a smaller cluster; one that
        uses no more than that has is its best as well.
        """
        mine = self.point
        return (mine.frame, mine.global_batch) == (point.frame, point.global_batch) and all(
            used <= count <= had and min(pool.min_nodes, count) == min(pool.min_nodes, had)
            for pool, used, count, had in zip(
                point.frame.pools, self._used(), point.nodes, mine.nodes, strict=True
            )
        )

    def _used(self) -> list[int]:
        at_work = self.plan.nodes_at_work
        return [at_work.get(pool.name, 0) for pool in self.point.frame.pools]


def sweep(
    cluster: ClusterSpec,
    model: ModelSpec,
    vary: Sequence[str],
    global_batch: int | None = None,
    options: SearchOptions | None = None,
    *,
    max_points: int = MOST_POINTS,
    progress: Progress | None = None,
) -> Sweep:
    """Plan every point and mark those that no other one dominates.

    Args:
        vary: axes as on the command line (``planner.whatif.vary``).
        global_batch: where no axis varies it; the model's own when left out.
        options: of each point's search; the time limit is each point's.

    Raises:
        UsageError: an axis that cannot be used, or more than ``max_points`` points.
    """
    axes = parse_axes(vary, cluster)
    options = replace(options or SearchOptions(), cures=False)
    batch = model.global_batch if global_batch is None else global_batch
    every = points(cluster, batch, axes, max_points)
    rows: dict[int, Row] = {}
    known: list[_Known] = []
    # Large clusters first: their plans often answer smaller ones.
    order = sorted(range(len(every)), key=lambda index: (-sum(every[index].nodes), index))
    for done, index in enumerate(order):
        if progress is not None:
            progress(done, len(every))
        rows[index] = _row(every[index], model, options, known)
    if progress is not None:
        progress(len(every), len(every))
    in_order = [rows[index] for index in range(len(every))]
    criteria, marked = _marked(in_order, [point.devices for point in every])
    return Sweep(
        cluster=cluster.name,
        model=model.name,
        axes={axis.name: axis.values for axis in axes},
        criteria=criteria,
        rows=marked,
        plans_made=len(known)
        + sum(row.planned is None and row.why_not != NO_NODES for row in in_order),
    )


def _row(point: Point, model: ModelSpec, options: SearchOptions, known: list[_Known]) -> Row:
    """One point, planned unless a known plan answers it; new plans are added to ``known``."""
    settings = dict(point.settings)
    if point.cluster is None:
        return Row(settings=settings, planned=None, why_not=NO_NODES)
    answers = [one for one in known if one.answers(point)]
    if not any(one.proven for one in answers):
        try:
            plan = plan_job(point.cluster, model, point.global_batch, options)
            known.append(_Known(point, plan))
            answers.append(known[-1])
        except InfeasibleError as error:
            if not answers:
                return Row(settings=settings, planned=None, why_not=error.problem)
    best = max(answers, key=lambda one: (one.proven, one.plan.predicted.samples_per_s))
    return Row(settings=settings, planned=planned_point(best.plan))


def _marked(
    rows: Sequence[Row], available: Sequence[int]
) -> tuple[tuple[str, ...], tuple[Row, ...]]:
    """The criteria, and the rows with the Pareto front marked.

    Dollars count only if every plan has a price: an unknown price is neither better nor worse.

    Args:
        available: devices of each row's cluster, at work or not.
    """
    planned = [(index, row.planned) for index, row in enumerate(rows) if row.planned is not None]
    priced = all(one.dollars_per_hour is not None for _, one in planned)
    criteria = ("samples_per_s", "devices", *(("dollars_per_hour",) if priced else ()), "watts")
    costs = {
        index: (-one.samples_per_s, *(float(getattr(one, name)) for name in criteria[1:]))
        for index, one in planned
    }
    first: dict[tuple[float, ...], int] = {}
    for index in sorted(costs, key=lambda index: (available[index], index)):
        first.setdefault(costs[index], index)
    front = {
        index
        for index, best in zip(first.values(), non_dominated(list(first)), strict=True)
        if best
    }
    marked = (row.model_copy(update={"pareto": i in front}) for i, row in enumerate(rows))
    return criteria, tuple(marked)
