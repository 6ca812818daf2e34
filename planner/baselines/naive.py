"""The naive port: a plan made for the reference device, applied unchanged to every pool.

* Every rank gets the same local batch (``planner.splits.equal_split`` where B does not divide).
* The recipe's own precisions (the first of each list), no recompute, in every pool. A device that
  lacks the recipe's compute precision falls back to fp32, as frameworks do.
* Placements come from a conventional greedy planner that knows the reference device's costs, with
  capacities cut to the smallest device of the cluster. Pools of different sizes need a placement
  each; the greedy makes it with the same costs.
* The exchange interval obeys the same staleness limit as the planned job's.

The greedy follows TorchRec's published description: several proposals (each table's option with
the cheapest slowest shard; with the cheapest sum over shards; one sharding type for all), options
rated by the sum of all times; shards placed in descending order on the rank with the least
accumulated time that has room; when something finds no room, the table that takes most memory
moves on to its next cheapest option; the best rated proposal wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.assemble import assemble, freshest, with_batch
from planner.cost.context import PoolContext
from planner.cost.load import Scope
from planner.cost.memory import base_memory_bytes
from planner.cost.step import StepGraph
from planner.crew import Crew
from planner.evaluate import Evaluation, evaluate, placement_of
from planner.ilp.options import COLUMN_SPLIT, Way, table_classes
from planner.ilp.program import HBM, TIMES, Assignment, Choice, Floats, OptionLoads, PoolProgram
from planner.ilp.solve import SolverOptions
from planner.infeasible import unreachable_batch
from planner.specs.cluster import ClusterSpec
from planner.specs.device import DeviceProfile
from planner.specs.errors import InfeasibleError
from planner.specs.load import load_device
from planner.specs.model import ModelSpec, ShardingType, Table
from planner.specs.plan import MemoryPolicy, Placement, Plan, SolverReport
from planner.specs.units import GIB, Dtype
from planner.splits import SplitSpace, equal_split
from planner.study import PoolStudy

MIN_PARTITION = 128
"""TorchRec splits no columns below this width unless it is told to."""
CACHE_LOAD_FACTOR = 0.2
"""TorchRec's default share of cached rows."""


@dataclass(frozen=True)
class NaiveChoice:
    """The port's contexts, placements and their evaluation, by pool."""

    contexts: dict[str, PoolContext]
    placements: dict[str, dict[str, Placement]]
    evaluation: Evaluation


def naive_policy(device: DeviceProfile, model: ModelSpec) -> MemoryPolicy:
    """The recipe's policy on a device."""
    recipe = model.precision.compute[0]
    return MemoryPolicy(
        compute_precision=recipe if recipe in device.compute.peak_flops_per_s else Dtype.FP32,
        communication_precision=model.precision.communication[0],
    )


def naive_choice(cluster: ClusterSpec, model: ModelSpec) -> NaiveChoice:
    """What the naive port does at the model's global batch.

    Raises:
        InfeasibleError: the batch cannot be split, or the port does not fit.
    """
    split = equal_split({pool.name: pool.devices for pool in cluster.pools}, model.global_batch)
    if split is None:
        raise unreachable_batch(cluster, model.global_batch, matched=True)
    several = len(cluster.pools) > 1
    contexts = {
        pool.name: PoolContext(
            pool=pool,
            device=(device := load_device(pool.device)),
            model=model,
            local_batch=split[pool.name],
            policy=naive_policy(device, model),
            bridge=cluster.bridge,
            pools_in_job=len(cluster.pools),
            embedding_interval_steps=model.max_exchange_interval_steps if several else 1,
        )
        for pool in cluster.pools
    }
    hbm_room = min(
        ctx.hbm_capacity_bytes - sum(base_memory_bytes(ctx).values()) for ctx in contexts.values()
    )
    on_cpu = any(ctx.device.is_cpu for ctx in contexts.values())
    host_room = 0 if on_cpu else min(ctx.host_capacity_bytes for ctx in contexts.values())
    reference = load_device(cluster.reference_device)
    placements = {
        name: _greedy_placements(
            _as_on(reference, ctx), float(hbm_room), float(host_room), spill=not on_cpu
        )
        for name, ctx in contexts.items()
    }
    contexts, evaluation = freshest(contexts, placements, evaluate(contexts, placements))
    if evaluation.overfull:
        name, rank, which, excess = evaluation.overfull[0]
        raise InfeasibleError(
            f"the naive port does not fit: rank {rank} of pool {name} lacks {excess:,} bytes of "
            f"{which} memory",
            fix="use a smaller global batch or a larger pool for the comparison",
        )
    return NaiveChoice(contexts, placements, evaluation)


