"""Why there is no plan: which constraint, by how many bytes, and what would cure it."""

from __future__ import annotations

from collections.abc import Sequence

from planner.ilp.solve import SolverOptions
from planner.infeasible.changes import Batch, Cure
from planner.infeasible.cures import Fits, cures
from planner.infeasible.shortage import Shortage, shortage
from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.errors import InfeasibleError
from planner.specs.load import load_device
from planner.specs.model import ModelSpec
from planner.specs.units import GIB, MIB
from planner.splits import SplitSpace, equal_split
from planner.study import PoolStudy

NO_CURE = "use devices with more memory, or a smaller model"


class NoPlanError(InfeasibleError):
    """No plan exists, and why.

    Args:
        cures: each of them suffices.
        memory_bytes: what the worst rank would hold, by kind.
    """

    def __init__(
        self,
        problem: str,
        *,
        field: str,
        value: object = None,
        cures: Sequence[Cure] = (),
        memory_bytes: dict[str, int] | None = None,
        fix: str = "",
    ) -> None:
        self.cures = tuple(cures)
        self.memory_bytes = memory_bytes or {}
        text = "; or ".join(cure.text for cure in self.cures) or fix
        if value is None:
            super().__init__(problem, field=field, fix=text)
        else:
            super().__init__(problem, field=field, value=value, fix=text)


def unreachable_batch(
    cluster: ClusterSpec, model: ModelSpec, matched: bool, fits: Fits | None = None
) -> NoPlanError:
    """No local batches add up to the global batch.

    Args:
        fits: keeps batches that are reached, but have no plan either, out of the cures.
    """
    space = SplitSpace(tuple(pool.devices for pool in cluster.pools), model.global_batch)
    ranks = " + ".join(f"{pool.devices} b_{pool.name}" for pool in cluster.pools)
    near = [Cure((Batch(batch),)) for batch in space.nearest_batches() if batch is not None]
    usable = [cure for cure in near if fits is None or fits(*cure.apply(cluster, model))]
    nearest = " or ".join(str(batch) for batch in space.nearest_batches() if batch is not None)
    return NoPlanError(
        f"no split reaches the global batch: {ranks} = {model.global_batch} has no positive whole "
        f"solution{' with every device at work' if matched else ''}; the nearest that all devices "
        f"reach: {nearest}",
        field="global_batch",
        value=model.global_batch,
        cures=usable,
        fix="use one of these, and more nodes or a smaller model: its tables do not fit",
    )


def no_crew(
    cluster: ClusterSpec, model: ModelSpec, matched: bool, fits: Fits | None = None
) -> NoPlanError:
    """No working pools can hold the model: the nearest miss, and what would cure it.

    Args:
        model: with the job's global batch.
        fits: whether a job has a plan; without it no cure is looked for.
    """
    misses = [_miss(cluster, model, pool, matched) for pool in cluster.pools]
    # With every pool at work the worst one decides; otherwise the best one would have done alone.
    decide = max if matched else min
    miss = decide(misses, key=lambda one: (one.missing_host_bytes, one.missing_bytes))
    found = cures(cluster, model, matched, fits) if fits is not None else ()
    return NoPlanError(
        _problem(cluster, miss, matched),
        field=f"pools.{misses.index(miss)}",
        cures=found,
        memory_bytes=miss.memory_bytes,
        fix=NO_CURE if fits is not None else "",
    )


def with_cures(
    error: InfeasibleError,
    cluster: ClusterSpec,
    model: ModelSpec,
    matched: bool,
    fits: Fits | None,
) -> NoPlanError:
    """What a table's constraints or a device forbid, with what would cure it."""
    return NoPlanError(
        error.problem,
        field=error.field,
        value=error.value,
        cures=cures(cluster, model, matched, fits) if fits is not None else (),
        fix=error.fix,
    )


def _miss(cluster: ClusterSpec, model: ModelSpec, pool: PoolSpec, matched: bool) -> Shortage:
    """Shortage of a pool at its equal share of the batch (matched), or working alone."""
    together = matched and len(cluster.pools) > 1
    batch = max(1, model.global_batch // pool.devices)
    if together:
        split = equal_split({p.name: p.devices for p in cluster.pools}, model.global_batch)
        batch = split[pool.name] if split else 1
    study = PoolStudy(
        pool=pool,
        device=load_device(pool.device),
        model=model,
        bridge=cluster.bridge if together else None,
        pools_in_job=len(cluster.pools) if together else 1,
        interval_steps=1,
        options=SolverOptions(),
    )
    return shortage(study, batch)


def _problem(cluster: ClusterSpec, miss: Shortage, matched: bool) -> str:
    pool = miss.pool
    several = len(cluster.pools) > 1
    memory = "host memory" if miss.on_cpu or miss.missing_host_bytes else "device memory"
    missing = miss.missing_host_bytes or miss.missing_bytes
    capacity = miss.host_capacity_bytes if miss.missing_host_bytes else miss.capacity_bytes
    where = f"{memory} of pool {pool.name} ({pool.devices} x {pool.device})"
    if several:
        where += ", with every device at work" if matched else ", the nearest to fit alone"
    held = ", ".join(f"{kind} {_gib(size)}" for kind, size in miss.memory_bytes.items())
    copies = " (every working pool holds a full copy of the tables)" if several else ""
    if miss.table:
        what = f"no allowed shard of table {miss.table} fits{copies}"
    elif miss.packs:
        what = f"tables, activations and buffers do not fit{copies}"
    else:
        what = f"the tables fit on average, but their shards do not pack into the ranks{copies}"
    about = "" if miss.packs else "about "
    spilled = "" if miss.on_cpu else f"; host memory for tables: {_gib(miss.host_capacity_bytes)}"
    return (
        f"{where}: {what}: {about}{missing:,} bytes per rank ({_gib(missing)}) too many for "
        f"{_gib(capacity)}; the worst rank would hold: {held}{spilled}"
    )


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
