"""What each lever of a plan is worth: switched to what a plain port would do, the rest as planned.

The plain values are the naive port's (``planner.baselines.naive``): equal batches, a greedy
planner's placement, the recipe's precisions, the vendor's kernels, one copy of the tables a pool.
Placements stay where they are unless they are the lever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.baselines.greedy import conventional, torchrec_greedy
from planner.baselines.naive import naive_policy
from planner.baselines.problem import PoolProblem, placements_of, recipe_type
from planner.cost.context import PoolContext
from planner.explain.change import Change, changed, unchanged
from planner.explain.job import Job
from planner.explain.samples import in_one_group, on_more_nodes, shared_out
from planner.ilp.options import Way, pool_program, table_classes
from planner.specs.cluster import JOIN
from planner.specs.errors import InfeasibleError
from planner.specs.model import Table
from planner.specs.plan import Placement, Plan
from planner.splits import equal_split

POLICY_LEVERS = {
    "compute_precision": "compute precision",
    "communication_precision": "wire precision",
    "recompute": "recompute",
    "dense_parallelism": "dense parallelism",
    "prefetch_depth": "prefetch",
    "kernels": "kernels",
}
"""Fields of a memory policy, and their levers."""


def levers(plan: Plan, job: Job, *, placement: bool = True) -> Iterator[Change]:
    """Every lever on its own.

    Args:
        placement: the greedy placement too, which takes longest.
    """
    yield _split(plan, job)
    if placement:
        yield _placement(job)
    yield _weights(job)
    for field, name in POLICY_LEVERS.items():
        yield _policy(job, field, name)
    yield _groups(job)
    yield from _devices(plan, job)


def _each(values: Mapping[str, object]) -> str:
    """A value per pool, or one for all where they are equal."""
    words = {pool: _words(value) for pool, value in values.items()}
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{pool} {word}" for pool, word in words.items())


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("_", " ")


def _split(plan: Plan, job: Job) -> Change:
    planned = {name: state.ctx.local_batch for name, state in job.pools.items()}
    ranks = {name: state.ctx.ranks for name, state in job.pools.items()}
    equal = equal_split(ranks, plan.global_batch)
    if equal is None or equal == planned:
        return unchanged("batch split", _each(planned), job)
    contexts = {n: replace(s.ctx, local_batch=equal[n]) for n, s in job.pools.items()}
    return changed("batch split", _each(planned), _each(equal), job, job.with_contexts(contexts))


def _placement(job: Job) -> Change:
    planned = "as planned"
    placed = {}
    for name, state in job.pools.items():
        try:
            problem = _conventional_problem(state.ctx.sharding_group)
            assignment = torchrec_greedy(problem)
        except InfeasibleError:
            return unchanged("placement", f"{planned}; a greedy planner finds no room", job)
        placed[name] = placements_of(problem.ctx, problem.program, assignment)
    return changed("placement", planned, "greedy planner's", job, job.with_placements(placed))


def _conventional_problem(ctx: PoolContext) -> PoolProblem:
    """The tables of a pool with the options alone that the greedy planner looks at."""

    def keep(table: Table, way: Way) -> bool:
        return way.data_type == recipe_type(ctx.model, table) and conventional(
            table, way.sharding_type, way.column_widths, way.cache_load_factor
        )

    return PoolProblem(ctx, pool_program(ctx, True, table_classes(ctx, True, keep)))


def _weights(job: Job) -> Change:
    """Table weights in the recipe's precision."""
    recipe: dict[str, dict[str, Placement]] = {}
    for name, state in job.pools.items():
        recipe[name] = {
            table.name: state.placements[table.name].model_copy(
                update={"data_type": recipe_type(state.ctx.model, table)}
            )
            for table in state.ctx.model.all_tables
        }
    planned = {name: _dtypes(state.placements) for name, state in job.pools.items()}
    if all(recipe[name] == dict(state.placements) for name, state in job.pools.items()):
        return unchanged("weight precision", _each(planned), job)
    instead = _each({name: _dtypes(placements) for name, placements in recipe.items()})
    after = job.with_placements(recipe)
    return changed("weight precision", _each(planned), instead, job, after)


def _dtypes(placements: Mapping[str, Placement]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(placement.data_type) for placement in placements.values()))


