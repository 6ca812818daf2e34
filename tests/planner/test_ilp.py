from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.baselines.enumerate import best_step_s
from planner.cost.load import COMPONENTS
from planner.ilp.bounds import relaxed_step_s, time_unit_s
from planner.ilp.formulation import aggregate, exact
from planner.ilp.pool import solve_pool
from planner.ilp.program import PoolProgram
from planner.ilp.solve import SolverOptions, run
from tests.planner.instances import programs

EXACT = SolverOptions(mip_gap=0.0, time_limit_s=30.0)
many = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
few = settings(max_examples=40, deadline=None, derandomize=True)


@many
@given(programs())
def test_solution_equals_enumeration(program: PoolProgram) -> None:
    best = best_step_s(program)
    solution = solve_pool(program, EXACT)
    if math.isinf(best):
        assert solution.status == "infeasible"
        return
    assert solution.program is not None and solution.assignment is not None
    loads = solution.program.rank_loads(solution.assignment)
    assert program.fits(loads)
    assert program.step_s(loads) == pytest.approx(solution.step_s)
    assert solution.step_s == pytest.approx(best, rel=1e-6)
    assert solution.bound_s <= best * (1 + 1e-6)
    assert relaxed_step_s(program) <= best * (1 + 1e-6)


@few
@given(programs(), st.sampled_from(["highs", "cbc"]))
def test_exact_formulation_alone_equals_enumeration(program: PoolProgram, solver: str) -> None:
    best = best_step_s(program)
    form = exact(program, time_unit_s(program))
    outcome = run(form.problem, SolverOptions(0.0, 30.0, solver=solver))  # type: ignore[arg-type]
    if math.isinf(best):
        assert outcome.status == "infeasible"
        return
    assert outcome.status == "optimal"
    assert outcome.objective is not None
    assert outcome.objective * form.unit_s == pytest.approx(best, rel=1e-6)
    assert program.step_s(program.rank_loads(form.assignment())) == pytest.approx(best, rel=1e-6)


@few
@given(programs())
def test_aggregate_is_a_lower_bound(program: PoolProgram) -> None:
    best = best_step_s(program)
    form = aggregate(program, time_unit_s(program))
    outcome = run(form.problem, EXACT)
    assert outcome.bound * form.unit_s <= best * (1 + 1e-6)


@few
@given(programs(), st.lists(st.integers(0, 3000), min_size=9, max_size=9))
def test_compiled_times_equal_the_step_graph(program: PoolProgram, loads: list[int]) -> None:
    slowest = {name: load * 1e-6 for name, load in zip(COMPONENTS[:9], loads, strict=True)}
    row = [slowest.get(name, 0.0) for name in COMPONENTS]
    assert float(program.times.step_s(np.array(row))) == pytest.approx(
        program.graph.step_s(slowest)
    )
