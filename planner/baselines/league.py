"""Every baseline against the plan: same devices, same batch split, same policies, same cost model.

One league for the job, and with several pools one more for each pool as a job of its own at its
planned local batch: behind the bridge a pool's placements may hardly matter. In a pool's league the
plan's place is taken by the ILP's answer for the pool alone, with its bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from planner.assemble import contexts_of, with_batch
from planner.baselines.problem import Baseline, placements_of, pool_problem
from planner.baselines.registry import BASELINES
from planner.cost.context import PoolContext
from planner.evaluate import MS, Evaluation, evaluate, pool_loads
from planner.ilp.pool import solve_pool
from planner.ilp.program import TIMES, PoolProgram
from planner.ilp.solve import SolverOptions
from planner.search import SearchOptions, plan_job
from planner.specs.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Spec
from planner.specs.cluster import ClusterSpec
from planner.specs.errors import InfeasibleError
from planner.specs.model import ModelSpec
from planner.specs.plan import Placement, PoolPlan
from planner.specs.units import GIB
from planner.study import PoolStudy

ILP = "ilp"
ILP_RECIPE = "ilp_recipe"
"""The ILP without narrower weights, as baselines have them."""

Placements = Mapping[str, Placement]


@dataclass(frozen=True)
class Placed:
    """A planner's placements of one pool, and what there is to say of them."""

    placements: Placements
    note: str = ""


Placer = Callable[[PoolContext], Placed]
"""A baseline from outside: places a pool's tables; ``InfeasibleError`` if it cannot."""


class OtherCost(Spec):
    """What another planner's cost model says of placements."""

    step_ms: PositiveFloat
    """Its rating: the largest sum of times of any rank."""
    fits: bool
    """Whether every rank has room, by its own count of bytes."""


Rater = Callable[[PoolContext, PoolPlan], OtherCost]


class Standing(Spec):
    """One planner's placements."""

    planner: str
    step_ms: PositiveFloat | None
    """None: it found no placements."""
    ratio: PositiveFloat | None
    """Step over the plan's."""
    tables_ms: NonNegativeFloat | None
    """Look-ups and exchanges of the rank that spends most on them, one after another. Placements
    differ in it also where the host or the dense network decides the step."""
    slowest_rank: NonNegativeInt | None
    """Of the slowest pool, counted inside it."""
    slowest_rank_bytes: NonNegativeInt | None
    """Device memory that it fills."""
    fits: bool
    """Whether every rank has room."""
    note: str = ""
    """Why it has no placements, which rank lacks memory, what else there is to say."""
    other: OtherCost | None = None
    """The same placements under the other cost model."""


class League(Spec):
    """Standings by step, the plan first."""

    name: str
    """Of the cluster, or of a pool."""
    replica_groups: PositiveInt = 1
    """Of a pool: this is one of so many alike."""
    ranks: PositiveInt
    samples: PositiveInt
    """Per step."""
    lower_bound_ms: PositiveFloat
    """Proven: nothing in the planner's search space is faster."""
    gap: NonNegativeFloat
    """Of the plan, to the bound."""
    standings: tuple[Standing, ...]


@dataclass(frozen=True)
class Entry:
    """What one planner found, by pool: placements, or why there are none."""

    planner: str
    placements: Mapping[str, Placements]
    problems: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


def leagues(
    cluster: ClusterSpec,
    model: ModelSpec,
    global_batch: int | None = None,
    options: SearchOptions | None = None,
    *,
    placers: Mapping[str, Placer] | None = None,
    rate: Rater | None = None,
) -> tuple[League, ...]:
    """Plan a job on all devices and place it by every baseline.

    Args:
        placers: more baselines, by name.
        rate: another planner's cost model; pools that are a job of their own are rated.

    Raises:
        InfeasibleError: the job cannot run on all devices.
        UsageError: an option out of range.
    """
    options = replace(options or SearchOptions(), matched=True)
    plan = plan_job(cluster, model, global_batch, options)
    job = with_batch(model, global_batch)
    contexts = contexts_of(plan)
    planned = Entry(ILP, {name: pool.placements for name, pool in plan.pools.items()})
    everyone = _placers(contexts) | dict(placers or {})
    if len(job.precision.embeddings) > 1:
        everyone[ILP_RECIPE] = lambda ctx: _with_recipe_weights(ctx, options)
    entries = [planned, *(_entry(name, place, contexts) for name, place in everyone.items())]
    alone = len(contexts) == 1
    whole = league(
        cluster.name, contexts, entries, plan.predicted.lower_bound_ms / MS, rate if alone else None
    )
    if alone:
        return (whole,)
    return (whole, *(_pool_league(ctx, entries, options, rate) for ctx in contexts.values()))


def _placers(contexts: Mapping[str, PoolContext]) -> dict[str, Placer]:
    """The baselines by name, for pools of these contexts."""
    problems = {name: pool_problem(ctx) for name, ctx in contexts.items()}

    def placer_of(baseline: Baseline) -> Placer:
        def place(ctx: PoolContext) -> Placed:
            problem = problems[ctx.pool.name]
            return Placed(placements_of(ctx, problem.program, baseline(problem)))

        return place

    return {name: placer_of(baseline) for name, baseline in BASELINES.items()}


def _entry(planner: str, place: Placer, contexts: Mapping[str, PoolContext]) -> Entry:
    placed: dict[str, Placed] = {}
    problems: dict[str, str] = {}
    for pool, ctx in contexts.items():
        try:
            placed[pool] = place(ctx.sharding_group)
        except InfeasibleError as error:
            problems[pool] = error.problem
    return Entry(
        planner,
        {pool: one.placements for pool, one in placed.items()},
        problems,
        {pool: one.note for pool, one in placed.items() if one.note},
    )


