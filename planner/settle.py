"""Break the ties of a plan: no longer a step, and less time on tables (``planner.ilp.settle``)."""

from __future__ import annotations

from collections.abc import Mapping

from planner.baselines.problem import placements_of
from planner.cost.context import PoolContext
from planner.cost.graph import pool_step_graph
from planner.cost.load import COMPONENTS, Scope
from planner.cost.step import EXCHANGE_PREFIX, joint_schedule
from planner.evaluate import Evaluation, evaluate, landings, placement_of, pool_loads
from planner.ilp.options import UVM_KERNELS, pool_program
from planner.ilp.program import Assignment, Choice, PoolProgram, TableClass
from planner.ilp.settle import SAME, settle
from planner.ilp.solve import SolverOptions
from planner.specs.plan import Placement

Placements = Mapping[str, Placement]


def settle_job(
    contexts: Mapping[str, PoolContext],
    placements: Mapping[str, Placements],
    evaluation: Evaluation,
    options: SolverOptions,
) -> tuple[dict[str, Placements], Evaluation]:
    """Placements of all pools and their evaluation; those given where nothing better is found.

    Pools are settled one after another. Exchanges begin when the last pool reaches them, so the
    job's step is checked after each.
    """
    best, best_evaluation = dict(placements), evaluation
    for name, ctx in contexts.items():
        starts_s = _exchange_starts_s(contexts, best)
        settled = _settled(ctx, best[name], starts_s, options)
        if settled is None:
            continue
        tried = {**best, name: settled}
        tried_evaluation = evaluate(contexts, tried)
        if tried_evaluation.step_s <= evaluation.step_s * (1 + SAME):
            best, best_evaluation = tried, tried_evaluation
    return best, best_evaluation


def _settled(
    ctx: PoolContext, placements: Placements, starts_s: Mapping[str, float], options: SolverOptions
) -> Placements | None:
    """Better placements of one pool, if any were found."""
    spill = any(placement.compute_kernel in UVM_KERNELS for placement in placements.values())
    program = pool_program(ctx, spill).waiting(starts_s)
    assignment = assignment_of(ctx, program, placements)
    found = None if assignment is None else settle(program, assignment, options)
    return None if found is None else placements_of(ctx, *found)


def assignment_of(
    ctx: PoolContext, program: PoolProgram, placements: Placements
) -> Assignment | None:
    """Placements as choices among a program's options; None if one is not among them."""
    result = []
    for group in program.classes:
        positions = {_words(option): o for o, option in enumerate(_as_placements(ctx, group))}
        row = []
        for table in group.tables:
            option = positions.get(_words(placements[table]))
            if option is None:
                return None
            row.append(Choice(option, _places(ctx, group, option, placements[table])))
        result.append(tuple(row))
    return tuple(result)


def _as_placements(ctx: PoolContext, group: TableClass) -> list[Placement]:
    """Each option of a class with all pieces on the first place."""
    return [
        placement_of(ctx, group, Choice(o, (0,) * len(option.pieces)))
        for o, option in enumerate(group.options)
    ]


def _words(placement: Placement) -> tuple[object, ...]:
    """What tells a placement's option apart from others of its table."""
    return tuple(placement.model_dump(exclude={"ranks"}).values())


def _places(
    ctx: PoolContext, group: TableClass, option: int, placement: Placement
) -> tuple[int, ...]:
    per_node = ctx.sharding_group.pool.devices_per_node
    first = {Scope.RANK: 1, Scope.NODE: per_node}
    return tuple(
        0 if piece.scope is Scope.POOL else ranks[0] // first[piece.scope]
        for piece, ranks in zip(group.options[option].pieces, landings(ctx, placement), strict=True)
    )


def _exchange_starts_s(
    contexts: Mapping[str, PoolContext], placements: Mapping[str, Placements]
) -> dict[str, float]:
    """When the last pool reaches each operation on the bridge."""
    slowest = {
        name: dict(zip(COMPONENTS, pool_loads(ctx, placements[name])[0].max(axis=0), strict=True))
        for name, ctx in contexts.items()
    }
    graphs = {name: pool_step_graph(ctx) for name, ctx in contexts.items()}
    spans = next(iter(joint_schedule(graphs, slowest).values()))
    return {n: span.start_s for n, span in spans.items() if n.startswith(EXCHANGE_PREFIX)}
