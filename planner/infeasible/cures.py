"""The smallest changes after which there is a plan: each one is planned before it is suggested.

A *lever* is a change of growing size. Single levers come first; if none does, pairs of them; then
all together. Each change of a cure is reduced as far as the others, once reduced, allow: one size
less has no plan (as far as a larger change never takes a plan away).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from planner.infeasible.changes import (
    Batch,
    Change,
    Cure,
    HostMemory,
    Lift,
    Limit,
    MayRest,
    Nodes,
    TablePrecision,
    Without,
)
from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.model import ModelSpec, TableGroup
from planner.specs.units import Dtype
from planner.splits import SplitSpace

MOST_NODES = 128
"""Of a pool that are tried, or twice as many as it has."""
ROUND = tuple(part << power for power in range(22) for part in (4, 5, 6, 7))
"""Four sizes to the octave, times four: memory and batches come in round numbers."""
HOST_GIB = tuple(size // 4 for size in ROUND if size % 4 == 0 and size <= 4 * 16 * 1024)
"""Host memory of a node that is tried, if such machines are at hand; it is all that CPUs have."""
MOST_PAIRS = 2
"""Cures of two changes that are shown."""
LIMITS: tuple[Limit, ...] = ("sharding_types", "compute_kernels", "data_types", "min_partition")

Fits = Callable[[ClusterSpec, ModelSpec], bool]
"""Whether a job has a plan."""


@dataclass(frozen=True)
class Lever:
    """Changes of one kind, the smallest first."""

    amounts: Sequence[int]
    change: Callable[[int], Change]

    def __len__(self) -> int:
        return len(self.amounts)

    def at(self, size: int) -> Change:
        """The change of a size from 1 to ``len``."""
        return self.change(self.amounts[size - 1])


def levers(cluster: ClusterSpec, model: ModelSpec, matched: bool) -> list[Lever]:
    """What may change, the dearest first."""
    found = [
        *(_nodes(cluster, model, pool, matched) for pool in cluster.pools),
        *(_host_memory(cluster, pool) for pool in cluster.pools),
        _smaller_batch(cluster, model),
        *_table_precision(model),
        *_lifted(model),
        *_left_out(cluster, matched),
    ]
    return [lever for lever in found if len(lever)]


def _nodes(cluster: ClusterSpec, model: ModelSpec, pool: PoolSpec, matched: bool) -> Lever:
    def reaches(nodes: int) -> bool:
        devices = [
            nodes * pool.devices_per_node if other is pool else other.devices
            for other in cluster.pools
        ]
        return SplitSpace(tuple(devices), model.global_batch).root is not None

    counts = range(pool.nodes + 1, max(MOST_NODES, 2 * pool.nodes) + 1)
    usable = [nodes for nodes in counts if reaches(nodes)] if matched else counts
    return Lever(usable, lambda nodes: Nodes(pool, nodes))


def _host_memory(cluster: ClusterSpec, pool: PoolSpec) -> Lever:
    linked = [link.pools for link in cluster.links if pool.name in link.pools]
    names = {pool.name}.union(*linked)
    alike = tuple(one.name for one in cluster.pools if one.name in names)
    now = int(pool.host_memory_gib_per_node or 0)
    return Lever([gib for gib in HOST_GIB if gib > now], lambda gib: HostMemory(alike, gib))


def _smaller_batch(cluster: ClusterSpec, model: ModelSpec) -> Lever:
    """Multiples of the devices: every crew's split can be as even as it likes."""
    devices = sum(pool.devices for pool in cluster.pools)
    each = sorted({max(1, size // 4) for size in ROUND}, reverse=True)
    return Lever([b * devices for b in each if b * devices < model.global_batch], Batch)


def _table_precision(model: ModelSpec) -> Iterator[Lever]:
    allowed = model.precision.embeddings
    if all(dtype.bytes > Dtype.FP16.bytes for dtype in allowed):
        yield Lever((1,), lambda _: TablePrecision(allowed, Dtype.FP16))


def _lifted(model: ModelSpec) -> Iterator[Lever]:
    """For each kind of constraint: the largest tables first."""

    def parameters(group: TableGroup) -> int:
        return group.num_embeddings * group.embedding_dim

    def lever(limit: Limit) -> Lever:
        bound = [g for g in model.tables if getattr(g.constraints, limit) is not None]
        names = tuple(group.name for group in sorted(bound, key=parameters, reverse=True))
        return Lever(range(1, len(names) + 1), lambda count: Lift(limit, names[:count]))

    yield from map(lever, LIMITS)


def _left_out(cluster: ClusterSpec, matched: bool) -> Iterator[Lever]:
    if len(cluster.pools) == 1:
        return
    for pool in cluster.pools:
        if matched:
            yield Lever((1,), lambda _, name=pool.name: Without(name))  # type: ignore[misc]
        elif pool.min_nodes:
            yield Lever((1,), lambda _, name=pool.name: MayRest(name))  # type: ignore[misc]


def cures(cluster: ClusterSpec, model: ModelSpec, matched: bool, fits: Fits) -> tuple[Cure, ...]:
    """Changes that suffice, single ones if there are any; none if nothing known helps.

    Args:
        model: with the job's global batch; the job has no plan.
        fits: of any job.
    """
    known: dict[tuple[Change, ...], bool] = {(): False}

    def cured(changes: Sequence[Change]) -> bool:
        key = tuple(changes)
        if key not in known:
            known[key] = fits(*Cure(key).apply(cluster, model))
        return known[key]

    usable = levers(cluster, model, matched)
    found: list[Cure] = []
    for lever in usable:
        found += _reduced((lever,), cured)
    if not found:
        for pair in combinations(usable, 2):
            found += _reduced(pair, cured)
            if len(found) == MOST_PAIRS:
                break
    return tuple(found or _reduced(usable, cured))


def _reduced(chosen: Sequence[Lever], cured: Callable[[Sequence[Change]], bool]) -> list[Cure]:
    """The levers at their most, then each in turn at its least; nothing if that is no cure."""
    changes = [lever.at(len(lever)) for lever in chosen]
    if not cured(changes):
        return []
    kept: list[Change] = []
    for index, lever in enumerate(chosen):
        rest = changes[index + 1 :]
        if not cured([*kept, *rest]):
            kept.append(_smallest(lever, lambda change, rest=rest: cured([*kept, change, *rest])))  # type: ignore[misc]
    return [Cure(tuple(kept))]


def _smallest(lever: Lever, enough: Callable[[Change], bool]) -> Change:
    """The smallest change that is enough; the largest is. Sizes double first: what is far too much
    takes long to plan."""
    low, high = 0, 1
    while high < len(lever) and not enough(lever.at(high)):
        low, high = high, min(2 * high, len(lever))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(lever.at(middle)) else (middle, high)
    return lever.at(high)
