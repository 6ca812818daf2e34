"""Every plan of a small job, priced by the cost model: what the search must equal.

Nothing is left out: every set of working nodes, linked pools joined or not, every split of the
batch, and for each pool every number of replica groups, exchange interval, memory policy and
placement of every table. Loads add up over tables, so each is priced once, and then all their
combinations at once; ``price`` evaluates any plan by ``planner.evaluate``, as a check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations, product

import numpy as np

from planner.cost.context import PoolContext
from planner.cost.dense import recomputable
from planner.cost.embedding import option_pieces
from planner.cost.graph import pool_step_graph
from planner.cost.load import COMPONENTS, Scope
from planner.cost.memory import base_memory_bytes
from planner.cost.step import EXCHANGE_PREFIX, StepGraph
from planner.evaluate import Evaluation, evaluate, landings
from planner.ilp.options import ways
from planner.ilp.program import HBM, HOST, Floats, vector
from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.load import load_device
from planner.specs.model import ModelSpec, ShardingType, Table
from planner.specs.plan import KernelPolicy, MemoryPolicy, Placement
from planner.splits import SplitSpace


@dataclass(frozen=True)
class PoolWay:
    """One way of a pool to do its part."""

    context: PoolContext
    placements: Mapping[str, Placement]


@dataclass(frozen=True)
class Best:
    """The shortest step of all plans, and one that has it; None where nothing fits."""

    step_s: float
    ways: Mapping[str, PoolWay] | None
    plans: int
    """Combinations priced."""

    def evaluation(self) -> Evaluation:
        """The plan as ``planner.evaluate`` sees it."""
        assert self.ways is not None
        return evaluate(
            {name: way.context for name, way in self.ways.items()},
            {name: way.placements for name, way in self.ways.items()},
        )


def policies(ctx: PoolContext) -> Iterator[MemoryPolicy]:
    """Every memory policy that the trainer can run in a pool."""
    precision, names = ctx.model.precision, recomputable(ctx.model)
    known = ctx.device.compute.peak_flops_per_s
    cut = ["data_parallel"]
    if ctx.ranks > 1:
        cut += ["sharded_optimizer"] + (["fully_sharded"] if ctx.pools_in_job == 1 else [])
    for compute, communication, way, depth, recompute in product(
        [dtype for dtype in precision.compute if dtype in known],
        precision.communication,
        cut,
        (1,) if ctx.device.is_cpu else (1, 2, 3),
        chain.from_iterable(combinations(names, count) for count in range(len(names) + 1)),
    ):
        yield ctx.policy.model_copy(
            update={
                "compute_precision": compute,
                "communication_precision": communication,
                "dense_parallelism": way,
                "prefetch_depth": depth,
                "recompute": recompute,
            }
        )


def table_choices(ctx: PoolContext, table: Table) -> tuple[Floats, list[Placement]]:
    """Every placement of a table, and what each puts on the ranks of a group; [choices, R, C]."""
    group = ctx.sharding_group
    nodes, per_node = group.pool.nodes, group.pool.devices_per_node
    loads, placements = [], []
    for way in ways(group, table, spill=True):
        pieces = option_pieces(
            group,
            table,
            way.sharding_type,
            way.compute_kernel,
            way.data_type,
            way.column_widths,
            way.cache_load_factor,
        )
        counts = {Scope.POOL: 1, Scope.NODE: nodes, Scope.RANK: group.ranks}
        size = {Scope.POOL: group.ranks, Scope.NODE: per_node, Scope.RANK: 1}
        for places in product(*(range(counts[piece.scope]) for piece in pieces)):
            placement = Placement(
                sharding_type=way.sharding_type,
                compute_kernel=way.compute_kernel,
                data_type=way.data_type,
                ranks=tuple(
                    rank
                    for piece, place in zip(pieces, places, strict=True)
                    for rank in range(place * size[piece.scope], (place + 1) * size[piece.scope])
                ),
                column_widths=tuple(piece.columns for piece in pieces)
                if way.sharding_type in (ShardingType.COLUMN_WISE, ShardingType.GRID_SHARD)
                else (),
                cache_load_factor=way.cache_load_factor,
            )
            on_ranks = np.zeros((group.ranks, len(COMPONENTS)))
            for piece, ranks in zip(pieces, landings(ctx, placement), strict=True):
                on_ranks += vector(piece.everyone)
                on_ranks[list(ranks)] += vector(piece.owner)
            loads.append(on_ranks)
            placements.append(placement)
    return np.array(loads).reshape(-1, group.ranks, len(COMPONENTS)), placements


def ends_s(graph: StepGraph, slowest: Floats, waits: Mapping[str, float]) -> dict[str, Floats]:
    """End of every operation, for each row of slowest-rank loads [combinations, C]."""
    ends: dict[str, Floats] = {}
    before = graph.predecessors()
    for operation in graph.operations:
        start = np.full(len(slowest), waits.get(operation.name, 0.0))
        for name in before[operation.name]:
            start = np.maximum(start, ends[name])
        if operation.loads:
            columns = [COMPONENTS.index(name) for name in operation.loads]
            start = start + slowest[:, columns].max(axis=1)
        ends[operation.name] = start + operation.seconds
    return ends


def reach(graph: StepGraph, slowest: Floats) -> Floats:
    """All that the other pools can see of a pool, as a max-plus matrix; [combinations, B+1, B+1].

    Row i: when operation i on the bridge can start, or, in the last one, the end of the step.
    Column 0: whatever the others do; column 1+j: after the start of operation j on the bridge.
    """
    bridge = [one for one in graph.operations if one.name.startswith(EXCHANGE_PREFIX)]

    def rows(waits: Mapping[str, float]) -> Floats:
        ends = ends_s(graph, slowest, waits)
        starts = [ends[one.name] - one.seconds for one in bridge]
        return np.array([*starts, np.max(list(ends.values()), axis=0)])

    alone = rows({})
    late_s = 2 * float(alone.max()) if alone.size else 0.0
    after = [rows({one.name: late_s}) - late_s for one in bridge]
    return np.stack([alone, *after]).transpose(2, 1, 0)


def undominated(rows: Floats) -> list[int]:
    """Indexes of the rows, [n, k], that no other one beats or equals everywhere."""
    if rows.shape[1] == 1:
        return [int(rows.argmin())] if len(rows) else []
    kept: list[int] = []
    distinct, indexes = np.unique(rows, axis=0, return_index=True)
    for row, index in zip(distinct, indexes, strict=True):
        if not kept or not (rows[kept] <= row).all(axis=1).any():
            kept.append(int(index))
    return kept


def _flat(matrices: Floats) -> Floats:
    return matrices.reshape(len(matrices), matrices.shape[1] * matrices.shape[2])


class Pool:
    """A pool with its nodes at a local batch: every way to do its part."""

    def __init__(self, start: PoolContext) -> None:
        self.plans = 0
        self._tables: dict[tuple[object, ...], tuple[Floats, list[list[Placement]]]] = {}
        self._found: list[tuple[PoolContext, list[list[Placement]], int]] = []
        matrices = [
            self._reach(replace(ctx, policy=policy))
            for groups in start.pool.group_counts
            for interval in _intervals(start.model, start.pools_in_job > 1 or groups > 1)
            for ctx in [replace(start, replica_groups=groups, embedding_interval_steps=interval)]
            for policy in policies(ctx)
        ]
        self.matrices = np.concatenate(matrices)
        """What ``reach`` says of the ways that fit and that no other one makes needless."""
        best = undominated(
            self.matrices.reshape(-1, self.matrices[0].size)
            if len(self.matrices)
            else self.matrices[:, :, 0]
        )
        self.matrices, self._found = self.matrices[best], [self._found[index] for index in best]

    def way(self, index: int) -> PoolWay:
        """The way with the matrix of this index."""
        ctx, placements, choice = self._found[index]
        picked = np.unravel_index(choice, [len(options) for options in placements])
        return PoolWay(
            ctx,
            {
                table.name: options[int(option)]
                for table, options, option in zip(
                    ctx.model.all_tables, placements, picked, strict=True
                )
            },
        )

    def _reach(self, ctx: PoolContext) -> Floats:
        loads, placements = self._combined(ctx)
        self.plans += len(loads)
        room_bytes = ctx.hbm_capacity_bytes - sum(base_memory_bytes(ctx).values())
        host_bytes = 0 if ctx.device.is_cpu else ctx.host_capacity_bytes
        fitting = np.flatnonzero((loads[:, HBM] <= room_bytes) & (loads[:, HOST] <= host_bytes))
        matrices = reach(pool_step_graph(ctx), loads[fitting])
        best = undominated(_flat(matrices))
        self._found += [(ctx, placements, int(fitting[index])) for index in best]
        return matrices[best]

    def _combined(self, ctx: PoolContext) -> tuple[Floats, list[list[Placement]]]:
        """Loads of the slowest rank under every combination of placements; [combinations, C].

        Tables see neither the dense network nor the exchange of copies.
        """
        policy = ctx.policy
        key = (ctx.replica_groups, policy.communication_precision, policy.prefetch_depth)
        if key not in self._tables:
            each = [table_choices(ctx, table) for table in ctx.model.all_tables]
            total = np.zeros((1, ctx.sharding_group.ranks, len(COMPONENTS)))
            for loads, _ in each:
                total = (total[:, None] + loads[None]).reshape(-1, *total.shape[1:])
            self._tables[key] = total.max(axis=1), [placements for _, placements in each]
        return self._tables[key]


def _intervals(model: ModelSpec, copies: bool) -> range:
    return range(1, model.max_exchange_interval_steps + 1 if copies else 2)


def crews(cluster: ClusterSpec) -> Iterator[tuple[PoolSpec, ...]]:
    """Every choice of pools, joined or not, and of their working nodes."""
    for pools in cluster.ways():
        for counts in product(*(range(pool.min_nodes, pool.nodes + 1) for pool in pools)):
            working = tuple(
                pool.model_copy(update={"nodes": count})
                for pool, count in zip(pools, counts, strict=True)
                if count
            )
            if working:
                yield working


def starts(
    cluster: ClusterSpec, model: ModelSpec, kernels: KernelPolicy = "vendor"
) -> Iterator[dict[str, PoolContext]]:
    """Every crew at every split, its pools under no policy in particular."""
    for working in crews(cluster):
        space = SplitSpace(tuple(pool.devices for pool in working), model.global_batch)
        for split in space.all():
            yield {
                pool.name: _start(cluster, model, pool, batch, len(working), kernels)
                for pool, batch in zip(working, split, strict=True)
            }


def shortest(cluster: ClusterSpec, model: ModelSpec, kernels: KernelPolicy = "vendor") -> Best:
    """The best of all plans by enumeration."""
    best = Best(float("inf"), None, 0)
    known: dict[PoolContext, Pool] = {}
    for contexts in starts(cluster, model, kernels):
        for ctx in contexts.values():
            if ctx not in known:
                known[ctx] = Pool(ctx)
        pools = [known[ctx] for ctx in contexts.values()]
        if not all(len(pool.matrices) for pool in pools):
            continue
        steps = _joint([pool.matrices for pool in pools])
        indexes = np.unravel_index(int(steps.argmin()), steps.shape)
        if steps[indexes] < best.step_s:
            chosen = {
                name: one.way(int(index))
                for name, one, index in zip(contexts, pools, indexes, strict=True)
            }
            best = Best(float(steps[indexes]), chosen, 0)
    return replace(best, plans=sum(pool.plans for pool in known.values()))


def policies_priced(cluster: ClusterSpec, model: ModelSpec) -> int:
    """How many step graphs ``shortest`` prices."""
    distinct = {ctx for contexts in starts(cluster, model) for ctx in contexts.values()}
    return sum(
        len(list(policies(ctx))) * len(_intervals(model, ctx.pools_in_job > 1 or groups > 1))
        for ctx in distinct
        for groups in ctx.pool.group_counts
    )


def _joint(matrices: list[Floats]) -> Floats:
    """The step of the job for every combination of the pools' ways; one axis per pool."""

    def spread(axis: int, values: Floats) -> Floats:
        shape = [1] * len(matrices)
        shape[axis] = -1
        return values.reshape(shape)

    starts: list[Floats] = []
    rows = matrices[0].shape[1]
    for row in range(rows):
        latest = np.zeros([1] * len(matrices))
        for axis, matrix in enumerate(matrices):
            latest = np.maximum(latest, spread(axis, matrix[:, row, 0]))
            earlier = starts if row == rows - 1 else starts[:row]
            for j, start in enumerate(earlier):
                latest = np.maximum(latest, start + spread(axis, matrix[:, row, 1 + j]))
        starts.append(latest)
    return starts[-1]


def _start(
    cluster: ClusterSpec,
    model: ModelSpec,
    pool: PoolSpec,
    batch: int,
    pools: int,
    kernels: KernelPolicy,
) -> PoolContext:
    device = load_device(pool.device)
    return PoolContext(
        pool=pool,
        device=device,
        model=model,
        local_batch=batch,
        policy=MemoryPolicy(
            compute_precision=model.precision.compute[0],
            kernels="vendor" if device.triton is None else kernels,
        ),
        bridge=cluster.bridge,
        pools_in_job=pools,
    )
