"""Why a table sits where it does in each pool, and what moving it would cost."""

from __future__ import annotations

from difflib import get_close_matches

from planner.cost.load import COMPONENTS
from planner.evaluate import MS
from planner.explain.job import job_of, table_seconds
from planner.explain.limits import WORTH
from planner.explain.moves import Bench, Move
from planner.explain.words import placed, told
from planner.ilp.program import HBM, HOST, TIMES
from planner.specs.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, Spec
from planner.specs.errors import UsageError
from planner.specs.model import Table
from planner.specs.plan import Placement, Plan

NEAREST = 3
"""Names shown for one that is unknown."""


class TableCost(Spec):
    """What a table puts on the rank of a pool that it costs most."""

    rank: NonNegativeInt
    """Inside a replica group."""
    lookup_forward_ms: NonNegativeFloat
    lookup_backward_ms: NonNegativeFloat
    cache_fetch_ms: NonNegativeFloat
    """Rows fetched ahead from host memory."""
    ids_sent_ms: NonNegativeFloat
    ids_received_ms: NonNegativeFloat
    rows_sent_ms: NonNegativeFloat
    rows_received_ms: NonNegativeFloat
    gradients_sent_ms: NonNegativeFloat
    gradients_received_ms: NonNegativeFloat
    all_reduce_ms: NonNegativeFloat
    hbm_bytes: NonNegativeInt
    host_bytes: NonNegativeInt


class TableInPool(Spec):
    """A table in one pool."""

    placement: Placement
    replica_groups: int
    weight_bytes: NonNegativeInt
    """Of one copy, in its precision there."""
    cost: TableCost
    slowest_rank: NonNegativeInt
    """With the most work for tables, inside a replica group."""
    share_of_slowest: NonNegativeFloat
    """The table's share of that rank's work for tables."""
    step_without_ms: PositiveFloat
    """The job's step if the table cost nothing in this pool."""
    moves: tuple[Move, ...]
    improves: bool
    """Whether a single move would shorten the step by more than the gap asked for."""
    verdict: str


class TableExplanation(Spec):
    """A table in all working pools, all other tables fixed."""

    table: str
    num_embeddings: int
    embedding_dim: int
    pooling: NonNegativeFloat
    zipf_exponent: NonNegativeFloat
    step_ms: PositiveFloat
    gap: NonNegativeFloat
    """The gap asked for when the plan was made."""
    pools: dict[str, TableInPool]


def explain_table(plan: Plan, name: str) -> TableExplanation:
    """Explain where a table sits.

    Raises:
        UsageError: the model has no such table, or a device profile of the plan is gone.
    """
    table = find_table(plan, name)
    job = job_of(plan)
    return TableExplanation(
        table=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        pooling=table.pooling,
        zipf_exponent=table.zipf_exponent,
        step_ms=job.step_ms,
        gap=plan.solver.mip_gap,
        pools={pool: _in_pool(plan, Bench(job, pool, table)) for pool in job.pools},
    )


def find_table(plan: Plan, name: str) -> Table:
    """The plan's table of that name.

    Raises:
        UsageError: there is none; names those that are nearest.
    """
    tables = {table.name: table for table in plan.model.all_tables}
    if name in tables:
        return tables[name]
    nearest = get_close_matches(name, tables, NEAREST, cutoff=0.4) or list(tables)[:NEAREST]
    more = len(tables) - len(nearest)
    raise UsageError(
        f"model {plan.model.name} has no such table",
        field="--table",
        value=name,
        fix=f"use {' or '.join(nearest)}" + (f" (there are {more} more)" if more > 0 else ""),
    )


