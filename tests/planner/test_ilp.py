from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.baselines.enumerate import assignments, best_step_s
from planner.cost.load import COMPONENTS, Scope
from planner.ilp.balance import balance
from planner.ilp.bounds import relaxed_step_s, time_unit_s
from planner.ilp.formulation import aggregate, exact
from planner.ilp.nodes import by_node, dealt, nodes_of_pieces, tells_apart
from planner.ilp.pool import solve_pool
from planner.ilp.program import PoolProgram
from planner.ilp.rounding import round_to_ranks
from planner.ilp.solve import SolverOptions, run
from planner.ilp.strata import heavies, stratified
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


@settings(many, max_examples=120)
@given(programs(), st.sampled_from([0.9, 1.0, 1.05, 1.5]), st.booleans())
def test_stratified_is_a_lower_bound(program: PoolProgram, share: float, memory: bool) -> None:
    best = best_step_s(program)
    unit_s = time_unit_s(program)
    form = aggregate(program, unit_s, memory)
    if math.isinf(best) or not run(form.problem, EXACT).found:
        return
    below_s = best * share
    for heavy in heavies(program, form):
        tighter = stratified(program, unit_s, memory, heavy, below_s, EXACT)
        outcome = None if tighter is None else run(tighter.problem, EXACT)
        bound_s = below_s if outcome is None else min(below_s, outcome.bound * unit_s)
        assert bound_s <= best * (1 + 1e-6)


@settings(many, max_examples=120)
@given(programs(), st.booleans(), st.sampled_from([1.0, 1.2, math.inf]))
def test_nodes_told_apart_bound_more_tightly_and_pieces_land_on_their_node(
    program: PoolProgram, memory: bool, slack: float
) -> None:
    best, unit_s = best_step_s(program), time_unit_s(program)
    if math.isinf(best) or not tells_apart(program):
        return
    form = by_node(program, unit_s, memory, below_s=best * slack)
    outcome = run(form.problem, EXACT)
    looser = run(aggregate(program, unit_s, memory).problem, EXACT)
    assert looser.bound <= outcome.bound * (1 + 1e-6)
    assert outcome.bound * unit_s <= best * (1 + 1e-6)
    ranked = dealt(form)
    if ranked is not None and run(ranked.problem, EXACT).found:
        loads = ranked.program.rank_loads(ranked.assignment())
        assert program.fits(loads)
        assert program.step_s(loads) >= outcome.bound * unit_s * (1 - 1e-6)
    nodes = nodes_of_pieces(form)
    rounded = round_to_ranks(program, form.counts(), nodes)
    if rounded is None:
        return
    landed: dict[tuple[int, int, int], list[int]] = {key: [] for key in nodes}
    for g, row in enumerate(rounded):
        for choice in row:
            for k, shard in enumerate(program.loads[g][choice.option].shards):
                whole = shard.scope is Scope.NODE
                for piece in shard.pieces:
                    place = choice.places[piece]
                    node = place if whole else place // program.devices_per_node
                    landed[g, choice.option, k].append(node)
    assert {key: sorted(at) for key, at in landed.items()} == nodes


@few
@given(programs(), st.integers(0, 2**32))
def test_balance_never_lengthens_the_step_nor_overfills_a_rank(
    program: PoolProgram, seed: int
) -> None:
    chance = random.Random(seed)
    every = [a for a in assignments(program) if program.fits(program.rank_loads(a))]
    if not every:
        return
    start = chance.choice(every)
    got = balance(program, start, 0.0, math.inf)
    loads = program.rank_loads(got)
    assert program.fits(loads)
    assert program.step_s(loads) <= program.step_s(program.rank_loads(start)) * (1 + 1e-9)
    assert [len(row) for row in got] == [len(group.tables) for group in program.classes]
