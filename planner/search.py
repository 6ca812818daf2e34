"""Which nodes work, how the batch is split, under which policy: branch and bound with a gap.

Linked pools may work as one, so first comes the choice which of them are joined. A *crew* is a
number of working nodes for each pool, joined or not. Its splits form a box of local batches; every
duration is nondecreasing in the local batch, so the largest of the pools' bounds at the box's low
corner holds for the whole box. A box is examined at a balanced split of it, which is solved if
its bound leaves hope, and cut there. Boxes are taken in the order of their bounds, until the best
bound left is within the gap of the best plan; one that is bounded as well as its split is not cut.

A pool alone, as one replica group or several, is bounded and solved by ``planner.groups``; plans
are scored by ``planner.evaluate``.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, product
from typing import get_args

from planner.agree import agree, evaluated
from planner.assemble import assemble, freshest, with_batch
from planner.baselines.naive import naive_choice
from planner.considered import considered
from planner.crew import Crew
from planner.evaluate import Evaluation, evaluate
from planner.fit import first_fit
from planner.groups import GroupedStudy, grouped
from planner.ilp.pool import Goal
from planner.ilp.solve import SolverOptions
from planner.infeasible import no_crew, unreachable_batch, with_cures
from planner.settle import settle_job
from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.errors import InfeasibleError, UsageError
from planner.specs.model import ModelSpec
from planner.specs.plan import KernelPolicy, Plan, SolverReport
from planner.splits import Box, SplitSpace
from planner.study import Solved

CURE_LIMIT_S = 5.0
"""Time in which a job must be found feasible to be suggested."""


@dataclass(frozen=True)
class SearchOptions:
    """Limits of a search.

    ``matched``: all devices of all pools must work. ``kernels``: ``vendor`` plans without kernel
    preselection, for a comparison. ``cures``: if there is no plan, look for changes that would give
    one (seconds).
    """

    mip_gap: float = 0.01
    time_limit_s: float = 60.0
    top_k: int = 5
    seed: int = 0
    matched: bool = False
    kernels: KernelPolicy = "preselected"
    cures: bool = True

    def __post_init__(self) -> None:
        for name, value in (("mip_gap", self.mip_gap), ("time_limit_s", self.time_limit_s)):
            if not value >= 0 or value == float("inf"):
                raise UsageError(f"{name} is not usable", value=value, fix="give a number >= 0")
        if self.top_k < 1:
            raise UsageError("top_k is not usable", value=self.top_k, fix="give 1 or more")
        if self.kernels not in get_args(KernelPolicy):
            names = " or ".join(get_args(KernelPolicy))
            raise UsageError("kernels is not usable", value=self.kernels, fix=f"give {names}")


@dataclass(frozen=True)
class Scored:
    """A solved split of a crew."""

    crew: Crew
    split: tuple[int, ...]
    solved: tuple[Solved, ...]
    evaluation: Evaluation

    @property
    def step_s(self) -> float:
        return self.evaluation.step_s


@dataclass
class Search:
    """State of one branch and bound."""

    cluster: ClusterSpec
    model: ModelSpec
    """With the job's global batch."""
    options: SearchOptions
    deadline: float
    scored: dict[tuple[str, tuple[int, ...]], Scored] = field(default_factory=dict)
    best: Scored | None = None
    closed_s: float = float("inf")
    """Smallest bound of the boxes that cannot be cut any further."""
    crew_bounds: dict[str, tuple[Crew, float]] = field(default_factory=dict)
    """By label: each crew, and the smallest bound of its boxes that were given up."""
    boxes_pruned: int = 0
    refusal: InfeasibleError | None = None
    """What a table's constraints or a device forbid in the first crew that cannot work."""
    studies: dict[tuple[str, int, int], GroupedStudy] = field(default_factory=dict)

    @property
    def solver_options(self) -> SolverOptions:
        left_s = self.deadline - time.monotonic()
        return SolverOptions(
            mip_gap=self.options.mip_gap / 2,
            time_limit_s=max(left_s, 1.0),
            seed=self.options.seed,
        )

    def study(self, pool: PoolSpec, nodes: int, pools_in_job: int) -> GroupedStudy:
        """The study of a pool with so many of its nodes."""
        key = (pool.name, nodes, pools_in_job)
        if key not in self.studies:
            self.studies[key] = grouped(
                pool=pool.model_copy(update={"nodes": nodes}),
                model=self.model,
                bridge=self.cluster.bridge,
                pools_in_job=pools_in_job,
                options=self.solver_options,
                kernels=self.options.kernels,
            )
        return self.studies[key]

    def crews(self) -> Iterator[Crew]:
        """All crews that reach the batch, the whole cluster with its pools apart first."""
        for pools in self.cluster.ways():
            yield from self._crews_of(pools, [pool.min_nodes for pool in pools])

    def _crews_of(self, pools: Sequence[PoolSpec], least: Sequence[int]) -> Iterator[Crew]:
        """Crews of pools with at least so many nodes each, those with most first."""
        choices = [
            [pool.nodes] if self.options.matched else range(pool.nodes, nodes - 1, -1)
            for pool, nodes in zip(pools, least, strict=True)
        ]
        for counts in product(*choices):
            working = [(p, count) for p, count in zip(pools, counts, strict=True) if count]
            if not working:
                continue
            studies = tuple(self.study(pool, count, len(working)) for pool, count in working)
            space = SplitSpace(tuple(s.ranks for s in studies), self.model.global_batch)
            if space.root is not None:
                yield Crew(studies, space)

    def _largest_crews(self) -> Iterator[Crew]:
        """The first crew of every set of pools that may work without the others."""
        for pools in self.cluster.ways():
            for count in range(len(pools), 0, -1):
                for working in combinations(pools, count):
                    resting = [pool for pool in pools if pool not in working]
                    if not resting or not (
                        self.options.matched or any(pool.min_nodes for pool in resting)
                    ):
                        least = [max(pool.min_nodes, 1) for pool in working]
                        yield from islice(self._crews_of(working, least), 1)

    def offer_naive(self) -> None:
        """Take the naive port, with the kernels of this search, if the search, which stops within
        its gap, found nothing better."""
        try:
            choice = naive_choice(self.cluster, self.model)
        except InfeasibleError:
            return
        crew = next(self.crews())
        contexts = {
            s.pool.name: choice.contexts[s.pool.name].with_kernels(s.kernel_policy)
            for s in crew.studies
        }
        evaluation = evaluate(contexts, choice.placements)
        if self.best is None or evaluation.step_s < self.best.step_s:
            solved = tuple(
                Solved(ctx, choice.placements[name], evaluation.step_s)
                for name, ctx in contexts.items()
            )
            split = tuple(ctx.local_batch for ctx in contexts.values())
            self.best = Scored(crew, split, solved, evaluation)
            self.scored[f"naive port: {crew.label}", split] = self.best

    def _or_refused(self, bound: Callable[[Box], float], box: Box) -> float:
        """The bound; infinite for a crew in which a pool cannot do its part at all."""
        try:
            return bound(box)
        except InfeasibleError as error:
            self.refusal = self.refusal or error
            return float("inf")

    def take_any(self) -> bool:
        """Make do with any plan if there is none; whether there is one now."""
        found = first_fit(self._largest_crews()) if self.best is None else None
        if found is not None:
            self.best = Scored(found.crew, found.split, found.solved, evaluated(found.solved))
            self.scored[found.crew.label, found.split] = self.best
        return self.best is not None

    def feasible(self, cluster: ClusterSpec, model: ModelSpec) -> bool:
        """Whether another job has a plan, by the same options."""
        options = replace(self.options, time_limit_s=min(self.options.time_limit_s, CURE_LIMIT_S))
        other = Search(cluster, model, options, time.monotonic() + options.time_limit_s)
        try:
            other.offer_naive()
            return other.take_any()
        except InfeasibleError:
            return False

    def spare_devices(self, bound_s: float) -> None:
        """Prefer the crew with the fewest devices whose step is within the gap of the bound too:
        where the host or the bridge decides the step, more devices would only stand idle."""
        enough_s = bound_s * (1 + self.options.mip_gap)
        if self.best is None or self.best.step_s > enough_s:
            return
        used = self.best.crew.devices
        for crew in sorted(self.crews(), key=lambda crew: crew.devices):
            root = crew.space.root
            if crew.devices >= used or root is None or time.monotonic() > self.deadline:
                return
            if any(
                self._or_refused(bound, root) > enough_s for bound in (crew.dense_s, crew.bound_s)
            ):
                continue
            goal = Goal(enough_s=enough_s, hopeless_s=enough_s, quick=True)
            scored = self.score(crew, crew.balanced(root), goal)
            if scored is not None and scored.step_s <= enough_s:
                self.best = scored
                return

    def run(self) -> float:
        """Fill ``best`` and ``scored``; the proven lower bound, seconds."""
        queue: list[tuple[float, int, bool, Box, Crew]] = []
        for order, crew in enumerate(self.crews()):
            root = crew.space.root
            assert root is not None
            queue.append((self._or_refused(crew.dense_s, root), order, False, root, crew))
        if not queue:
            fits = self.feasible if self.options.cures else None
            raise unreachable_batch(self.cluster, self.model, self.options.matched, fits)
        heapq.heapify(queue)
        serial = len(queue)
        while queue:
            bound_s, order, relaxed, box, crew = queue[0]
            if self._good_enough(bound_s) or self._out_of_time():
                break
            heapq.heappop(queue)
            if not relaxed:
                bound_s = max(bound_s, self._or_refused(crew.bound_s, box))
                if bound_s < float("inf"):
                    heapq.heappush(queue, (bound_s, order, True, box, crew))
                else:
                    self.crew_bounds.setdefault(crew.label, (crew, bound_s))
                continue
            for child_s, child in self._branch(crew, box, bound_s):
                serial += 1
                heapq.heappush(queue, (child_s, serial, False, child, crew))
        self.boxes_pruned = len(queue)
        for bound_s, _, _, _, crew in queue:
            _, lowest_s = self.crew_bounds.get(crew.label, (crew, float("inf")))
            self.crew_bounds[crew.label] = crew, min(bound_s, lowest_s)
        left_s = min((bound_s for bound_s, *_ in queue), default=float("inf"))
        return min(self.closed_s, left_s)

    def _out_of_time(self) -> bool:
        """A search without any plan yet gets as long again: a late plan beats none."""
        grace_s = 0.0 if self.best else self.options.time_limit_s
        return time.monotonic() > self.deadline + grace_s

    def _good_enough(self, bound_s: float) -> bool:
        return self.best is not None and self.best.step_s <= bound_s * (1 + self.options.mip_gap)

    def _branch(self, crew: Crew, box: Box, bound_s: float) -> Iterator[tuple[float, Box]]:
        """Examine a balanced split of the box, and cut the box there."""
        split = crew.balanced(box)
        point = tuple((batch, batch) for batch in split)
        point_s = crew.bound_s(point)
        tight_s = bound_s * (1 + self.options.mip_gap / 4)
        if point_s <= tight_s and not self._good_enough(bound_s):
            # Maybe the last look at this box: whatever is better than the best brings it nearer.
            best_s = self.best.step_s if self.best else float("inf")
            self.score(crew, split, Goal(hopeless_s=best_s))
        elif not self._good_enough(point_s):
            self.score(crew, split)
        if crew.bound_s(point) <= tight_s:
            # The box's bound is as good as its split's own: cutting would prove nothing more.
            self.closed_s = min(self.closed_s, bound_s)
            return
        widths = [high / low - 1 for low, high in box]
        widest = widths.index(max(widths))
        if not widths[widest]:
            # Nothing but this split, the bound of which was raised by solving it.
            self.closed_s = min(self.closed_s, crew.bound_s(point))
            return
        low, high = box[widest]
        middle = min(max(split[widest], low + 1), high)
        for part in ((low, middle - 1), (middle, high)):
            child = crew.space.tighten((*box[:widest], part, *box[widest + 1 :]))
            if child is not None:
                yield max(bound_s, crew.dense_s(child)), child

    def score(self, crew: Crew, split: tuple[int, ...], goal: Goal | None = None) -> Scored | None:
        """Solve every pool at a split and evaluate the job; None if a pool finds no placement.

        Args:
            goal: for every pool; left out: whether the best plan so far can be beaten by more than
                the gap asked for.
        """
        if goal is None:
            best_s = self.best.step_s if self.best else float("inf")
            goal = Goal(hopeless_s=best_s / (1 + self.options.mip_gap))
        key = (crew.label, split)
        if key in self.scored:
            return self.scored[key]
        solved: Sequence[Solved] = []
        waits = crew.waits(split)
        for study, batch in zip(crew.studies, split, strict=True):
            study.limit(self.solver_options)
            one = study.solve(batch, waits, goal)
            if one is None:
                return None
            solved = [*solved, one]
        evaluation = evaluated(solved)
        bound_s = crew.bound_s(tuple((batch, batch) for batch in split))
        if len(solved) > 1 and bound_s < goal.hopeless_s:
            enough_s = max(bound_s * (1 + self.options.mip_gap), goal.enough_s)
            solved, evaluation = agree(crew, solved, evaluation, enough_s)
        scored = self.scored[key] = Scored(crew, split, tuple(solved), evaluation)
        if self.best is None or scored.step_s < self.best.step_s:
            self.best = scored
        return scored


