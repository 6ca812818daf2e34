"""Why there is no plan: which constraint, by how many bytes, and the smallest change that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pulp

from planner.cost.context import PoolContext
from planner.cost.dense import recomputable
from planner.ilp.options import pool_program
from planner.ilp.program import HBM, HOST, PoolProgram
from planner.ilp.solve import SolverOptions, run
from planner.specs.cluster import BridgeSpec, ClusterSpec, PoolSpec
from planner.specs.errors import InfeasibleError
from planner.specs.load import load_device
from planner.specs.model import ModelSpec, Precision
from planner.specs.plan import MemoryPolicy
from planner.specs.units import GIB, Dtype
from planner.splits import SplitSpace, equal_split
from planner.study import compute_precisions, narrowest

HOST_GIB = tuple(2**power for power in range(2, 15))
"""Host memory per node that is tried, if such machines are at hand; it is all that CPUs have."""
MOST_NODES = 512
"""Larger pools are not tried when looking for the smallest that fits."""


def unreachable_batch(cluster: ClusterSpec, global_batch: int, matched: bool) -> InfeasibleError:
    """No local batches add up to the global batch."""
    space = SplitSpace(tuple(pool.devices for pool in cluster.pools), global_batch)
    below, above = space.nearest_batches()
    ranks = " + ".join(f"{pool.devices} b_{pool.name}" for pool in cluster.pools)
    nearest = " or ".join(str(batch) for batch in (below, above) if batch is not None)
    return InfeasibleError(
        f"no split reaches the global batch: {ranks} = {global_batch} has no positive whole "
        f"solution{' with every device at work' if matched else ''}",
        field="global_batch",
        value=global_batch,
        fix=f"use --global-batch {nearest} (the nearest that all devices reach)",
    )


@dataclass(frozen=True)
class Shortage:
    """What a rank of a pool lacks when every policy saves as much as it can."""

    pool: PoolSpec
    device_bytes: int
    """Missing device memory per rank, host memory used as far as it goes."""
    base_bytes: int
    """Device memory taken by everything but tables."""
    capacity_bytes: int
    host_capacity_bytes: int
    table: str = ""
    """The table of which no shard fits, if that is the reason."""

    @property
    def fits(self) -> bool:
        return self.device_bytes == 0


def shortage(
    pool: PoolSpec, model: ModelSpec, batch: int, bridge: BridgeSpec | None, pools_in_job: int
) -> Shortage:
    """Missing memory at a local batch, with everything recomputed and the narrowest precisions."""
    device = load_device(pool.device)
    policy = MemoryPolicy(
        compute_precision=narrowest(compute_precisions(device, model)),
        communication_precision=narrowest(model.precision.communication),
        recompute=recomputable(model),
    )
    ctx = PoolContext(pool, device, model, batch, policy, bridge, pools_in_job)
    program = pool_program(ctx, spill=True)
    capacity = ctx.hbm_capacity_bytes
    missing, table = _largest_piece(program)
    missing = max(missing, _missing_on_average(program))
    return Shortage(
        pool=pool,
        device_bytes=int(np.ceil(missing)),
        base_bytes=int(capacity - program.hbm_room_bytes),
        capacity_bytes=capacity,
        host_capacity_bytes=int(program.host_room_bytes),
        table=table,
    )


def _largest_piece(program: PoolProgram) -> tuple[float, str]:
    """Device bytes by which the table hardest to place exceeds a rank, and its name."""
    worst, name = 0.0, ""
    for group, loads in zip(program.classes, program.loads, strict=True):
        least = float("inf")
        for option in loads:
            pieces = [shard.load for shard in option.shards] or [0.0 * option.everywhere]
            need = np.max([option.everywhere + piece for piece in pieces], axis=0)
            if need[HOST] <= program.host_room_bytes:
                least = min(least, float(need[HBM] - program.hbm_room_bytes))
        if least > worst:
            worst, name = least, group.tables[0]
    return worst, name


def _missing_on_average(program: PoolProgram) -> float:
    """Device bytes per rank that must be added so that all tables fit when cut at will."""
    problem = pulp.LpProblem("shortage", pulp.LpMinimize)
    missing = problem.add_variable("missing", 0)
    problem += missing
    device, host = [], []
    scale = 1 / GIB
    for g, (group, loads) in enumerate(zip(program.classes, program.loads, strict=True)):
        row = [problem.add_variable(f"x_{g}_{o}", 0) for o in range(len(loads))]
        problem += pulp.lpSum(row) == len(group.tables)
        device += [
            (x, float(option.mean[HBM]) * scale) for x, option in zip(row, loads, strict=True)
        ]
        host += [
            (x, float(option.mean[HOST]) * scale) for x, option in zip(row, loads, strict=True)
        ]
    room = program.room * scale
    problem += pulp.LpAffineExpression(device) <= missing + float(room[0])
    problem += pulp.LpAffineExpression(host) <= float(room[1])
    outcome = run(problem, SolverOptions(mip_gap=0.0), relaxed=True)
    # Always solvable: "missing" is unbounded and every table has an option without host memory.
    value = outcome.objective if outcome.objective is not None else 0.0
    return value * GIB if value > 1e-6 else 0.0


def no_crew(cluster: ClusterSpec, model: ModelSpec, matched: bool) -> InfeasibleError:
    """No working pools can hold the model: the nearest miss, and what would cure it.

    ``model`` carries the job's global batch.
    """
    misses = [_miss(cluster, model, pool, matched) for pool in cluster.pools]
    # With every pool at work the worst one decides; otherwise the best one would have done alone.
    decide = max if matched else min
    index = misses.index(decide(misses, key=lambda one: one.device_bytes))
    miss, pool = misses[index], cluster.pools[index]
    if miss.fits:
        return InfeasibleError(
            "no placement was found, though the tables fit on average: shards do not pack "
            f"into the ranks of pool {pool.name}",
            fix="allow column_wise or row_wise for the large tables, or raise --time-limit",
        )
    what = (
        f"no allowed shard of table {miss.table} fits"
        if miss.table
        else "tables, activations and buffers do not fit"
    )
    on_cpu = load_device(pool.device).is_cpu
    memory = "host memory" if on_cpu else "device memory"
    spilled = (
        "" if on_cpu else f"; host memory is used up to {miss.host_capacity_bytes / GIB:.0f} GiB"
    )
    copies = " (every working pool holds a full copy of the tables)" if len(misses) > 1 else ""
    return InfeasibleError(
        f"{memory} of pool {pool.name} ({pool.devices} x {pool.device}): {what}{copies}: "
        f"{miss.device_bytes:,} bytes per rank ({miss.device_bytes / GIB:.1f} GiB) too many for "
        f"{miss.capacity_bytes / GIB:.1f} GiB, of which {miss.base_bytes / GIB:.1f} GiB go to "
        f"everything but tables{spilled}",
        field=f"pools.{index}",
        fix=" or ".join(_cures(cluster, model, pool, matched))
        or "use devices with more memory, or a smaller model",
    )


def _miss(cluster: ClusterSpec, model: ModelSpec, pool: PoolSpec, matched: bool) -> Shortage:
    """Shortage of a pool at its equal share of the batch (matched), or working alone."""
    if not matched or len(cluster.pools) == 1:
        return shortage(pool, model, max(1, model.global_batch // pool.devices), None, 1)
    split = equal_split({p.name: p.devices for p in cluster.pools}, model.global_batch)
    batch = split[pool.name] if split else 1
    return shortage(pool, model, batch, cluster.bridge, len(cluster.pools))


def _cures(cluster: ClusterSpec, model: ModelSpec, pool: PoolSpec, matched: bool) -> Iterator[str]:
    """Single changes that make the pool hold the model."""

    def fits(pool: PoolSpec, model: ModelSpec) -> bool:
        return _miss(cluster, model, pool, matched).fits

    def with_nodes(nodes: int) -> PoolSpec:
        return pool.model_copy(update={"nodes": nodes})

    nodes = pool.nodes
    while nodes < MOST_NODES and not fits(with_nodes(nodes), model):
        nodes *= 2
    if fits(with_nodes(nodes), model):
        low, high = nodes // 2, nodes
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(with_nodes(middle), model) else (middle, high)
        yield f"give pool {pool.name} {high} nodes instead of {pool.nodes}"
    half = (*model.precision.embeddings, Dtype.FP16)
    if all(dtype.bytes > 2 for dtype in model.precision.embeddings):
        fields = {**model.precision.model_dump(), "embeddings": half}
        smaller = model.model_copy(update={"precision": Precision.model_validate(fields)})
        if fits(pool, smaller):
            yield "allow fp16 tables (precision.embeddings: [fp32, fp16])"
    least = model.model_copy(update={"global_batch": pool.devices * len(cluster.pools)})
    if fits(pool, least):
        yield f"use a smaller --global-batch ({_largest_batch(fits, model, pool)} still fits)"
    for gib in HOST_GIB:
        if fits(pool.model_copy(update={"host_memory_gib_per_node": float(gib)}), model):
            yield f"set host_memory_gib_per_node of pool {pool.name} to {gib}"
            break


def _largest_batch(fits: object, model: ModelSpec, pool: PoolSpec) -> int:
    """The largest halving of the global batch that fits."""
    assert callable(fits)
    batch = model.global_batch
    while batch > pool.devices:
        batch //= 2
        if fits(pool, model.model_copy(update={"global_batch": batch})):
            break
    return batch
