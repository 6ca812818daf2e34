"""Whether the parts of a plan fit each other: a digest only says that nobody changed them since."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from planner.specs.cluster import JOIN, group_shape
from planner.specs.errors import SpecError, SpecErrors

if TYPE_CHECKING:
    from planner.specs.plan import Plan, PoolPlan

MEMORY_FIELDS = ("total", "capacity")
"""What every rank's memory must say besides its categories."""


def check_consistency(plan: Plan, file: str | Path) -> None:
    """Pools against the cluster, ranks and batches against their sums, placements against tables.

    Raises:
        SpecError: naming the field that does not fit; ``SpecErrors`` if there are several.
    """
    found = [
        SpecError(problem, file=file, field=field, fix="make the plan again with hwplan plan --out")
        for field, problem in _problems(plan)
    ]
    if found:
        raise found[0] if len(found) == 1 else SpecErrors(found)


def _problems(plan: Plan) -> Iterator[tuple[str, str]]:
    """(field, what is wrong with it)."""
    samples = 0
    taken: set[str] = set()
    for name, pool in plan.pools.items():
        field = f"pools.{name}"
        samples += pool.ranks * pool.local_batch
        for member in sorted(taken & {*name.split(JOIN)}):
            yield field, f"pool {member} works twice"
        taken |= {*name.split(JOIN)}
        try:
            nodes = plan.cluster.pool(name).nodes
        except KeyError:
            joined = "pools that can be joined so" if JOIN in name else "such pool"
            yield field, f"the plan's cluster has no {joined}"
        else:
            if pool.nodes > nodes:
                yield f"{field}.nodes", f"more than the cluster's {nodes}"
        yield from _pool_problems(field, pool, {table.name for table in plan.model.all_tables})
    if samples != plan.global_batch:
        yield (
            "pools",
            f"their ranks take {samples} samples in all, the global batch is {plan.global_batch}",
        )


def _pool_problems(field: str, pool: PoolPlan, tables: set[str]) -> Iterator[tuple[str, str]]:
    if pool.ranks != pool.nodes * pool.devices_per_node:
        product = f"{pool.nodes} nodes of {pool.devices_per_node} devices"
        yield f"{field}.ranks", f"{pool.ranks} ranks are not {product}"
    if group_shape(pool.nodes, pool.devices_per_node, pool.replica_groups) is None:
        product = f"{pool.nodes} nodes of {pool.devices_per_node} devices"
        yield f"{field}.replica_groups", f"{product} have no {pool.replica_groups} equal groups"
    for table in sorted(tables - pool.placements.keys()):
        yield f"{field}.placements", f"table {table} has no placement"
    for table in sorted(pool.placements.keys() - tables):
        yield f"{field}.placements.{table}", "the plan's model has no such table"
    for table, placement in pool.placements.items():
        if max(placement.ranks) >= pool.group_ranks:
            owner = "the pool" if pool.replica_groups == 1 else "a replica group"
            yield (
                f"{field}.placements.{table}.ranks",
                f"rank {max(placement.ranks)} does not exist: {owner} has {pool.group_ranks}",
            )
    if len(pool.memory_bytes) != pool.ranks:
        yield f"{field}.memory_bytes", f"{len(pool.memory_bytes)} entries for {pool.ranks} ranks"
    for rank, memory in enumerate(pool.memory_bytes):
        for name in MEMORY_FIELDS:
            if name not in memory:
                yield f"{field}.memory_bytes.{rank}", f"does not say {name}"
