"""Lower bounds of a pool's step that cost milliseconds, and the options that can matter.

Three of them, each valid for every placement of the tables, and each nondecreasing in the local
batch (every duration of the step graph and every load is), so that the value at the smallest
batch of an interval holds for the whole interval:

* the step without any table (``dense_step_s``);
* the LP relaxation of the aggregate formulation without memory, over the options that are best
  when memory does not matter: an option that takes more time than another one in every component
  is never needed there;
* the same with memory, over all options.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost.load import COMPONENTS
from planner.ilp.formulation import aggregate
from planner.ilp.program import HBM, HOST, PoolProgram, undominated
from planner.ilp.solve import SolverOptions, run

SAFETY = 1 - 1e-9
"""Bounds are lowered by the solver's own tolerance."""


def hopeful(program: PoolProgram) -> list[list[int]]:
    """By class: the options no piece of which fills a rank by itself."""
    memory = [HBM, HOST]
    nothing = np.zeros(len(COMPONENTS))
    return [
        [
            o
            for o, option in enumerate(loads)
            if all(
                ((option.everywhere + load)[memory] <= program.room).all()
                for load in ([shard.load for shard in option.shards] or [nothing])
            )
        ]
        for loads in program.loads
    ]


def without_hopeless(program: PoolProgram) -> PoolProgram | None:
    """Drop options of which one piece alone fills a rank, and dominated ones.

    None if a class has no option left.
    """
    components = [*program.times.components, HBM, HOST]
    kept = []
    for loads, roomy in zip(program.loads, hopeful(program), strict=True):
        if not roomy:
            return None
        best = undominated([loads[o] for o in roomy], components)
        kept.append([roomy[o] for o in best])
    return program.keep(kept)


def lean(program: PoolProgram) -> PoolProgram:
    """Only options that are best when memory does not matter.

    A bound that ignores memory is the same for both programs.
    """
    components = program.times.components
    return program.keep([undominated(loads, components) for loads in program.loads])


def time_unit_s(program: PoolProgram) -> float:
    """A hundredth of the step without any table: about the size of what is to be decided."""
    return max(float(program.times.step_s(np.zeros(len(COMPONENTS)))) / 100, 1e-7)


@dataclass(frozen=True)
class Relaxation:
    """Optimum of the LP relaxation."""

    step_s: float
    """A lower bound, seconds; infinite if the tables do not fit even when cut at will."""
    fits: bool
    """Whether the relaxed tables fit into the ranks' memory together."""


def dense_step_s(program: PoolProgram) -> float:
    """The step if tables cost nothing."""
    return float(program.times.step_s(np.zeros(len(COMPONENTS))))


def relax(
    program: PoolProgram, memory: bool, seed: int = 0, until: str | None = None
) -> Relaxation:
    """LP relaxation of the aggregate formulation.

    Args:
        until: bound the end of this operation instead of the step.
    """
    form = aggregate(program, time_unit_s(program), memory, counting=False, until=until)
    outcome = run(form.problem, SolverOptions(mip_gap=0.0, seed=seed), relaxed=True)
    if outcome.status == "infeasible":
        return Relaxation(float("inf"), False)
    if not outcome.found:
        return Relaxation(0.0, False)
    mean = sum(
        (
            option.mean * variable.value()
            for loads, row in zip(program.loads, form.x, strict=True)
            for option, variable in zip(loads, row, strict=True)
        ),
        np.zeros(len(COMPONENTS)),
    )
    fits = bool((mean[[HBM, HOST]] <= program.room).all())
    return Relaxation(outcome.bound * form.unit_s * SAFETY, fits)


def relaxed_step_s(program: PoolProgram, seed: int = 0) -> float:
    """The best of the bounds above; infinite if the tables cannot fit."""
    usable = without_hopeless(program)
    if usable is None:
        return float("inf")
    roomy = relax(lean(usable), memory=False, seed=seed)
    return roomy.step_s if roomy.fits else relax(usable, memory=True, seed=seed).step_s
