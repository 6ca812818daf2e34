"""The smallest cluster that reaches a rate.

Candidates are vectors of nodes, one number for each pool. The search of one candidate may leave
nodes out, so it covers every smaller one (componentwise), and its proven bound excludes all of them
if it lies below the target; a plan that reaches the target makes everything that costs as much as
its own nodes superfluous. The next candidate is the one that excludes most, whatever its outcome:
with one pool that is bisection.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.evaluate import MS
from planner.search import SearchOptions, plan_job
from planner.specs.base import NonNegativeInt, PositiveFloat, PositiveInt, Spec
from planner.specs.cluster import ClusterSpec
from planner.specs.errors import InfeasibleError, UsageError
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan
from planner.whatif.price import Objective, node_cost
from planner.whatif.sweep import PlannedPoint, Progress, planned_point
from planner.whatif.vary import MOST_NODES, parse_axes, with_nodes

MOST_CANDIDATES = 1_000_000
SAME = 1e-9
"""Relative difference below which two costs are the same: sums in another order."""


class Sizing(Spec):
    """The smallest cluster, and how that was found."""

    cluster: str
    model: str
    target_samples_per_s: PositiveFloat
    objective: Objective
    cost: PositiveFloat
    """Devices, dollars per hour or watts of ``nodes``."""
    nodes: dict[str, PositiveInt]
    """By pool; pools that are not needed are missing."""
    global_batch: PositiveInt
    planned: PlannedPoint
    candidates: PositiveInt
    """Node counts that were open, the whole grid up to ``max_nodes``."""
    plans_made: PositiveInt
    undecided: NonNegativeInt
    """Cheaper candidates for which no plan that reaches the target was found, though the bound does
    not exclude one: how far the search stopped from the optimum (``mip_gap``, time limit)."""


@dataclass(frozen=True)
class Sized:
    """A sizing with its plan. The plan's cluster may have nodes that are not needed."""

    sizing: Sizing
    plan: Plan


def batches_of(texts: Sequence[str], cluster: ClusterSpec) -> tuple[int, ...]:
    """The global batches of ``global_batch=8192,16384``; none if nothing is given.

    Raises:
        UsageError: another axis, or one that cannot be used.
    """
    axes = parse_axes(texts, cluster)
    for axis in axes:
        if axis.kind != "global_batch":
            raise UsageError(
                "only the global batch may vary here",
                field=f"--vary {axis.name}",
                fix="give nodes by --max-nodes; for the rest use hwplan sweep",
            )
    return tuple(int(value) for axis in axes for value in axis.values)


def _limits(cluster: ClusterSpec, most_nodes: Mapping[str, int]) -> dict[str, int]:
    """Most nodes of every pool.

    Raises:
        UsageError: no such pool, or fewer nodes than the pool must have.
    """
    limits = {pool.name: pool.nodes for pool in cluster.pools} | dict(most_nodes)
    for name, nodes in limits.items():
        pool = next((pool for pool in cluster.pools if pool.name == name), None)
        if pool is None:
            names = ", ".join(pool.name for pool in cluster.pools)
            raise UsageError(f"no pool {name!r}", field="max_nodes", fix=f"use one of {names}")
        if not pool.min_nodes <= nodes <= MOST_NODES:
            raise UsageError(
                f"pool {name} has at least {pool.min_nodes} nodes, and at most {MOST_NODES:,}",
                field="max_nodes",
                value=nodes,
                fix="give a number in between, or change min_nodes in the cluster file",
            )
    return limits


