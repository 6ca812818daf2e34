"""Which constraints bind a plan, and what relaxing each by a unit is worth at fixed placements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from planner.cost.context import PoolContext
from planner.evaluate import MS
from planner.explain.change import short_of
from planner.explain.job import Job, PoolState
from planner.explain.levers import without_pool
from planner.explain.resources import TENTH, scaled
from planner.specs.base import PositiveFloat, Spec
from planner.specs.cluster import PoolSpec
from planner.specs.model import ComputeKernel
from planner.specs.plan import Placement, Plan
from planner.specs.units import GIB, Dtype

WORTH = 1e-6
"""Share of the step below which a difference is none: such a constraint does not bind."""
TIGHT = 0.9
"""Share of a rank's memory from which on placements may have been chosen for their size."""
WIRE_AND_WEIGHTS = (Dtype.FP16, Dtype.BF16)
"""Precisions of weights and exchanges that a model may allow beside fp32."""
IN_HOST_MEMORY = (ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING)


class Limit(Spec):
    """A constraint of the cluster, the model or the search."""

    what: str
    now: str
    """Where the plan stands."""
    relaxed: str
    """By what it was relaxed; empty if it was not."""
    step_ms: PositiveFloat | None
    """Then; None: it was not priced."""
    saved_ms: float
    binds: bool
    """Whether relaxing it makes the step shorter."""
    note: str = ""


def limits(plan: Plan, job: Job) -> Iterator[Limit]:
    """All constraints, in the order of the cluster file, then the model's, then the search's."""
    for name in job.pools:
        yield _memory(job, name)
    for pool in plan.cluster.pools:
        if pool.min_nodes:
            yield _min_nodes(plan, job, pool)
    if any(state.ctx.copies_tables for state in job.pools.values()):
        yield _interval(plan, job)
    yield from _precisions(job)
    yield _gap(plan)


def _limit(what: str, now: str, relaxed: str, job: Job, after: Job, note: str = "") -> Limit:
    saved_s = job.step_s - after.step_s
    return Limit(
        what=what,
        now=now,
        relaxed=relaxed,
        step_ms=after.step_ms,
        saved_ms=saved_s * MS,
        binds=saved_s > WORTH * job.step_s,
        note=note,
    )


def _memory(job: Job, name: str) -> Limit:
    """Device memory of one pool: what it would save to save none of it.

    A step does not depend on memory, but on what is done to save it: recomputing, cutting the dense
    network, keeping rows in host memory.
    """
    state = job.pools[name]
    rank, used = max(
        enumerate(state.memory), key=lambda item: item[1]["total"] / item[1]["capacity"]
    )
    free = used["capacity"] - used["total"]
    now = (
        f"rank {rank}, the fullest, is {100 * used['total'] / used['capacity']:.0f} % full, "
        f"{free / GIB:.1f} GiB free"
    )
    what = f"memory of {name}"
    savers = list(_savers(state))
    if not savers:
        note = "nothing is done to save it"
        if used["total"] > TIGHT * used["capacity"]:
            note += ", but placements had to fit: hwplan explain --table says which moves lack room"
        else:
            note += ": more would change nothing"
        return Limit(
            what=what, now=now, relaxed="", step_ms=None, saved_ms=0.0, binds=False, note=note
        )
    roomy, undone = job, list[str]()
    for saver, without in savers:
        other = Job({**job.pools, name: without(roomy.pools[name])})
        if other.step_s < roomy.step_s:
            roomy, undone = other, [*undone, saver]
    if not undone:
        note = f"no shorter without {', '.join(saver for saver, _ in savers)}"
        return Limit(
            what=what, now=now, relaxed="", step_ms=None, saved_ms=0.0, binds=False, note=note
        )
    short = roomy.pools[name].shortage()
    note = short_of(roomy) if short else "it would fit"
    if short:
        larger = replace(roomy.pools[name], ctx=_with_more_memory(state, roomy.pools[name]))
        note += f"; {100 * TENTH:.0f} % more memory "
        note += "would do" if larger.shortage() is None else "would not do"
    return _limit(what, now, f"without {', '.join(undone)}", job, roomy, note)


def _savers(state: PoolState) -> Iterator[tuple[str, Callable[[PoolState], PoolState]]]:
    """What a pool does to save device memory, and how it would be without."""
    policy = state.ctx.policy
    if policy.recompute:
        yield "recompute", lambda one: _under_policy(one, {"recompute": ()})
    if policy.dense_parallelism != "data_parallel":
        whole = {"dense_parallelism": "data_parallel"}
        name = policy.dense_parallelism.replace("_", " ")
        yield name, lambda one: _under_policy(one, whole)
    spilled = sum(p.compute_kernel in IN_HOST_MEMORY for p in state.placements.values())
    if spilled:
        yield f"{spilled} table{'s' * (spilled > 1)} in host memory", _inside


def _under_policy(state: PoolState, update: Mapping[str, object]) -> PoolState:
    return state.under(_under(state.ctx, update))


def _inside(state: PoolState) -> PoolState:
    """Every table in device memory."""
    update = {"compute_kernel": ComputeKernel.FUSED, "cache_load_factor": None}
    placements = {
        table: placement.model_copy(update=update)
        if placement.compute_kernel in IN_HOST_MEMORY
        else placement
        for table, placement in state.placements.items()
    }
    return PoolState(state.ctx, placements)


