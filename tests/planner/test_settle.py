"""Ties between placements whose step is equally short are broken by the time spent on tables."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.assemble import contexts_of
from planner.baselines.enumerate import assignments
from planner.baselines.problem import placements_of
from planner.cost.load import COMPONENTS
from planner.cost.step import Operation, StepGraph
from planner.evaluate import evaluate, pool_loads
from planner.ilp.options import pool_program
from planner.ilp.program import PoolProgram
from planner.ilp.settle import rank_table_s, settle, table_s
from planner.ilp.solve import SolverOptions
from planner.search import SearchOptions, plan_job
from planner.settle import assignment_of, settle_job
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ComputeKernel, ModelSpec, ShardingType
from planner.specs.plan import Placement
from planner.specs.units import Dtype
from tests.planner.instances import programs

TIGHT = SolverOptions(mip_gap=1e-6, time_limit_s=30.0)


def test_table_time_is_a_sum_of_slowest_ranks() -> None:
    graph = StepGraph(
        (
            Operation("host", "host", seconds=9.0),
            Operation("look_up", "compute", seconds=1.0, loads=("lookup_forward_s",)),
            Operation("exchange", "communication", loads=("output_send_s", "output_receive_s")),
        )
    )
    loads = np.zeros((2, len(COMPONENTS)))
    loads[:, COMPONENTS.index("lookup_forward_s")] = 3.0, 2.0
    loads[:, COMPONENTS.index("output_send_s")] = 0.5, 1.0
    loads[:, COMPONENTS.index("output_receive_s")] = 0.75, 0.75
    assert table_s(graph, loads) == 3.0 + 1.0
    assert rank_table_s(graph, loads).tolist() == [3.75, 3.0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(programs(), st.integers(0, 2**32))
def test_never_longer_never_overfull_and_less_time_on_tables(
    program: PoolProgram, seed: int
) -> None:
    every = [a for a in assignments(program) if program.fits(program.rank_loads(a))]
    if not every:
        return
    start = random.Random(seed).choice(every)
    loads = program.rank_loads(start)
    limit_s = program.step_s(loads)
    before_s = table_s(program.graph, loads)
    steps = {a: program.step_s(program.rank_loads(a)) for a in every}
    best_s = min(
        table_s(program.graph, program.rank_loads(a))
        for a in every
        if steps[a] <= limit_s * (1 + 1e-9)
    )
    found = settle(program, start, TIGHT)
    if found is None:
        return
    usable, assignment = found
    after = usable.rank_loads(assignment)
    assert program.fits(after)
    assert program.step_s(after) <= limit_s * (1 + 1e-9)
    assert best_s * (1 - 1e-9) <= table_s(program.graph, after) < before_s


def test_a_job_decided_by_its_host_gets_balanced_tables(
    two_vendors: ClusterSpec, dlrm: ModelSpec
) -> None:
    """All tables but one on one rank, at a batch that the host decides: as slow, until settled."""
    plan = plan_job(two_vendors, dlrm, 12 * 512, SearchOptions(matched=True))
    contexts = contexts_of(plan)
    heap = {
        name: {
            table: Placement(
                sharding_type=ShardingType.TABLE_WISE,
                compute_kernel=ComputeKernel.FUSED,
                data_type=Dtype.FP32,
                ranks=(int(table == "cat_20"),),
            )
            for table in pool.placements
        }
        for name, pool in plan.pools.items()
    }
    before = evaluate(contexts, heap)
    settled, after = settle_job(contexts, heap, before, SolverOptions(mip_gap=0.01))
    assert after.step_s <= before.step_s * (1 + 1e-9)
    for name, ctx in contexts.items():
        program = pool_program(ctx, spill=False)
        heaped, _ = pool_loads(ctx, heap[name])
        balanced, _ = pool_loads(ctx, settled[name])
        assert program.fits(balanced)
        assert table_s(program.graph, balanced) < 0.5 * table_s(program.graph, heaped)


def test_placements_are_choices_and_back(two_vendors: ClusterSpec, dlrm: ModelSpec) -> None:
    plan = plan_job(two_vendors, dlrm, 12 * 8192, SearchOptions(matched=True, mip_gap=0.05))
    for name, ctx in contexts_of(plan).items():
        program = pool_program(ctx, spill=False)
        placements = plan.pools[name].placements
        choices = assignment_of(ctx, program, placements)
        assert choices is not None
        assert placements_of(ctx, program, choices) == placements
        loads, _ = pool_loads(ctx, placements)
        assert program.rank_loads(choices) == pytest.approx(loads, rel=1e-9)
        other = dict(placements)
        odd = other["cat_0"].model_copy(update={"column_widths": (64, 60, 4)})
        assert assignment_of(ctx, program, {**other, "cat_0": odd}) is None
    assert math.isfinite(plan.predicted.step_ms)
