"""Small random placement programs, made by hand: no cost model."""

from __future__ import annotations

from hypothesis import strategies as st

from planner.cost.load import Piece, PlacementOption, RankLoad, Scope
from planner.cost.step import Operation, StepGraph
from planner.ilp.program import PoolProgram, TableClass
from planner.specs.model import ComputeKernel, ShardingType
from planner.specs.units import Dtype

SHARDING = {
    Scope.RANK: ShardingType.COLUMN_WISE,
    Scope.NODE: ShardingType.TABLE_ROW_WISE,
    Scope.POOL: ShardingType.ROW_WISE,
}


def step_graph(dense_s: float = 2e-3, bridge_s: float | None = None) -> StepGraph:
    """A step with the shape of the real one: lookups, exchanges, dense work, overlap."""
    operations = [
        Operation("input_exchange", "communication", loads=("input_send_s", "input_receive_s")),
        Operation("embedding_forward", "compute", loads=("lookup_forward_s",), seconds=1e-4),
        Operation("bottom_forward", "compute", seconds=dense_s / 4),
        Operation(
            "output_exchange",
            "communication",
            after=("embedding_forward",),
            loads=("output_send_s", "output_receive_s"),
        ),
        Operation(
            "top", "compute", after=("bottom_forward", "output_exchange"), seconds=dense_s / 2
        ),
        Operation(
            "gradient_exchange",
            "communication",
            after=("top",),
            loads=("gradient_send_s", "gradient_receive_s"),
        ),
        Operation("bottom_backward", "compute", after=("top",), seconds=dense_s / 4),
        Operation(
            "embedding_backward",
            "compute",
            after=("gradient_exchange",),
            loads=("lookup_backward_s",),
        ),
        Operation("all_reduce", "communication", after=("top",), loads=("table_all_reduce_s",)),
    ]
    tail: tuple[str, ...] = ("embedding_backward", "all_reduce")
    if bridge_s is not None:
        operations.append(Operation("bridge:dense", "bridge", ("bottom_backward",), bridge_s))
        operations.append(
            Operation("bridge:embedding", "bridge", ("embedding_backward",), bridge_s / 2)
        )
        tail = (*tail, "bridge:dense")
    operations.append(Operation("dense_optimizer", "compute", tail, dense_s / 10))
    return StepGraph(tuple(operations))


def micros(value: int) -> float:
    return value * 1e-6


@st.composite
def rank_loads(draw: st.DrawFn, memory: bool = True) -> RankLoad:
    times = st.integers(0, 900).map(micros)
    return RankLoad(
        lookup_forward_s=draw(times),
        lookup_backward_s=draw(times),
        input_send_s=draw(times),
        output_send_s=draw(times),
        gradient_receive_s=draw(times),
        hbm_bytes=float(draw(st.integers(0, 40))) if memory else 0.0,
    )


@st.composite
def placement_options(draw: st.DrawFn, nodes: int) -> PlacementOption:
    scopes = [Scope.RANK, Scope.RANK, Scope.POOL] + ([Scope.NODE] if nodes > 1 else [])
    scope = draw(st.sampled_from(scopes))
    count = draw(st.integers(1, 2)) if scope is Scope.RANK else 1
    piece = Piece(
        scope,
        columns=8,
        owner=draw(rank_loads()),
        everyone=RankLoad(output_receive_s=micros(draw(st.integers(0, 200)))),
    )
    other = piece if draw(st.booleans()) else Piece(scope, 4, owner=draw(rank_loads()))
    return PlacementOption(SHARDING[scope], ComputeKernel.FUSED, Dtype.FP32, (piece, other)[:count])


@st.composite
def programs(draw: st.DrawFn) -> PoolProgram:
    """At most a few thousand assignments."""
    nodes = draw(st.integers(1, 2))
    devices_per_node = draw(st.integers(1, 3 if nodes == 1 else 2))
    classes = []
    for index in range(draw(st.integers(1, 3 if nodes * devices_per_node < 4 else 2))):
        count = draw(st.sampled_from([1, 1, 2])) if index == 0 else 1
        options = draw(st.lists(placement_options(nodes), min_size=1, max_size=2))
        classes.append(TableClass(tuple(f"t{index}_{i}" for i in range(count)), tuple(options)))
    return PoolProgram(
        graph=step_graph(),
        nodes=nodes,
        devices_per_node=devices_per_node,
        classes=tuple(classes),
        hbm_room_bytes=float(draw(st.sampled_from([30, 60, 90, 1000]))),
        host_room_bytes=1.0,
    )