def _as_on(reference: DeviceProfile, ctx: PoolContext) -> PoolContext:
    """The same pool if it had the reference device."""
    return PoolContext(
        pool=ctx.pool,
        device=reference,
        model=ctx.model,
        local_batch=ctx.local_batch,
        policy=naive_policy(reference, ctx.model),
        bridge=ctx.bridge,
        pools_in_job=ctx.pools_in_job,
        embedding_interval_steps=ctx.embedding_interval_steps,
    )


def _conventional(table: Table, way: Way) -> bool:
    """The default search space of a conventional planner."""
    limits = table.constraints
    split = way.sharding_type in COLUMN_SPLIT
    if way.sharding_type is ShardingType.GRID_SHARD and (
        limits.sharding_types is None or ShardingType.GRID_SHARD not in limits.sharding_types
    ):
        return False
    if split and limits.min_partition is None and min(way.column_widths) < MIN_PARTITION:
        return False
    return way.cache_load_factor in (None, CACHE_LOAD_FACTOR)


def _greedy_placements(
    ctx: PoolContext, hbm_room: float, host_room: float, spill: bool
) -> dict[str, Placement]:
    recipe = ctx.model.precision.embeddings[0]

    def keep(table: Table, way: Way) -> bool:
        constrained = table.constraints.data_types
        wanted = recipe if constrained is None or recipe in constrained else constrained[0]
        return way.data_type == wanted and _conventional(table, way)

    program = PoolProgram(
        graph=StepGraph(()),
        nodes=ctx.pool.nodes,
        devices_per_node=ctx.pool.devices_per_node,
        classes=table_classes(ctx, spill, keep),
        hbm_room_bytes=hbm_room,
        host_room_bytes=host_room,
    )
    assignment = greedy(program)
    if assignment is None:
        raise InfeasibleError(
            f"the naive port does not fit: a greedy plan for {ctx.device.name} finds no room for "
            f"the tables in pool {ctx.pool.name} with {hbm_room / GIB:.1f} GiB per rank",
            fix="use a larger pool, or fewer or smaller tables, for the comparison",
        )
    by_name = {
        table: placement_of(ctx, group, choice)
        for group, row in zip(program.classes, assignment, strict=True)
        for table, choice in zip(group.tables, row, strict=True)
    }
    return {table.name: by_name[table.name] for table in ctx.model.all_tables}


def greedy(program: PoolProgram) -> Assignment | None:
    """The best rated of all proposals; None if none finds room."""
    best: tuple[float, Assignment] | None = None
    for order in _proposals(program):
        found = _partition_with_retries(program, order)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return best[1] if best else None


def _slowest_s(option: OptionLoads) -> float:
    pieces = [float(shard.load[TIMES].sum()) for shard in option.shards]
    return float(option.everywhere[TIMES].sum()) + max(pieces, default=0.0)


def _total_s(option: OptionLoads) -> float:
    return float(option.mean[TIMES].sum())


def _proposals(program: PoolProgram) -> Iterator[list[list[int]]]:
    """Per class, options in the order in which they are tried."""
    for rate in (_slowest_s, _total_s):
        yield [_ascending(loads, rate) for loads in program.loads]
    for sharding_type in ShardingType:
        uniform = [
            [
                o
                for o in _ascending(loads, _slowest_s)
                if group.options[o].sharding_type is sharding_type
            ]
            for group, loads in zip(program.classes, program.loads, strict=True)
        ]
        if all(uniform):
            yield uniform


def _ascending(loads: Sequence[OptionLoads], rate: Callable[[OptionLoads], float]) -> list[int]:
    """Positions of options by ascending rate."""
    rates = [rate(option) for option in loads]
    return sorted(range(len(loads)), key=rates.__getitem__)