def _in_pool(plan: Plan, bench: Bench) -> TableInPool:
    state = bench.state
    moves = tuple(bench.moves())
    slowest = int(state.table_seconds.argmax())
    whole = float(state.loads[slowest, TIMES].sum())
    gap = plan.solver.mip_gap
    best = next((move for move in moves if move.fits), None)
    return TableInPool(
        placement=bench.placement,
        replica_groups=state.ctx.replica_groups,
        weight_bytes=bench.table.parameters * bench.placement.data_type.bytes,
        cost=_cost(bench),
        slowest_rank=slowest,
        share_of_slowest=float(bench.own[slowest, TIMES].sum()) / whole if whole else 0.0,
        step_without_ms=bench.without_s * MS,
        moves=moves,
        improves=best is not None and -best.delta_ms > gap * bench.job.step_ms,
        verdict=verdict(bench, moves, gap),
    )


def _cost(bench: Bench) -> TableCost:
    rank = int(table_seconds(bench.state.graph, bench.own).argmax())
    own = bench.own[rank]

    def ms(component: str) -> float:
        return float(own[COMPONENTS.index(component)]) * MS

    return TableCost(
        rank=rank,
        lookup_forward_ms=ms("lookup_forward_s"),
        lookup_backward_ms=ms("lookup_backward_s"),
        cache_fetch_ms=ms("cache_fetch_s"),
        ids_sent_ms=ms("input_send_s"),
        ids_received_ms=ms("input_receive_s"),
        rows_sent_ms=ms("output_send_s"),
        rows_received_ms=ms("output_receive_s"),
        gradients_sent_ms=ms("gradient_send_s"),
        gradients_received_ms=ms("gradient_receive_s"),
        all_reduce_ms=ms("table_all_reduce_s"),
        hbm_bytes=round(float(own[HBM])),
        host_bytes=round(float(own[HOST])),
    )


def verdict(bench: Bench, moves: tuple[Move, ...], gap: float) -> str:
    """Why the table stays where it is, or that it had better not."""
    step_ms = bench.job.step_ms
    least_ms = WORTH * step_ms
    best = next((move for move in moves if move.fits), None)
    if best is not None and best.delta_ms < -least_ms:
        saved = f"{placed(best.placement)} would shorten the step by {-best.delta_ms:.3g} ms"
        if -best.delta_ms > gap * step_ms:
            return f"{saved}, more than the gap asked for: this plan can be improved"
        return f"{saved}, less than the gap asked for ({100 * gap:.2g} %)"
    blocked = min(
        (move for move in moves if not move.fits), key=lambda move: move.delta_ms, default=None
    )
    if blocked is not None and blocked.delta_ms < -least_ms:
        return (
            f"{placed(blocked.placement)} would shorten the step by {-blocked.delta_ms:.3g} ms, "
            f"but {blocked.short_of}"
        )
    if best is None:
        return "no other placement fits" if moves else "there is no other way to place it"
    if bench.without_s * MS > step_ms - least_ms:
        faster = best.tables_delta_ms < -WORTH * step_ms
        return (
            f"the step is decided by {_decider(bench)}; the best other placement "
            f"({placed(best.placement)}) leaves it as it is"
            + (f" up to {best.delta_ms:+.3g} ms" if best.delta_ms > least_ms else "")
            + f", tables' time {best.tables_delta_ms:+.3g} ms"
            + (", which is hidden" if faster else "")
        )
    if best.delta_ms <= least_ms:
        return f"no other placement shortens the step; {placed(best.placement)} is as good"
    return (
        f"no other placement shortens the step; the next best ({placed(best.placement)}) "
        f"lengthens it by {best.delta_ms:.3g} ms"
    )


def _decider(bench: Bench) -> str:
    """What decides a step that this table has no part in."""
    one, seconds = max(bench.job.critical_path, key=lambda item: item[1])
    if one.pool == bench.pool and one.operation.loads:
        return (
            f"other tables: {told(one.operation.name)} of the slowest rank ({seconds * MS:.3g} ms)"
        )
    return f"{told(one.operation.name)} of {one.pool} ({seconds * MS:.3g} ms of it)"
