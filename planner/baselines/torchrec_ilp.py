"""The best placement of TorchRec's own search space under TorchRec's own costs, with its bound.

The space of its planner at its defaults, for every table: table-wise; column shards of the first
even width from 128 up (``min_partition``); rows over the pool, or over a node; replicated; and,
where the table's constraints ask for it, grid. Rows in device memory, in host memory, or in host
memory with 20 % of them cached. Column shards inside one node (``table_column_wise``) cost what
``column_wise`` costs and have fewer places, so they need no option of their own; on a single node
the rows of a node are the rows of the pool.

Its rating, the largest sum of shard times on any rank, is a step graph of one operation, so the
pool solver applies as it is. Every row shard of a table is charged the memory of the largest one:
the last ones may be smaller by some rows, or empty where there are fewer rows than ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.baselines.greedy import CACHE_LOAD_FACTOR, MIN_PARTITION
from planner.baselines.league import Placed
from planner.baselines.problem import placements_of, recipe_type
from planner.baselines.torchrec_costs import (
    TorchRecTable,
    TorchRecTopology,
    TorchRecWay,
    shard_bytes,
    shard_seconds,
    torchrec_topology,
)
from planner.cost.context import PoolContext
from planner.cost.load import Piece, PlacementOption, RankLoad, Scope
from planner.cost.step import Operation, StepGraph
from planner.ilp.options import equal_tables
from planner.ilp.packing import solve_by_patterns
from planner.ilp.program import PoolProgram, TableClass
from planner.ilp.solve import SolverOptions, Status
from planner.specs.errors import InfeasibleError
from planner.specs.model import ComputeKernel, ShardingType, Table
from planner.specs.plan import Placement

COST = "lookup_forward_s"
"""The one load component that the graph looks at holds a shard's whole time."""
RATING = StepGraph((Operation("tables", "compute", loads=(COST,)),))


@dataclass(frozen=True)
class TorchRecOptimum:
    """``placements`` is None if none was found."""

    placements: dict[str, Placement] | None
    rating_s: float
    bound_s: float
    """No placement of the space is rated better."""
    status: Status

    @property
    def gap(self) -> float:
        """(rating - bound) / bound."""
        return self.rating_s / self.bound_s - 1 if self.bound_s > 0 else 0.0


def torchrec_optimum(ctx: PoolContext, options: SolverOptions) -> TorchRecOptimum:
    """Place a pool's tables, in the recipe's weight precision, for TorchRec's rating.

    Raises:
        InfeasibleError: a table's constraints leave no option.
    """
    ctx = ctx.sharding_group
    solution = solve_by_patterns(torchrec_program(ctx), options)
    placements = None
    if solution.program is not None and solution.assignment is not None:
        placements = placements_of(ctx, solution.program, solution.assignment)
    return TorchRecOptimum(placements, solution.step_s, solution.bound_s, solution.status)


def torchrec_optimal(ctx: PoolContext, options: SolverOptions) -> Placed:
    """``torchrec_optimum`` as a baseline.

    Raises:
        InfeasibleError: there is none, or none was found.
    """
    found = torchrec_optimum(ctx, options)
    if found.placements is None:
        raise InfeasibleError(
            f"pool {ctx.pool.name}: nothing of TorchRec's search space fits",
            fix="use more ranks or a smaller batch",
        )
    return Placed(found.placements, f"within {found.gap:.1%} of the best rating of its space")


def torchrec_program(ctx: PoolContext) -> PoolProgram:
    """TorchRec's placement problem of a pool.

    Raises:
        InfeasibleError: a table's constraints leave no option.
    """
    topology = torchrec_topology(ctx)
    cpu = topology.on_cpu
    return PoolProgram(
        graph=RATING,
        nodes=ctx.pool.nodes,
        devices_per_node=ctx.pool.devices_per_node,
        classes=tuple(
            TableClass(tuple(table.name for table in group), _options(ctx, topology, group[0]))
            for group in equal_tables(ctx.model)
        ),
        # The solver's device memory is a CPU worker's only memory.
        hbm_room_bytes=float(topology.host_room_bytes if cpu else topology.hbm_room_bytes),
        host_room_bytes=float(0 if cpu else topology.host_room_bytes),
    )