def _partition_with_retries(
    program: PoolProgram, order: Sequence[Sequence[int]]
) -> tuple[float, Assignment] | None:
    """Partition; while there is no room, the largest table moves on to its next option."""
    position = [0] * len(order)
    while True:
        chosen = [row[at] for row, at in zip(order, position, strict=True)]
        found = _partition(program, chosen)
        if found is not None:
            return found
        movable = [g for g, row in enumerate(order) if position[g] + 1 < len(row)]
        if not movable:
            return None
        largest = max(
            movable,
            key=lambda g: (program.loads[g][chosen[g]].mean[HBM], -g),
        )
        position[largest] += 1


def _partition(program: PoolProgram, chosen: Sequence[int]) -> tuple[float, Assignment] | None:
    """Shards in descending order of time, each to the rank with least time that has room.

    Returns the rating (the largest sum of times of any rank) and the places.
    """
    everywhere = sum(
        (
            program.loads[g][o].everywhere * len(program.classes[g].tables)
            for g, o in enumerate(chosen)
        ),
        np.zeros_like(program.loads[0][0].everywhere),
    )
    ranks = np.tile(everywhere, (program.ranks, 1))
    if not program.fits(ranks):
        return None
    places = [
        [[0] * len(group.options[o].pieces) for _ in group.tables]
        for group, o in zip(program.classes, chosen, strict=True)
    ]
    shards = sorted(
        (
            (-float(shard.load[TIMES].sum()), g, t, piece, shard.scope, shard.load)
            for g, o in enumerate(chosen)
            for shard in program.loads[g][o].shards
            for t in range(len(program.classes[g].tables))
            for piece in shard.pieces
        ),
        key=lambda item: item[:4],
    )
    for _, g, t, piece, scope, load in shards:
        place = _least_loaded(program, ranks, scope, load)
        if place is None:
            return None
        ranks[program.landing(scope, place)] += load
        places[g][t][piece] = place
    assignment = tuple(
        tuple(Choice(o, tuple(one)) for one in rows) for o, rows in zip(chosen, places, strict=True)
    )
    return float(ranks[:, TIMES].sum(axis=1).max()), assignment


def _least_loaded(program: PoolProgram, ranks: Floats, scope: Scope, load: Floats) -> int | None:
    times = ranks[:, TIMES].sum(axis=1)
    full = ((ranks + load)[:, -2:] > program.room).any(axis=1)
    if scope is Scope.NODE:
        shape = (program.nodes, program.devices_per_node)
        times = times.reshape(shape).max(axis=1)
        full = np.logical_or.reduce(full.reshape(shape), axis=1)
    if full.all():
        return None
    return int(np.where(full, np.inf, times).argmin())


def naive_port(cluster: ClusterSpec, model: ModelSpec, global_batch: int | None = None) -> Plan:
    """The naive port as a plan that can be executed and measured.

    Its lower bound is that of a job without tables on the same devices.

    Raises:
        InfeasibleError: the batch cannot be split, or the port does not fit.
        UsageError: the batch is not positive.
    """
    job = with_batch(model, global_batch)
    choice = naive_choice(cluster, job)
    return assemble(
        cluster=cluster,
        model=model,
        global_batch=job.global_batch,
        kind="naive",
        contexts=choice.contexts,
        evaluation=choice.evaluation,
        bound_s=min(_dense_bound_s(cluster, job), choice.evaluation.step_s),
        report=SolverReport(
            name="greedy", status="heuristic", mip_gap=0.0, time_limit_s=1.0, evaluated=0, pruned=0
        ),
    )


def _dense_bound_s(cluster: ClusterSpec, model: ModelSpec) -> float:
    """No plan on all devices of the cluster has a shorter step."""
    several = len(cluster.pools)
    studies = tuple(
        PoolStudy(
            pool=pool,
            device=load_device(pool.device),
            model=model,
            bridge=cluster.bridge,
            pools_in_job=several,
            interval_steps=model.max_exchange_interval_steps if several > 1 else 1,
            options=SolverOptions(),
        )
        for pool in cluster.pools
    )
    space = SplitSpace(tuple(study.ranks for study in studies), model.global_batch)
    root = space.root
    assert root is not None, "the batch was split before"
    return Crew(studies, space).dense_s(root)
