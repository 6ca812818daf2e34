"""What a rank of a pool lacks, in bytes, and what fills it, under the policy that saves most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pulp

from planner.cost.context import PoolContext
from planner.cost.load import PlacementOption, Scope
from planner.cost.memory import base_memory_bytes, shard_memory_bytes
from planner.fit import ANY
from planner.ilp.options import pool_program
from planner.ilp.pool import solve_pool
from planner.ilp.program import HBM, HOST, PoolProgram
from planner.ilp.solve import SolverOptions, run
from planner.specs.cluster import PoolSpec
from planner.specs.model import Table
from planner.specs.units import GIB
from planner.study import PoolStudy

PACKING_STEPS = 128
"""Missing memory of tables that fit on average is found to within this part of the capacity."""
PACKING_TIME_LIMIT_S = 5.0

TOLERANCE_BYTES = 1024
"""Less than this is the solver's tolerance."""
HOST_LAST = 1e3
"""Host memory is missing only where device memory would not do instead."""

Missing = tuple[float, float]
"""Host and device bytes."""
NOTHING: Missing = (0.0, 0.0)

KINDS = {
    "context": "driver context",
    "dense_weights": "weights",
    "low_precision_weights": "weights",
    "table_weights": "weights",
    "dense_gradients": "gradients",
    "table_gradients": "gradients",
    "dense_optimizer": "optimizer state",
    "table_optimizer": "optimizer state",
    "activations": "activations",
    "pooled_embeddings": "activations",
}
"""What users call the categories of ``planner.cost.memory``; all others are buffers."""


@dataclass(frozen=True)
class Shortage:
    """Of the worst rank, host memory used as far as it goes."""

    pool: PoolSpec
    on_cpu: bool
    missing_bytes: int
    """Device memory (a CPU worker's is host memory) without which no placement is found."""
    missing_host_bytes: int
    """Host memory, where tables may be nowhere else."""
    capacity_bytes: int
    host_capacity_bytes: int
    memory_bytes: dict[str, int]
    """What the rank would hold, by kind: tables as evenly as they can be cut."""
    table: str = ""
    """The table of which no shard fits, if that is the reason."""
    packs: bool = True
    """Whether it is not only for the shards' sizes that they find no room."""


def shortage(study: PoolStudy, batch: int) -> Shortage:
    """The missing memory of a pool at a local batch, under the policy that saves most."""
    ctx = study.thriftiest(batch)
    program = pool_program(ctx, spill=True)
    piece, group, option = _largest_piece(program)
    together, cut = _when_cut_at_will(program)
    missing, table, packs = max(piece, together), "", True
    if piece > together:
        table = program.classes[group].tables[0]
        cut = {(group, option): 1.0}
    if missing == NOTHING:
        missing, packs = (0.0, _until_they_pack(program, study.options)), False
    return Shortage(
        pool=study.pool,
        on_cpu=study.device.is_cpu,
        missing_bytes=int(np.ceil(missing[1])),
        missing_host_bytes=int(np.ceil(missing[0])),
        capacity_bytes=ctx.hbm_capacity_bytes,
        host_capacity_bytes=int(program.host_room_bytes),
        memory_bytes=_by_kind(ctx, program, cut, whole_piece=bool(table)),
        table=table,
        packs=packs,
    )


def _largest_piece(program: PoolProgram) -> tuple[Missing, int, int]:
    """What the table hardest to place lacks on a rank, its class and option."""
    worst = NOTHING, 0, 0
    for g, loads in enumerate(program.loads):
        needs = []
        for o, option in enumerate(loads):
            pieces = [shard.load for shard in option.shards] or [0.0 * option.everywhere]
            need = np.max([option.everywhere + piece for piece in pieces], axis=0)
            device, host = np.maximum(need[[HBM, HOST]] - program.room, 0.0)
            needs.append(((float(host), float(device)), g, o))
        worst = max(worst, min(needs))
    return worst


