"""Exhaustive oracle for small instances: every option, every place, every batch split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from planner.cost.load import COMPONENTS, PlacementOption, Scope
from planner.cost.step import joint_schedule
from planner.ilp.program import Assignment, Choice, PoolProgram


def table_choices(program: PoolProgram, option: PlacementOption) -> Iterator[tuple[int, ...]]:
    """Every way to place the pieces of an option."""
    places = {Scope.POOL: 1, Scope.NODE: program.nodes, Scope.RANK: program.ranks}
    return product(*(range(places[piece.scope]) for piece in option.pieces))


def assignments(program: PoolProgram) -> Iterator[Assignment]:
    """Every assignment, fitting or not. Exponential: for a handful of tables and ranks."""
    per_table = [
        [
            Choice(o, places)
            for o, option in enumerate(group.options)
            for places in table_choices(program, option)
        ]
        for group in program.classes
        for _ in group.tables
    ]
    sizes = [len(group.tables) for group in program.classes]
    for flat in product(*per_table):
        rest = iter(flat)
        yield tuple(tuple(next(rest) for _ in range(size)) for size in sizes)


def best_step_s(program: PoolProgram) -> float:
    """The shortest step of a pool by enumeration; infinite if nothing fits."""
    best = float("inf")
    for assignment in assignments(program):
        loads = program.rank_loads(assignment)
        if program.fits(loads):
            best = min(best, program.step_s(loads))
    return best


def best_joint_step_s(
    splits: Iterable[Mapping[str, int]], programs: Callable[[str, int], Sequence[PoolProgram]]
) -> float:
    """The shortest step of a job over all splits and all pools' assignments.

    Args:
        splits: local batch by pool.
        programs: a pool's placement programs (one per policy) at a local batch.
    """
    best = float("inf")
    for split in splits:
        reachable = [
            [
                (program.graph, dict(zip(COMPONENTS, slowest, strict=True)))
                for program in programs(pool, batch)
                for slowest in _slowest_loads(program)
            ]
            for pool, batch in split.items()
        ]
        for combination in product(*reachable):
            named = dict(zip(split, combination, strict=True))
            schedules = joint_schedule(
                {pool: graph for pool, (graph, _) in named.items()},
                {pool: slowest for pool, (_, slowest) in named.items()},
            )
            ends = (span.end_s for spans in schedules.values() for span in spans.values())
            best = min(best, max(ends))
    return best


def _slowest_loads(program: PoolProgram) -> list[tuple[float, ...]]:
    """Distinct slowest-rank loads that fitting assignments reach, the dominated ones dropped."""
    distinct = {
        tuple(loads.max(axis=0))
        for loads in map(program.rank_loads, assignments(program))
        if program.fits(loads)
    }
    rows = [np.array(row)[program.times.components] for row in sorted(distinct)]
    ordered = sorted(distinct)
    return [
        ordered[i]
        for i, row in enumerate(rows)
        if not any(
            (other <= row).all() and ((other < row).any() or j < i)
            for j, other in enumerate(rows)
            if j != i
        )
    ]
