"""Score placements: the same code for the planner's own plans and for every baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.cost.context import PoolContext
from planner.cost.embedding import option_pieces
from planner.cost.graph import pool_step_graph
from planner.cost.load import COMPONENTS, Piece, Scope
from planner.cost.memory import base_memory_bytes, shard_memory_bytes
from planner.cost.step import Span, StepGraph, joint_schedule
from planner.ilp.program import HOST, Choice, Floats, StepTimes, TableClass, vector
from planner.specs.model import ShardingType, Table
from planner.specs.plan import Placement, PoolPlan, PoolPrediction

MS = 1e3


@dataclass(frozen=True)
class Evaluation:
    """Predicted plans of the working pools, and the step of the job."""

    pools: dict[str, PoolPlan]
    step_s: float

    @property
    def overfull(self) -> list[tuple[str, int, str, int]]:
        """(pool, rank, "device" or "host", bytes too many) of every rank that has no room."""
        found = []
        for name, pool in self.pools.items():
            for rank, memory in enumerate(pool.memory_bytes):
                if memory["total"] > memory["capacity"]:
                    found.append((name, rank, "device", memory["total"] - memory["capacity"]))
                if memory["host"] > memory["host_capacity"]:
                    found.append((name, rank, "host", memory["host"] - memory["host_capacity"]))
        return found


def placement_of(ctx: PoolContext, group: TableClass, choice: Choice) -> Placement:
    """The plan's words for an ILP choice; ranks count inside a replica group."""
    option = group.options[choice.option]
    island = ctx.sharding_group
    per_node = island.pool.devices_per_node
    ranks: list[int] = []
    for piece, place in zip(option.pieces, choice.places, strict=True):
        if piece.scope is Scope.POOL:
            ranks += range(island.ranks)
        elif piece.scope is Scope.NODE:
            ranks += range(place * per_node, (place + 1) * per_node)
        else:
            ranks.append(place)
    split = option.sharding_type in (ShardingType.COLUMN_WISE, ShardingType.GRID_SHARD)
    return Placement(
        sharding_type=option.sharding_type,
        compute_kernel=option.compute_kernel,
        data_type=option.data_type,
        ranks=tuple(ranks),
        column_widths=tuple(piece.columns for piece in option.pieces) if split else (),
        cache_load_factor=option.cache_load_factor,
    )


def landings(ctx: PoolContext, placement: Placement) -> list[tuple[int, ...]]:
    """Ranks of each piece of a placement, inside a replica group."""
    if placement.sharding_type in (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE):
        return [(rank,) for rank in placement.ranks]
    if placement.sharding_type is ShardingType.GRID_SHARD:
        size = ctx.sharding_group.pool.devices_per_node
        return [
            placement.ranks[start : start + size] for start in range(0, len(placement.ranks), size)
        ]
    return [placement.ranks]


def pool_loads(
    ctx: PoolContext, placements: Mapping[str, Placement]
) -> tuple[Floats, list[dict[str, int]]]:
    """Rank loads of one replica group, shape [ranks, C], and the memory of each rank of the pool
    by category, bytes."""
    island = ctx.sharding_group
    loads = np.zeros((island.ranks, len(COMPONENTS)))
    base = base_memory_bytes(ctx)
    memory = [dict(base) for _ in range(island.ranks)]
    known_pieces: dict[object, tuple[Piece, ...]] = {}
    known_bytes: dict[object, dict[str, int]] = {}
    for table in ctx.model.all_tables:
        placement = placements[table.name]
        way = placement.model_dump(exclude={"ranks"})
        key = (_shape(table), *way.values())
        if key not in known_pieces:
            known_pieces[key] = option_pieces(
                island,
                table,
                placement.sharding_type,
                placement.compute_kernel,
                placement.data_type,
                placement.column_widths,
                placement.cache_load_factor,
            )
        for piece, ranks in zip(known_pieces[key], landings(ctx, placement), strict=True):
            loads += vector(piece.everyone)
            loads[list(ranks)] += vector(piece.owner)
            if (key, piece.columns) not in known_bytes:
                known_bytes[key, piece.columns] = shard_memory_bytes(
                    island,
                    table,
                    placement.sharding_type,
                    placement.compute_kernel,
                    placement.data_type,
                    piece.columns,
                    placement.cache_load_factor,
                )
            for rank in ranks:
                for category, size in known_bytes[key, piece.columns].items():
                    memory[rank][category] = memory[rank].get(category, 0) + size
    for rank, categories in enumerate(memory):
        categories["total"] = sum(categories.values())
        categories["capacity"] = ctx.hbm_capacity_bytes
        categories["host"] = int(loads[rank, HOST])
        categories["host_capacity"] = 0 if ctx.device.is_cpu else ctx.host_capacity_bytes
    return loads, [dict(one) for _ in range(ctx.replica_groups) for one in memory]


def _shape(table: Table) -> tuple[object, ...]:
    """What the costs of a table depend on, its way of placement apart."""
    return (
        table.num_embeddings,
        table.embedding_dim,
        table.pooling_factors,
        table.zipf_exponent,
    )


def evaluate(
    contexts: Mapping[str, PoolContext], placements: Mapping[str, Mapping[str, Placement]]
) -> Evaluation:
    """Predict a job: every pool's step under its context and placements, and the joint step.

    Args:
        contexts: by pool, in the order of the cluster file.
        placements: by pool and table.
    """
    graphs: dict[str, StepGraph] = {}
    loads: dict[str, Floats] = {}
    memory: dict[str, list[dict[str, int]]] = {}
    for name, ctx in contexts.items():
        graphs[name] = pool_step_graph(ctx)
        loads[name], memory[name] = pool_loads(ctx, placements[name])
    slowest = {
        name: dict(zip(COMPONENTS, (float(v) for v in rows.max(axis=0)), strict=True))
        for name, rows in loads.items()
    }
    schedules = joint_schedule(graphs, slowest)
    pools = {
        name: PoolPlan(
            device=ctx.pool.device,
            nodes=ctx.pool.nodes,
            devices_per_node=ctx.pool.devices_per_node,
            ranks=ctx.ranks,
            local_batch=ctx.local_batch,
            replica_groups=ctx.replica_groups,
            policy=ctx.policy,
            placements=dict(placements[name]),
            memory_bytes=tuple(memory[name]),
            predicted=_prediction(graphs[name], schedules[name], loads[name]),
        )
        for name, ctx in contexts.items()
    }
    step_s = max(span.end_s for spans in schedules.values() for span in spans.values())
    return Evaluation(pools, step_s)


def _prediction(graph: StepGraph, spans: Mapping[str, Span], loads: Floats) -> PoolPrediction:
    times = StepTimes(graph, {})
    weights = times.sensitivity(loads.max(axis=0)) + 1e-6
    time_loads = loads[:, times.components] @ weights[times.components]
    return PoolPrediction(
        step_ms=max(span.end_s for span in spans.values()) * MS,
        breakdown_ms={name: (span.end_s - span.start_s) * MS for name, span in spans.items()},
        critical_path=graph.critical_path(spans),
        slowest_rank=int(time_loads.argmax()) if len(times.components) else 0,
    )