def _pool_league(
    ctx: PoolContext, entries: list[Entry], options: SearchOptions, rate: Rater | None
) -> League:
    """The pool, or one of its replica groups, as a job of its own: its tables placed anew by the
    ILP under the same policy."""
    name = ctx.pool.name
    alone = replace(
        ctx.sharding_group,
        model=with_batch(ctx.model, ctx.sharding_group.pool_batch),
        bridge=None,
        pools_in_job=1,
        embedding_interval_steps=1,
    )
    planned, *others = entries
    bound_s, placements = solve_alone(alone, options)
    in_job_s = evaluate({name: alone}, {name: planned.placements[name]}).step_s
    if placements is None or in_job_s < evaluate({name: alone}, {name: placements}).step_s:
        placements = planned.placements[name]
    entries = [Entry(ILP, {name: placements}), *others]
    found = league(name, {name: alone}, entries, bound_s, rate)
    return found.model_copy(update={"replica_groups": ctx.replica_groups})


def solve_alone(ctx: PoolContext, options: SearchOptions) -> tuple[float, Placements | None]:
    """The proven bound of a pool's step under its context, seconds, and what the ILP found."""
    study = PoolStudy(
        pool=ctx.pool,
        device=ctx.device,
        model=ctx.model,
        bridge=None,
        pools_in_job=1,
        interval_steps=1,
        options=SolverOptions(
            mip_gap=options.mip_gap, time_limit_s=options.time_limit_s, seed=options.seed
        ),
    )

    def program(spill: bool) -> PoolProgram | None:
        return study.program(ctx.local_batch, ctx.policy, spill)

    solution = solve_pool(program(False), study.options, lambda: program(True))
    if solution.program is None or solution.assignment is None:
        return solution.bound_s, None
    return solution.bound_s, placements_of(ctx, solution.program, solution.assignment)


def _with_recipe_weights(ctx: PoolContext, options: SearchOptions) -> Placed:
    """The ILP's placements of a pool alone, every table in the recipe's weight precision.

    Raises:
        InfeasibleError: none was found.
    """
    precision = ctx.model.precision
    recipe = precision.model_copy(update={"embeddings": precision.embeddings[:1]})
    model = ctx.model.model_copy(update={"precision": recipe})
    _, placements = solve_alone(replace(ctx, model=model), options)
    if placements is None:
        raise InfeasibleError("no placement was found without narrower weights")
    return Placed(placements)


def league(
    name: str,
    contexts: Mapping[str, PoolContext],
    entries: list[Entry],
    bound_s: float,
    rate: Rater | None = None,
) -> League:
    """Entries by their step in these contexts; the first is the plan.

    Args:
        rate: also rates the placements of a job of one pool.
    """
    planned, *others = entries
    reference_s = evaluate(contexts, planned.placements).step_s
    bound_s = min(bound_s, reference_s)
    first, *rest = (_standing(entry, contexts, reference_s, rate) for entry in (planned, *others))
    return League(
        name=name,
        ranks=sum(ctx.ranks for ctx in contexts.values()),
        samples=sum(ctx.pool_batch for ctx in contexts.values()),
        lower_bound_ms=bound_s * MS,
        gap=reference_s / bound_s - 1,
        standings=(first, *sorted(rest, key=_order)),
    )


def _order(standing: Standing) -> tuple[bool, float, str]:
    """Those that fit by their step, then those that do not, then those without placements."""
    step_ms = float("inf") if standing.step_ms is None else standing.step_ms
    return not standing.fits, step_ms, standing.planner


def _standing(
    entry: Entry, contexts: Mapping[str, PoolContext], reference_s: float, rate: Rater | None
) -> Standing:
    reasons = [entry.problems[pool] for pool in contexts if pool in entry.problems]
    if reasons:
        return Standing(
            planner=entry.planner,
            step_ms=None,
            ratio=None,
            tables_ms=None,
            slowest_rank=None,
            slowest_rank_bytes=None,
            fits=False,
            note="; ".join(reasons),
        )
    evaluation = evaluate(contexts, {pool: entry.placements[pool] for pool in contexts})
    slowest = max(evaluation.pools.values(), key=lambda pool: pool.predicted.step_ms)
    rank = slowest.predicted.slowest_rank
    other = None
    if rate is not None:
        (ctx,) = contexts.values()
        other = rate(ctx, evaluation.pools[ctx.pool.name])
    return Standing(
        planner=entry.planner,
        step_ms=evaluation.step_s * MS,
        ratio=evaluation.step_s / reference_s,
        tables_ms=max(_tables_s(ctx, entry.placements[pool]) for pool, ctx in contexts.items())
        * MS,
        slowest_rank=rank,
        slowest_rank_bytes=slowest.memory_bytes[rank]["total"],
        fits=not evaluation.overfull,
        note="; ".join(
            [*_lacking(evaluation), *(entry.notes[p] for p in contexts if p in entry.notes)]
        ),
        other=other,
    )


def _tables_s(ctx: PoolContext, placements: Placements) -> float:
    loads, _ = pool_loads(ctx, placements)
    return float(loads[:, TIMES].sum(axis=1).max())


def _lacking(evaluation: Evaluation) -> Iterator[str]:
    """The rank that lacks most memory, if any does."""
    if evaluation.overfull:
        pool, rank, which, excess = max(evaluation.overfull, key=lambda one: one[3])
        yield f"rank {rank} of pool {pool} lacks {excess / GIB:.1f} GiB of {which} memory"