def _policy(job: Job, field: str, name: str) -> Change:
    """One field of the policies as the naive port has it."""
    planned: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    contexts = {}
    for pool, state in job.pools.items():
        naive = getattr(naive_policy(state.ctx.device, state.ctx.model), field)
        planned[pool], plain[pool] = getattr(state.ctx.policy, field), naive
        if planned[pool] != naive:
            policy = state.ctx.policy.model_copy(update={field: naive})
            contexts[pool] = replace(state.ctx, policy=policy)
    if not contexts:
        return unchanged(name, _each(planned), job)
    return changed(name, _each(planned), _each(plain), job, job.with_contexts(contexts))


def _groups(job: Job) -> Change:
    planned = {name: state.ctx.replica_groups for name, state in job.pools.items()}
    contexts = {n: s.ctx for n, s in job.pools.items() if planned[n] > 1}
    if not contexts:
        return unchanged("replica groups", _each(planned), job)
    alone = {name: replace(ctx, replica_groups=1) for name, ctx in contexts.items()}
    placed = {name: in_one_group(ctx, job.pools[name].placements) for name, ctx in contexts.items()}
    after = job.with_contexts(alone).with_placements(placed)
    return changed("replica groups", _each(planned), "1", job, after)


def _devices(plan: Plan, job: Job) -> Iterator[Change]:
    """Nodes of working pools that rest, put to work; and each pool taken out."""
    for name, state in job.pools.items():
        idle = plan.cluster.pool(name).nodes - state.ctx.pool.nodes
        after = _with_all_nodes(plan, job, name) if idle else None
        if after is not None:
            nodes = plan.cluster.pool(name).nodes
            planned, instead = f"{state.ctx.pool.nodes} of {nodes} nodes", f"all {nodes} nodes"
            yield _or_searched(
                plan, changed(f"devices of {name} left out", planned, instead, job, after), after
            )
    if len(job.pools) > 1:
        for name in job.pools:
            after = without_pool(plan, job, name)
            if after is not None:
                yield changed(f"pool {name}", "works", "left out", job, after)


def _or_searched(plan: Plan, change: Change, after: Job) -> Change:
    """The change as the search priced it, with placements of its own, if that is shorter."""
    batches = {name: state.ctx.local_batch for name, state in after.pools.items()}
    for row in plan.considered:
        if row.local_batch == batches and row.step_ms and row.step_ms < change.step_ms:
            delta_ms = row.step_ms - change.step_ms + change.delta_ms
            update = {"step_ms": row.step_ms, "delta_ms": delta_ms, "fits": True, "short_of": ""}
            return change.model_copy(update=update)
    return change


def _with_all_nodes(plan: Plan, job: Job, grown: str) -> Job | None:
    """All nodes of a pool at work; None if the batch cannot be split so, or groups not be cut."""
    whole = plan.cluster.pool(grown)
    ctx = replace(job.pools[grown].ctx, pool=whole)
    if whole.nodes % ctx.replica_groups and ctx.replica_groups > 1:
        return None
    ranks = {n: s.ctx.ranks for n, s in job.pools.items()} | {grown: whole.devices}
    split = shared_out(
        plan.global_batch, ranks, {n: s.ctx.local_batch for n, s in job.pools.items()}
    )
    if split is None:
        return None
    contexts = {n: replace(s.ctx, local_batch=split[n]) for n, s in job.pools.items()}
    contexts[grown] = replace(ctx, local_batch=split[grown])
    placed = on_more_nodes(ctx, job.pools[grown].placements)
    return job.with_contexts(contexts).with_placements({grown: placed})


def without_pool(plan: Plan, job: Job, left_out: str) -> Job | None:
    """A pool's samples given to the others; None if they cannot be split so."""
    rest = {name: state for name, state in job.pools.items() if name != left_out}
    ranks = {name: state.ctx.ranks for name, state in rest.items()}
    split = shared_out(plan.global_batch, ranks, {n: s.ctx.local_batch for n, s in rest.items()})
    if split is None:
        return None
    several = any(state.ctx.replica_groups > 1 for state in rest.values()) or len(rest) > 1
    return Job(rest).with_contexts(
        {
            name: replace(
                state.ctx,
                local_batch=split[name],
                pools_in_job=len(rest),
                embedding_interval_steps=state.ctx.embedding_interval_steps if several else 1,
            )
            for name, state in rest.items()
        }
    )


def idle_pools(plan: Plan) -> tuple[str, ...]:
    """Pools of the cluster file that have no part in the plan."""
    working = {part for name in plan.pools for part in name.split(JOIN)}
    return tuple(pool.name for pool in plan.cluster.pools if pool.name not in working)