def plan_job(
    cluster: ClusterSpec,
    model: ModelSpec,
    global_batch: int | None = None,
    options: SearchOptions | None = None,
) -> Plan:
    """The best plan for a model on a cluster, with a proven bound.

    Args:
        global_batch: samples per step of the whole job; the model's own when left out.

    Raises:
        InfeasibleError: no split reaches the batch, or no working pools can hold the model.
        UsageError: an option out of range.
    """
    options = options or SearchOptions()
    job = with_batch(model, global_batch)
    search = Search(cluster, job, options, time.monotonic() + options.time_limit_s)
    bound_s = search.run()
    search.offer_naive()
    search.spare_devices(bound_s)
    if not search.take_any():
        fits = search.feasible if options.cures else None
        if search.refusal is not None:
            raise with_cures(search.refusal, cluster, job, options.matched, fits)
        raise no_crew(cluster, job, options.matched, fits)
    assert search.best is not None
    contexts = {one.context.pool.name: one.context for one in search.best.solved}
    placements = {one.context.pool.name: one.placements for one in search.best.solved}
    settled, evaluation = settle_job(
        contexts, placements, search.best.evaluation, search.solver_options
    )
    contexts, evaluation = freshest(contexts, settled, evaluation)
    bound_s = min(bound_s, evaluation.step_s)
    proven = evaluation.step_s <= bound_s * (1 + options.mip_gap)
    out_of_time = time.monotonic() > search.deadline
    report = SolverReport(
        name=search.solver_options.name,
        status="optimal" if proven else "time_limit" if out_of_time else "exhausted",
        mip_gap=options.mip_gap,
        time_limit_s=options.time_limit_s,
        evaluated=sum(study.programs_solved for study in search.studies.values()),
        pruned=search.boxes_pruned,
    )
    return assemble(
        cluster=cluster,
        model=model,
        global_batch=job.global_batch,
        kind="planned",
        contexts=contexts,
        evaluation=evaluation,
        bound_s=bound_s,
        report=report,
        seed=options.seed,
        considered=tuple(considered(search)),
    )