def _with_more_memory(state: PoolState, roomy: PoolState) -> PoolContext:
    device = state.ctx.device
    more = scaled(device, {"memory.hbm_bytes": 1 + TENTH}, f"{device.name}, memory x {1 + TENTH}")
    return replace(roomy.ctx, device=more)


def _min_nodes(plan: Plan, job: Job, pool: PoolSpec) -> Limit:
    """Nodes that the cluster file insists on."""
    working = next((name for name in plan.pools if pool.name == name), None)
    nodes = plan.pools[working].nodes if working else pool.nodes
    what, now = f"min_nodes of {pool.name}", f"{pool.min_nodes} asked for, {nodes} work"
    after = None
    if working is not None and nodes == pool.min_nodes and len(job.pools) > 1:
        after = without_pool(plan, job, working)
    if after is None:
        return Limit(what=what, now=now, relaxed="", step_ms=None, saved_ms=0.0, binds=False)
    return _limit(what, now, f"{pool.name} left out", job, after, short_of(after))


def _interval(plan: Plan, job: Job) -> Limit:
    """Steps between exchanges of table copies: the staleness that the model allows."""
    interval = plan.exchange.embedding_interval_steps
    most = plan.model.max_exchange_interval_steps
    after = job.with_contexts(
        {
            name: replace(state.ctx, embedding_interval_steps=2 * interval)
            for name, state in job.pools.items()
        }
    )
    now = f"tables exchanged every {interval} step{'s' * (interval > 1)}, the model allows {most}"
    limit = _limit("exchange interval", now, f"{2 * interval} steps", job, after)
    if 2 * interval > most:
        return limit
    # The planner takes the shortest interval that costs next to nothing.
    return limit.model_copy(update={"binds": False, "note": "the model allows it"})


def _precisions(job: Job) -> Iterator[Limit]:
    """Precisions that the model does not allow: the one that would save most."""
    precision = next(iter(job.pools.values())).ctx.model.precision
    peaks = [set(s.ctx.device.compute.peak_flops_per_s) for s in job.pools.values()]
    others = [d for d in Dtype if any(d in p for p in peaks) and d not in precision.compute]
    yield _best_precision(
        "compute precision", "compute", precision.compute, job, [_computing(job, d) for d in others]
    )
    others = [d for d in WIRE_AND_WEIGHTS if d not in precision.communication]
    wire = [
        (
            d,
            job.with_contexts(
                {
                    name: _under(state.ctx, {"communication_precision": d})
                    for name, state in job.pools.items()
                }
            ),
        )
        for d in others
    ]
    yield _best_precision("wire precision", "communication", precision.communication, job, wire)
    # Both half precisions have the same bytes.
    others = [] if any(d in precision.embeddings for d in WIRE_AND_WEIGHTS) else [Dtype.FP16]
    stored = [(d, _storing(job, d)) for d in others]
    yield _best_precision("weight precision", "embeddings", precision.embeddings, job, stored)


def _under(ctx: PoolContext, update: Mapping[str, object]) -> PoolContext:
    return replace(ctx, policy=ctx.policy.model_copy(update=update))


def _computing(job: Job, dtype: Dtype) -> tuple[Dtype, Job]:
    """Every pool that has the precision computes in it, unless that takes it longer."""
    result = job
    for name, state in job.pools.items():
        if dtype in state.ctx.device.compute.peak_flops_per_s:
            other = result.with_contexts({name: _under(state.ctx, {"compute_precision": dtype})})
            result = min(result, other, key=lambda one: one.step_s)
    return dtype, result


def _storing(job: Job, dtype: Dtype) -> Job:
    placed: dict[str, dict[str, Placement]] = {
        name: {
            table: placement.model_copy(update={"data_type": dtype})
            for table, placement in state.placements.items()
        }
        for name, state in job.pools.items()
    }
    return job.with_placements(placed)


def _best_precision(
    what: str, field: str, allowed: tuple[Dtype, ...], job: Job, tried: list[tuple[Dtype, Job]]
) -> Limit:
    now = f"precision.{field} allows {', '.join(allowed)}"
    if not tried:
        return Limit(what=what, now=now, relaxed="", step_ms=None, saved_ms=0.0, binds=False)
    dtype, after = min(tried, key=lambda one: one[1].step_s)
    return _limit(what, now, f"{dtype} allowed", job, after, short_of(after))


def _gap(plan: Plan) -> Limit:
    """The search stops where no plan can be shorter by more than the gap asked for."""
    predicted, solver = plan.predicted, plan.solver
    possible_ms = predicted.step_ms - predicted.lower_bound_ms
    what = "search"
    if solver.status == "heuristic":
        now = f"no search was made; no plan is below {predicted.lower_bound_ms:.4g} ms"
    else:
        now = (
            f"ended {solver.status} {100 * predicted.gap:.2g} % above its bound, "
            f"{100 * solver.mip_gap:.2g} % asked for"
        )
    return Limit(
        what=what,
        now=now,
        relaxed="gap of 0",
        step_ms=predicted.lower_bound_ms,
        saved_ms=possible_ms,
        binds=possible_ms > WORTH * predicted.step_ms,
        note="at most" if possible_ms > WORTH * predicted.step_ms else "",
    )