def _when_cut_at_will(program: PoolProgram) -> tuple[Missing, dict[tuple[int, int], float]]:
    """What each rank lacks if all tables are cut at will, and how many tables of each class then
    take each option."""
    problem = pulp.LpProblem("shortage", pulp.LpMinimize)
    lacks = [problem.add_variable(f"missing_{place}", 0) for place in ("device", "host")]
    problem += lacks[0] + HOST_LAST * lacks[1]
    counts = {}
    for g, (group, loads) in enumerate(zip(program.classes, program.loads, strict=True)):
        row = {(g, o): problem.add_variable(f"x_{g}_{o}", 0) for o in range(len(loads))}
        problem += pulp.lpSum(row.values()) == len(group.tables)
        counts.update(row)
    for component, room, lack in zip((HBM, HOST), program.room / GIB, lacks, strict=True):
        held = [
            (x, float(program.loads[g][o].mean[component]) / GIB) for (g, o), x in counts.items()
        ]
        problem += pulp.LpAffineExpression(held) <= lack + float(room)
    run(problem, SolverOptions(mip_gap=0.0), relaxed=True)
    device, host = (max(float(lack.value() or 0.0), 0.0) * GIB for lack in lacks)
    chosen = {key: float(x.value() or 0.0) for key, x in counts.items()}
    return (
        (host if host > TOLERANCE_BYTES else 0.0, device if device > TOLERANCE_BYTES else 0.0),
        {key: count for key, count in chosen.items() if count > 0},
    )


def _until_they_pack(program: PoolProgram, options: SolverOptions) -> float:
    """Bytes by which ranks must grow until a placement is found."""
    options = replace(options, time_limit_s=PACKING_TIME_LIMIT_S)

    def packs(extra_bytes: float) -> bool:
        larger = replace(program, hbm_room_bytes=program.hbm_room_bytes + extra_bytes)
        return solve_pool(larger, options, lambda: larger, ANY).assignment is not None

    step_bytes = program.hbm_room_bytes / PACKING_STEPS
    low, high = 0, 1
    while not packs(high * step_bytes) and high < PACKING_STEPS:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if packs(middle * step_bytes) else (middle, high)
    return high * step_bytes


def _by_kind(
    ctx: PoolContext,
    program: PoolProgram,
    cut: dict[tuple[int, int], float],
    whole_piece: bool,
) -> dict[str, int]:
    """Bytes of a rank by kind, ``cut`` tables of each class under each option on top of the rest.

    Args:
        whole_piece: count the largest piece of the option, which one rank must hold, instead of
            its share of all pieces.
    """
    tables = {table.name: table for table in ctx.model.all_tables}
    held: dict[str, float] = dict.fromkeys(dict.fromkeys(KINDS.values()), 0.0)
    held["buffers"] = 0.0
    for category, size in base_memory_bytes(ctx).items():
        held[KINDS.get(category, "buffers")] += size
    for (g, o), count in cut.items():
        group = program.classes[g]
        shares = _shares(program, group.options[o], whole_piece)
        stored = _option_bytes(ctx, tables[group.tables[0]], group.options[o], shares)
        for category, share in stored.items():
            held[KINDS.get(category, "buffers")] += count * share
    return {kind: round(size) for kind, size in held.items() if round(size)}


def _shares(program: PoolProgram, option: PlacementOption, whole_piece: bool) -> list[float]:
    """Of each piece: the part that falls on one rank, on average or at worst."""
    ranks = {Scope.RANK: 1, Scope.NODE: program.devices_per_node, Scope.POOL: program.ranks}
    spread = [ranks[piece.scope] / program.ranks for piece in option.pieces]
    if not whole_piece:
        return spread
    largest = max(range(len(spread)), key=lambda index: option.pieces[index].columns)
    return [float(share == 1 or index == largest) for index, share in enumerate(spread)]


def _option_bytes(
    ctx: PoolContext, table: Table, option: PlacementOption, shares: Sequence[float]
) -> dict[str, float]:
    held: dict[str, float] = {}
    for piece, share in zip(option.pieces, shares, strict=True):
        parts = shard_memory_bytes(
            ctx,
            table,
            option.sharding_type,
            option.compute_kernel,
            option.data_type,
            piece.columns,
            option.cache_load_factor,
        )
        for category, size in parts.items():
            held[category] = held.get(category, 0.0) + share * size
    return held