@dataclass
class _Grid:
    """All candidates: an array with one axis for each pool."""

    cluster: ClusterSpec
    least: tuple[int, ...]
    cost: NDArray[np.float64]
    open: NDArray[np.bool_]

    @classmethod
    def of(cls, cluster: ClusterSpec, most: Mapping[str, int], objective: Objective) -> _Grid:
        least = tuple(pool.min_nodes for pool in cluster.pools)
        shape = tuple(
            most[pool.name] - low + 1 for pool, low in zip(cluster.pools, least, strict=True)
        )
        if np.prod([float(size) for size in shape]) > MOST_CANDIDATES:
            raise UsageError(
                f"more than {MOST_CANDIDATES:,} combinations of nodes",
                field="--max-nodes",
                value=dict(most),
                fix="lower it for some pool",
            )
        cost = np.zeros(shape)
        for pool, low, nodes in zip(cluster.pools, least, np.indices(shape), strict=True):
            cost += (low + nodes) * node_cost(pool, objective)
        return cls(cluster, least, cost, cost > 0)

    def next(self) -> tuple[int, ...]:
        """Index of the open candidate that excludes most open ones, at the worse outcome."""
        below = self.open.astype(np.int64)
        for axis in range(below.ndim):
            below = below.cumsum(axis=axis)
        ordered = np.sort(self.cost[self.open])
        above = len(ordered) - np.searchsorted(ordered, self.cost * (1 - SAME))
        worth = np.where(self.open, np.minimum(below, above), -1)
        return tuple(int(i) for i in np.unravel_index(int(worth.argmax()), worth.shape))

    def nodes(self, index: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(low + i for low, i in zip(self.least, index, strict=True))

    def index_of(self, plan: Plan) -> tuple[int, ...]:
        at_work = plan.nodes_at_work
        used = [at_work.get(pool.name, 0) for pool in self.cluster.pools]
        return tuple(count - low for count, low in zip(used, self.least, strict=True))

    def exclude_below(self, index: tuple[int, ...]) -> None:
        """This candidate and every one with no more nodes in any pool."""
        self.open[tuple(slice(0, i + 1) for i in index)] = False

    def exclude_from(self, cost: float) -> None:
        """Everything that costs as much, or more."""
        self.open &= self.cost < cost * (1 - SAME)


@dataclass
class _Sizer:
    """State of one sizing."""

    grid: _Grid
    model: ModelSpec
    batches: tuple[int, ...]
    target: float
    options: SearchOptions
    plans_made: int = 0
    most: tuple[float, str] = (0.0, "")
    """Highest rate of any plan, and where."""
    proven: float = 0.0
    """No candidate is faster."""
    hopeless: defaultdict[int, list[tuple[int, ...]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By batch: candidates at which, and below which, it cannot reach the target."""
    undecided: list[float] = field(default_factory=list)
    """Costs of candidates that neither a plan nor a bound decided."""

    def decide(self, index: tuple[int, ...]) -> Plan | None:
        """A plan that reaches the target on no more than these nodes; None if there is none.

        Closes what the answer excludes.
        """
        cluster = with_nodes(self.grid.cluster, self.grid.nodes(index))
        assert cluster is not None
        possible: list[int] = []
        for batch in self.batches:
            if any(np.greater_equal(other, index).all() for other in self.hopeless[batch]):
                continue
            plan = self._plan(cluster, batch, self.options)
            if plan is None:
                self.hopeless[batch].append(index)
                continue
            if plan.predicted.samples_per_s >= self.target:
                return plan
            fastest = batch * MS / plan.predicted.lower_bound_ms
            self.proven = max(self.proven, fastest)
            if fastest >= self.target:
                possible.append(batch)
            else:
                self.hopeless[batch].append(index)
        if not possible:
            self.grid.exclude_below(index)
            return None
        # Of the plans within its gap the search takes one with few devices: all may do better.
        for batch in possible:
            plan = self._plan(cluster, batch, replace(self.options, matched=True))
            if plan is not None and plan.predicted.samples_per_s >= self.target:
                return plan
        self.undecided.append(float(self.grid.cost[index]))
        self.grid.open[index] = False
        return None

    def _plan(self, cluster: ClusterSpec, batch: int, options: SearchOptions) -> Plan | None:
        self.plans_made += 1
        try:
            plan = plan_job(cluster, self.model, batch, options)
        except InfeasibleError:
            return None
        rate = plan.predicted.samples_per_s
        if rate > self.most[0]:
            nodes = ", ".join(f"{pool.nodes} in {name}" for name, pool in plan.pools.items())
            self.most = rate, f"{nodes}, global batch {batch:,}"
        return plan

    def unreachable(self, whole: ClusterSpec) -> InfeasibleError:
        """Why no candidate reaches the target."""
        if not self.most[1]:
            # Nothing fits at all: the planner's own explanation of the largest cluster is better.
            try:
                plan_job(whole, self.model, self.batches[0], self.options)
            except InfeasibleError as error:
                return error
        rate, where = self.most
        return InfeasibleError(
            f"no cluster within --max-nodes reaches {self.target:,.0f} samples/s: the most that "
            f"was found is {rate:,.0f} ({where}), and more than {self.proven:,.0f} is impossible",
            field="target_samples_per_s",
            value=self.target,
            fix="raise --max-nodes or the global batch, or lower the target",
        )


def size(
    cluster: ClusterSpec,
    model: ModelSpec,
    target_samples_per_s: float,
    *,
    objective: Objective = Objective.DEVICES,
    most_nodes: Mapping[str, int] | None = None,
    global_batches: Sequence[int] = (),
    options: SearchOptions | None = None,
    progress: Progress | None = None,
) -> Sized:
    """The smallest cluster of these pools that reaches ``target_samples_per_s``.

    Args:
        most_nodes: by pool; the cluster file's when left out. ``min_nodes`` is the least.
        global_batches: any of them may be used; the model's own when left out.
        options: of each search.
        progress: called with the candidates that are decided and their number.

    Raises:
        InfeasibleError: no candidate reaches the target.
        UsageError: a target, batch or number of nodes out of range, or dollars without prices.
    """
    if not 0 < target_samples_per_s < float("inf"):
        raise UsageError(
            "the target is not a rate",
            field="target_samples_per_s",
            value=target_samples_per_s,
            fix="give a finite number above 0",
        )
    limits = _limits(cluster, most_nodes or {})
    grid = _Grid.of(cluster, limits, objective)
    candidates = int(grid.open.sum())
    sizer = _Sizer(
        grid,
        model,
        # Large ones first: they reach higher rates.
        tuple(sorted(set(global_batches), reverse=True)) or (model.global_batch,),
        target_samples_per_s,
        replace(options or SearchOptions(), cures=False),
    )
    best: Plan | None = None
    # The whole grid first: whether it can be done at all.
    index = tuple(size - 1 for size in grid.cost.shape)
    while grid.open.any():
        if progress is not None:
            progress(candidates - int(grid.open.sum()), candidates)
        found = sizer.decide(index)
        if found is not None:
            best = found
            grid.exclude_from(float(grid.cost[grid.index_of(best)]))
        if grid.open.any():
            index = grid.next()
    if progress is not None:
        progress(candidates, candidates)
    if best is None:
        whole = with_nodes(cluster, [limits[pool.name] for pool in cluster.pools])
        assert whole is not None
        raise sizer.unreachable(whole)
    cost = float(grid.cost[grid.index_of(best)])
    fields: dict[str, Any] = {
        "cluster": cluster.name,
        "model": model.name,
        "target_samples_per_s": target_samples_per_s,
        "objective": objective,
        "cost": cost,
        "nodes": {name: pool.nodes for name, pool in best.pools.items()},
        "global_batch": best.global_batch,
        "planned": planned_point(best),
        "candidates": candidates,
        "plans_made": sizer.plans_made,
        "undecided": sum(other < cost * (1 - SAME) for other in sizer.undecided),
    }
    return Sized(Sizing(**fields), best)
