"""Run a PuLP problem on HiGHS (CBC where HiGHS is missing) and read what was really proven.

PuLP's own status is not enough: it calls a CBC run that hit its time limit "Optimal", so the
solution status and the solver's bound are read for every solver.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pulp

if TYPE_CHECKING:
    import highspy

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True)
class SolverOptions:
    """Limits of one solver run; one thread and a fixed seed make it repeatable."""

    mip_gap: float = 0.01
    time_limit_s: float = 60.0
    seed: int = 0
    max_nodes: int = 20_000
    """Branch-and-bound nodes: a limit that is the same on every machine, unlike seconds."""
    solver: Literal["highs", "cbc"] | None = None
    """None: HiGHS, or CBC where HiGHS is not installed."""

    @property
    def name(self) -> str:
        """The solver that runs."""
        return self.solver or ("highs" if pulp.HiGHS().available() else "cbc")


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``bound`` is proven; ``objective`` is None without a solution."""

    status: Status
    """``optimal``: within the gap asked for; ``feasible``: a limit was hit first; ``unknown``: a
    limit was hit before any solution was found."""
    objective: float | None
    bound: float

    @property
    def found(self) -> bool:
        """Whether the problem's variables hold a solution."""
        return self.objective is not None


def run(problem: pulp.LpProblem, options: SolverOptions, relaxed: bool = False) -> Outcome:
    """Solve a minimisation whose objective has no constant term.

    The values are left in the problem's variables.

    Args:
        relaxed: drop integrality.
    """
    if options.name == "highs":
        return _run_highs(problem, options, relaxed)
    return _run_cbc(problem, options, relaxed)


@lru_cache(maxsize=1)
def _quiet_highs() -> None:
    """Make the first HiGHS object of the process, which writes a banner to standard output.

    No option turns the banner off, and standard output belongs to ``--json``.
    """
    import highspy

    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()  # type: ignore[no-untyped-call]
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def new_highs(seed: int) -> highspy.Highs:
    """A silent HiGHS object on one thread, to be filled directly: what is solved again and again
    with few changes keeps its basis.

    Raises:
        ImportError: highspy is not installed.
    """
    import highspy

    _quiet_highs()
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("random_seed", seed)
    return highs


def _run_highs(problem: pulp.LpProblem, options: SolverOptions, relaxed: bool) -> Outcome:
    import highspy

    _quiet_highs()
    solver = pulp.HiGHS(
        mip=not relaxed,
        msg=False,
        gapRel=options.mip_gap,
        gapAbs=0.0,
        threads=1,
        timeLimit=max(options.time_limit_s, 0.01),
        random_seed=options.seed,
        mip_max_nodes=options.max_nodes,
        mip_feasibility_tolerance=1e-9,
        primal_feasibility_tolerance=1e-9,
    )
    solver.createAndConfigureSolver(problem)
    solver.buildSolverModel(problem)
    # Not PuLP's solve(): it knows only some of HiGHS's states, and none of its bounds.
    highs = problem.solverModel
    highs.run()
    state, info = highs.getModelStatus(), highs.getInfo()
    if state in (
        highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,
    ):
        return Outcome("infeasible", None, float("inf"))
    done = state == highspy.HighsModelStatus.kOptimal
    is_mip = not relaxed and problem.isMIP()
    bound = info.mip_dual_bound if is_mip else info.objective_function_value
    if not done and not is_mip:
        return Outcome("unknown", None, 0.0)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return Outcome("unknown", None, max(bound, 0.0))
    values = highs.getSolution().col_value
    for variable in problem.variables():
        variable.varValue = values[variable.index]
    return Outcome(
        "optimal" if done else "feasible", float(info.objective_function_value), float(bound)
    )


def _run_cbc(problem: pulp.LpProblem, options: SolverOptions, relaxed: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "cbc.log"
        solver = pulp.COIN_CMD(
            path=pulp.PULP_CBC_CMD.pulp_cbc_path,
            mip=not relaxed,
            msg=False,
            gapRel=options.mip_gap,
            gapAbs=0.0,
            threads=1,
            timeLimit=max(options.time_limit_s, 0.01),
            maxNodes=options.max_nodes,
            options=[f"randomSeed {options.seed}", f"randomCbcSeed {options.seed}"],
            logPath=str(log),
        )
        solver.tmpDir = folder
        problem.solve(solver)
        text = log.read_text(encoding="utf-8", errors="replace")
    if pulp.LpStatusInfeasible == problem.status:
        return Outcome("infeasible", None, float("inf"))
    stated = re.search(r"Lower bound:\s*([-+.\deE]+)", text)
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Outcome("unknown", None, float(stated[1]) if stated else 0.0)
    objective = float(pulp.value(problem.objective))
    if problem.sol_status == pulp.LpSolutionIntegerFeasible:
        return Outcome("feasible", objective, float(stated[1]) if stated else 0.0)
    # CBC states a bound only when it stopped early; "optimal" means within the gap asked for.
    bound = objective if relaxed else objective / (1 + options.mip_gap)
    return Outcome("optimal", objective, bound)
