"""A plan's pools as the cost model sees them, joined at the bridge, and what changes would do.

The operations of all pools form one graph: a bridge operation of any pool comes after what it comes
after in every pool (``planner.cost.step.joint_schedule`` says the same pool by pool). Ends are
max-plus linear in the slowest ranks' loads, so many placements of one table are tried at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner.assemble import contexts_of
from planner.cost.context import PoolContext
from planner.cost.graph import pool_step_graph
from planner.cost.load import COMPONENTS
from planner.cost.memory import base_memory_bytes
from planner.cost.step import EXCHANGE_PREFIX, Operation, StepGraph
from planner.evaluate import MS, pool_loads
from planner.ilp.program import Floats
from planner.specs.plan import Placement, Plan
from planner.specs.units import Dtype


@dataclass(frozen=True)
class JointOperation:
    """An operation of one pool, and the positions of all that it waits for, own pool first."""

    pool: str
    operation: Operation
    before: tuple[int, ...]

    def duration_s(self, slowest: Floats) -> Floats:
        """Seconds. ``slowest``: load components on their slowest ranks, [..., C]; result: [...]."""
        loads = [slowest[..., COMPONENTS.index(name)] for name in self.operation.loads]
        longest = np.maximum.reduce(loads) if loads else np.zeros(slowest.shape[:-1])
        return np.asarray(longest + self.operation.seconds)


def joint_operations(graphs: Mapping[str, StepGraph]) -> tuple[JointOperation, ...]:
    """The operations of all pools, each after everything that it waits for."""
    position: dict[tuple[str, str], int] = {}
    found: list[JointOperation] = []
    before = {pool: graph.predecessors() for pool, graph in graphs.items()}
    left = {pool: list(graph.operations) for pool, graph in graphs.items()}

    def add(pool: str, others: tuple[str, ...] = ()) -> None:
        operation = left[pool].pop(0)
        waits = [
            position[one, name] for one in (pool, *others) for name in before[one][operation.name]
        ]
        position[pool, operation.name] = len(found)
        found.append(JointOperation(pool, operation, tuple(waits)))

    while any(left.values()):
        for pool, operations in left.items():
            while operations and not operations[0].name.startswith(EXCHANGE_PREFIX):
                add(pool)
        for pool, operations in left.items():
            if operations:
                add(pool, tuple(other for other in left if other != pool))
    return tuple(found)


@dataclass(frozen=True)
class PoolState:
    """One working pool with its placements, priced once."""

    ctx: PoolContext
    placements: Mapping[str, Placement]

    @cached_property
    def graph(self) -> StepGraph:
        return pool_step_graph(self.ctx)

    @cached_property
    def _priced(self) -> tuple[Floats, list[dict[str, int]]]:
        return pool_loads(self.ctx, self.placements)

    @property
    def loads(self) -> Floats:
        """Rank loads of one replica group; [ranks of a group, C]."""
        return self._priced[0]

    @property
    def memory(self) -> list[dict[str, int]]:
        """By rank of the pool: bytes by category."""
        return self._priced[1]

    @cached_property
    def slowest(self) -> Floats:
        """Each load component on its slowest rank; [C]."""
        return np.asarray(self.loads.max(axis=0))

    @cached_property
    def table_seconds(self) -> Floats:
        """What tables cost each rank if it never waited for another: of every operation the
        largest of its loads there, summed; [ranks of a group]."""
        return table_seconds(self.graph, self.loads)

    def under(self, ctx: PoolContext) -> PoolState:
        """The same placements under another context; tables are priced again if they see it."""
        other = replace(self, ctx=ctx)
        if _tables_see(ctx) == _tables_see(self.ctx):
            before, after = base_memory_bytes(self.ctx), base_memory_bytes(ctx)
            grown = sum(after.values()) - sum(before.values())
            memory = [{**one, **after, "total": one["total"] + grown} for one in self.memory]
            other.__dict__["_priced"] = self.loads, memory
        return other

    def shortage(self) -> tuple[int, str, int] | None:
        """(rank, "device" or "host", bytes too many) where most is missing; None if all fits."""
        missing = [
            (memory[used] - memory[room], rank, what)
            for rank, memory in enumerate(self.memory)
            for what, used, room in (
                ("device", "total", "capacity"),
                ("host", "host", "host_capacity"),
            )
        ]
        excess, rank, what = max(missing, key=lambda one: (one[0], -one[1]))
        return (rank, what, excess) if excess > 0 else None


def _tables_see(ctx: PoolContext) -> PoolContext:
    """A context without what the costs of tables do not depend on."""
    update = {"compute_precision": Dtype.FP32, "recompute": (), "kernels": "vendor"}
    plain = {**update, "dense_parallelism": "data_parallel"}
    return replace(ctx, policy=ctx.policy.model_copy(update=plain))


def table_seconds(graph: StepGraph, loads: Floats) -> Floats:
    """Of every operation the largest of its loads, summed. ``loads``: [..., C]; result: [...]."""
    total = np.zeros(loads.shape[:-1])
    for operation in graph.operations:
        if operation.loads:
            total = total + np.maximum.reduce(
                [loads[..., COMPONENTS.index(name)] for name in operation.loads]
            )
    return total


@dataclass(frozen=True)
class Job:
    """The working pools of a plan, by name in its order."""

    pools: Mapping[str, PoolState]

    @cached_property
    def operations(self) -> tuple[JointOperation, ...]:
        return joint_operations({name: state.graph for name, state in self.pools.items()})

    def ends_s(self, pool: str = "", slowest: Floats | None = None) -> list[Floats]:
        """End of every operation, seconds.

        Args:
            pool: the pool whose ``slowest`` loads to try, [..., C], instead of its own.
        """
        loads = {name: state.slowest for name, state in self.pools.items()}
        if slowest is not None:
            loads[pool] = slowest
        ends: list[Floats] = []
        for one in self.operations:
            start: Floats = np.zeros(())
            for index in one.before:
                start = np.maximum(start, ends[index])
            ends.append(start + one.duration_s(loads[one.pool]))
        return ends

    def steps_s(self, pool: str, slowest: Floats) -> Floats:
        """The job's step for other loads of one pool. ``slowest``: [..., C]; result: [...]."""
        return np.asarray(np.maximum.reduce(np.broadcast_arrays(*self.ends_s(pool, slowest))))

    @cached_property
    def step_s(self) -> float:
        """The job's step; equals ``planner.evaluate.evaluate``'s."""
        return float(max(self.ends_s()))

    @property
    def step_ms(self) -> float:
        return self.step_s * MS

    @property
    def devices_s(self) -> float:
        """When the last operation but the hosts' launches ends: they may take longer."""
        ends = zip(self.operations, self.ends_s(), strict=True)
        return max(float(end) for one, end in ends if one.operation.stream != "host")

    @cached_property
    def critical_path(self) -> tuple[tuple[JointOperation, float], ...]:
        """The operations that make up the step, first to last, and their seconds."""
        ends = [float(end) for end in self.ends_s()]
        current = ends.index(max(ends))
        path = [current]
        while self.operations[current].before:
            current = max(self.operations[current].before, key=lambda index: ends[index])
            path.append(current)
        operations = [self.operations[index] for index in reversed(path)]
        return tuple((one, self.duration_s(one)) for one in operations)

    def duration_s(self, one: JointOperation) -> float:
        return float(one.duration_s(self.pools[one.pool].slowest))

    def shortage(self) -> tuple[str, int, str, int] | None:
        """(pool, rank, "device" or "host", bytes) where most is missing; None if all fits."""
        found = [
            (name, *short)
            for name, state in self.pools.items()
            if (short := state.shortage()) is not None
        ]
        return max(found, key=lambda one: one[3]) if found else None

    def with_contexts(self, contexts: Mapping[str, PoolContext]) -> Job:
        """The same placements under other contexts, of some pools."""
        changed = {name: self.pools[name].under(ctx) for name, ctx in contexts.items()}
        return Job({**self.pools, **changed})

    def with_placements(self, placements: Mapping[str, Mapping[str, Placement]]) -> Job:
        """Other placements, of some pools, under the same contexts."""
        changed = {name: replace(self.pools[name], placements=p) for name, p in placements.items()}
        return Job({**self.pools, **changed})


def job_of(plan: Plan) -> Job:
    """A plan under the device profiles of now."""
    return Job(
        {
            name: PoolState(ctx, plan.pools[name].placements)
            for name, ctx in contexts_of(plan).items()
        }
    )