def _options(
    ctx: PoolContext, topology: TorchRecTopology, table: Table
) -> tuple[PlacementOption, ...]:
    data_type = recipe_type(ctx.model, table)
    seen = TorchRecTable(table, data_type.bytes, ctx.model.optimizer.sparse.name, ctx.local_batch)
    found = []
    for kind, scope, count, rows, columns in _shardings(topology, table):
        for kernel in _kernels(topology, table, kind):
            way = TorchRecWay(kind, kernel, rows, columns)
            hbm, host = shard_bytes(topology, seen, way)
            load = RankLoad(
                **{COST: shard_seconds(topology, seen, way)},
                hbm_bytes=float(hbm + host if topology.on_cpu else hbm),
                host_bytes=float(0 if topology.on_cpu else host),
            )
            cached = kernel is ComputeKernel.FUSED_UVM_CACHING
            found.append(
                PlacementOption(
                    kind,
                    kernel,
                    data_type,
                    tuple(Piece(scope, columns, load) for _ in range(count)),
                    CACHE_LOAD_FACTOR if cached else None,
                )
            )
    if not found:
        raise InfeasibleError(
            f"table {table.name}: its constraints leave TorchRec's planner no option",
            field="constraints",
            value=table.constraints.model_dump(mode="json", exclude_none=True),
            fix="allow another sharding type or compute kernel",
        )
    return tuple(found)


def _shardings(
    topology: TorchRecTopology, table: Table
) -> Iterator[tuple[ShardingType, Scope, int, int, int]]:
    """Sharding types with scope and number of pieces, and rows and columns of a shard."""
    rows, columns = table.num_embeddings, table.embedding_dim
    allowed = table.constraints.sharding_types
    width = column_shard_width(columns, table.constraints.min_partition or MIN_PARTITION)
    shards = columns // width
    node_rows, pool_rows = -(-rows // topology.node_ranks), -(-rows // topology.ranks)
    kinds = [
        (ShardingType.TABLE_WISE, Scope.RANK, 1, rows, columns),
        (ShardingType.COLUMN_WISE, Scope.RANK, shards, rows, width),
        (ShardingType.DATA_PARALLEL, Scope.POOL, 1, rows, columns),
    ]
    if not topology.on_cpu:
        kinds += [
            (ShardingType.ROW_WISE, Scope.POOL, 1, pool_rows, columns),
            (ShardingType.TABLE_ROW_WISE, Scope.NODE, 1, node_rows, columns),
            (ShardingType.GRID_SHARD, Scope.NODE, shards, node_rows, width),
        ]
    for kind, scope, count, *shape in kinds:
        if allowed is not None and kind not in allowed:
            continue
        if allowed is None and (
            kind is ShardingType.GRID_SHARD
            or (kind is ShardingType.COLUMN_WISE and shards == 1)
            or (kind is ShardingType.TABLE_ROW_WISE and topology.nodes == 1)
        ):
            continue
        if kind is ShardingType.COLUMN_WISE and shards == 1:
            kind = ShardingType.TABLE_WISE
        if count <= topology.ranks:
            yield kind, scope, count, shape[0], shape[1]


def column_shard_width(columns: int, least: int) -> int:
    """The first divisor of the width from ``least`` up that is a multiple of 4; else the width."""
    widths = (w for w in range(least, columns) if columns % w == 0 and w % 4 == 0)
    return next(widths, columns)


def _kernels(
    topology: TorchRecTopology, table: Table, kind: ShardingType
) -> Iterator[ComputeKernel]:
    kernels = [ComputeKernel.DENSE]
    if kind is not ShardingType.DATA_PARALLEL:
        kernels = [ComputeKernel.FUSED]
        if not topology.on_cpu:
            kernels += [ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING]
    allowed = table.constraints.compute_kernels
    return (kernel for kernel in kernels if allowed is None or kernel in allowed)
