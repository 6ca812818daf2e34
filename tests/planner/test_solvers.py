"""What the solvers really proved: status, solution status and bound."""

from __future__ import annotations

import random
import subprocess
import sys

import pulp
import pytest

from planner.ilp.solve import SolverOptions, run

SOLVERS = ("highs", "cbc")


def covers(items: int = 60, rows: int = 12) -> pulp.LpProblem:
    """A multi-dimensional covering problem that takes a solver much longer than a blink."""
    chance = random.Random(7)
    problem = pulp.LpProblem("covers", pulp.LpMinimize)
    taken = [problem.add_variable(f"x{i}", 0, 1, pulp.LpInteger) for i in range(items)]
    problem += pulp.lpSum(chance.randint(500, 999) * x for x in taken)
    for _ in range(rows):
        problem += pulp.lpSum(chance.randint(300, 999) * x for x in taken) >= 300 * items
    return problem


@pytest.mark.parametrize("solver", SOLVERS)
def test_time_out_is_not_called_optimal_and_its_bound_is_read(solver: str) -> None:
    options = SolverOptions(mip_gap=0.0, time_limit_s=0.4, solver=solver)  # type: ignore[arg-type]
    outcome = run(covers(), options)
    assert outcome.status == "feasible"
    assert outcome.objective is not None
    assert 0 < outcome.bound < outcome.objective


@pytest.mark.parametrize("solver", SOLVERS)
def test_infeasible(solver: str) -> None:
    problem = pulp.LpProblem("none", pulp.LpMinimize)
    x = problem.add_variable("x", 0, 1, pulp.LpInteger)
    problem += x
    problem += 2 * x == 1
    outcome = run(problem, SolverOptions(solver=solver))  # type: ignore[arg-type]
    assert outcome.status == "infeasible"
    assert not outcome.found


@pytest.mark.parametrize("solver", SOLVERS)
def test_gap_is_honoured_and_bound_is_valid(solver: str) -> None:
    problem = covers(items=14, rows=3)
    best = run(problem, SolverOptions(mip_gap=0.0, solver=solver)).objective  # type: ignore[arg-type]
    loose = run(problem, SolverOptions(mip_gap=0.2, solver=solver))  # type: ignore[arg-type]
    assert best is not None and loose.objective is not None
    assert loose.bound <= best * (1 + 1e-9)
    assert loose.objective <= loose.bound * 1.2 * (1 + 1e-9)


def test_solving_writes_nothing_to_standard_output() -> None:
    code = (
        "import pulp\n"
        "from planner.ilp.solve import SolverOptions, run\n"
        "p = pulp.LpProblem('p', pulp.LpMinimize)\n"
        "x = p.add_variable('x', 1, 3, pulp.LpInteger)\n"
        "p += x\n"
        "assert run(p, SolverOptions()).objective == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b""
