"""Axes of a sweep: what varies, over which values, and the job at each point.

    nodes:POOL=1..8        nodes of a pool; 0 leaves it out
    nodes:POOL=1,2,4       single values and ranges may be mixed: 1..4,8
    device:POOL=h200,b200  another device type in the same nodes
    nic_gbps:POOL=200,400  scale-out bandwidth of each device
    bridge_gbps=40,100     bandwidth of one rail of the bridge
    global_batch=8192,16384

POOL is the name of a pool, or a device type that one pool has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NoReturn

from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.errors import HwplanError, UsageError
from planner.specs.load import load_device

Value = int | float | str

MOST_VALUES = 10_000
"""Of one axis."""
MOST_NODES = 100_000
"""Of one pool, as in a cluster file."""
LARGEST_BATCH = 2**40
EXAMPLES = {
    "nodes": "nodes:POOL=1..8",
    "device": "device:POOL=h200,b200",
    "nic_gbps": "nic_gbps:POOL=200,400",
    "bridge_gbps": "bridge_gbps=40,100",
    "global_batch": "global_batch=8192,16384",
}
OF_A_POOL = ("nodes", "device", "nic_gbps")


@dataclass(frozen=True)
class Axis:
    """One thing that varies."""

    kind: str
    """A key of ``EXAMPLES``."""
    pool: str | None
    """Name of the pool, for those ``OF_A_POOL``."""
    values: tuple[Value, ...]

    @property
    def name(self) -> str:
        """``nodes:amd``, ``global_batch``."""
        return f"{self.kind}:{self.pool}" if self.pool else self.kind


@dataclass(frozen=True)
class Point:
    """The job at one point of a sweep."""

    settings: Mapping[str, Value]
    """Value of each axis, by its name."""
    frame: ClusterSpec
    """The cluster with every axis applied but the nodes."""
    nodes: tuple[int, ...]
    """Of each pool of ``frame``; 0 leaves the pool out."""
    global_batch: int

    @property
    def cluster(self) -> ClusterSpec | None:
        """The cluster at this point; None if it has no node."""
        return with_nodes(self.frame, self.nodes)

    @property
    def devices(self) -> int:
        """Devices of the cluster."""
        counts = zip(self.frame.pools, self.nodes, strict=True)
        return sum(nodes * pool.devices_per_node for pool, nodes in counts)


def with_nodes(cluster: ClusterSpec, nodes: Sequence[int]) -> ClusterSpec | None:
    """The cluster with so many nodes in each pool, pools without any left out.

    ``min_nodes`` is lowered where a pool has fewer. None if no node is left.
    """
    pools = tuple(
        pool.model_copy(update={"nodes": count, "min_nodes": min(pool.min_nodes, count)})
        for pool, count in zip(cluster.pools, nodes, strict=True)
        if count
    )
    return cluster.with_pools(pools) if pools else None


def parse_axes(texts: Sequence[str], cluster: ClusterSpec) -> tuple[Axis, ...]:
    """The axes of a sweep.

    Raises:
        UsageError: naming the axis: unknown, malformed, out of range or given twice.
    """
    axes: list[Axis] = []
    for text in texts:
        axis = parse_axis(text, cluster)
        if axis.name in {one.name for one in axes}:
            _refuse(
                f"--vary {text}",
                f"{axis.name} is given twice",
                "give each axis once, with all its values",
            )
        axes.append(axis)
    return tuple(axes)


def parse_axis(text: str, cluster: ClusterSpec) -> Axis:
    """One axis from its spelling on the command line.

    Raises:
        UsageError: naming the axis.
    """
    where = f"--vary {text}"
    target, equals, listed = text.partition("=")
    kind, colon, pool = target.partition(":")
    if kind not in EXAMPLES:
        _refuse(where, "unknown axis", f"use one of {', '.join(EXAMPLES.values())}")
    if not equals or not listed or bool(pool) != (kind in OF_A_POOL) or (colon and not pool):
        _refuse(where, "not an axis and its values", f"write it like {EXAMPLES[kind]}")
    found = find_pool(cluster, pool, where) if pool else None
    if kind == "bridge_gbps" and cluster.bridge is None:
        _refuse(where, "the cluster has no bridge", "leave the axis out")
    values: dict[Value, None] = {}
    for item in listed.split(","):
        values.update(dict.fromkeys(_values(item, kind, where)))
        if len(values) > MOST_VALUES:
            _refuse(where, f"more than {MOST_VALUES:,} values", "give fewer")
    if found is not None and kind == "device":
        values = {_device(str(value), found, where): None for value in values}
    return Axis(kind, None if found is None else found.name, tuple(values))


def parse_max_nodes(texts: Sequence[str], cluster: ClusterSpec) -> dict[str, int]:
    """Most nodes by pool, from ``8`` (every pool) or ``POOL=8``; the last word on a pool counts.

    Raises:
        UsageError: no such pool, or not a number of nodes.
    """
    found: dict[str, int] = {}
    for text in texts:
        where = f"--max-nodes {text}"
        name, equals, number = text.rpartition("=")
        if not re.fullmatch(r"\d{1,6}", number) or not 0 < int(number) <= MOST_NODES:
            _refuse(where, "not a number of nodes", "write 8, or POOL=8")
        pools = (find_pool(cluster, name, where),) if equals else cluster.pools
        found.update({pool.name: int(number) for pool in pools})
    return found


def find_pool(cluster: ClusterSpec, name: str, where: str) -> PoolSpec:
    """The pool of that name, else the only one of that device type.

    Raises:
        UsageError: there is none, or several pools have the device; at ``where``.
    """
    names = ", ".join(f"{pool.name} ({pool.device})" for pool in cluster.pools)
    named = [pool for pool in cluster.pools if pool.name == name]
    found = named or [pool for pool in cluster.pools if pool.device == name]
    if not found:
        _refuse(where, f"the cluster has no pool {name!r}", f"use one of {names}")
    if len(found) > 1:
        _refuse(where, f"several pools have device {name}", f"name the pool: {names}")
    return found[0]


def _values(item: str, kind: str, where: str) -> Iterator[Value]:
    """The values of one item between commas."""
    if kind == "device":
        if not item.strip():
            _refuse(where, "an empty device type", f"write it like {EXAMPLES[kind]}")
        yield item.strip()
    elif kind in ("nodes", "global_batch"):
        low, high = (0, MOST_NODES) if kind == "nodes" else (1, LARGEST_BATCH)
        match = re.fullmatch(r"\s*(\d{1,15})(?:\.\.(\d{1,15}))?\s*", item, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not match or first > last:
            _refuse(where, f"{item!r} is neither a whole number nor a range", "write 4 or 1..8")
        if first < low or last > high:
            _refuse(where, f"{item!r} is not between {low} and {high:,}", "give numbers in range")
        if last - first >= MOST_VALUES:
            _refuse(where, f"{item!r} has more than {MOST_VALUES:,} values", "list fewer")
        yield from range(first, last + 1)
    else:
        try:
            number = float(item)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            _refuse(where, f"{item!r} is not a finite number above 0", "give Gb/s, such as 400")
        yield number


def _device(name: str, pool: PoolSpec, where: str) -> str:
    """The device type as a pool names it, checked."""
    try:
        profile = load_device(name)
    except HwplanError as error:
        what = error.render().partition("\n")[0]
        fix = error.fix or "correct the profile"
        raise UsageError(f"no usable device: {what}", field=where, fix=fix) from None
    if profile.is_cpu != (pool.cpu_cores is not None):
        _refuse(
            where,
            f"pool {pool.name} cannot turn from {pool.device} into {name}",
            "swap accelerators for accelerators: CPU pools have cores of their own",
        )
    is_path = name.endswith((".yaml", ".yml")) or "/" in name
    return str(Path(name).resolve()) if is_path else profile.name


def _refuse(where: str, problem: str, fix: str) -> NoReturn:
    raise UsageError(problem, field=where, fix=fix)


def points(
    cluster: ClusterSpec, global_batch: int, axes: Sequence[Axis], most: int
) -> tuple[Point, ...]:
    """Every combination of the axes' values, the last axis fastest.

    Raises:
        UsageError: there are more than ``most``.
    """
    count = math.prod(len(axis.values) for axis in axes)
    if count > most:
        sizes = " x ".join(f"{len(axis.values)} ({axis.name})" for axis in axes)
        raise UsageError(
            f"this sweep has {count:,} points: {sizes}",
            field="--vary",
            fix=f"give fewer values, or raise --max-points (now {most:,})",
        )
    return tuple(
        _point(cluster, global_batch, axes, values)
        for values in product(*(axis.values for axis in axes))
    )


def _point(
    cluster: ClusterSpec, global_batch: int, axes: Sequence[Axis], values: Sequence[Value]
) -> Point:
    nodes = {pool.name: pool.nodes for pool in cluster.pools}
    frame = cluster
    for axis, value in zip(axes, values, strict=True):
        if axis.kind == "nodes":
            nodes[str(axis.pool)] = int(value)
        elif axis.kind == "global_batch":
            global_batch = int(value)
        elif axis.kind == "bridge_gbps" and frame.bridge is not None:
            bridge = frame.bridge.model_copy(update={"gbps": float(value)})
            frame = frame.model_copy(update={"bridge": bridge})
        elif axis.kind == "nic_gbps":
            frame = _changed(frame, axis, {"nic_gbps_per_device": float(value)})
        elif axis.kind == "device":
            frame = _changed(frame, axis, _as_device(cluster, axis, str(value)))
    return Point(
        settings={axis.name: value for axis, value in zip(axes, values, strict=True)},
        frame=frame,
        nodes=tuple(nodes[pool.name] for pool in frame.pools),
        global_batch=global_batch,
    )


def _changed(cluster: ClusterSpec, axis: Axis, fields: Mapping[str, object]) -> ClusterSpec:
    """The cluster with fields of the axis's pool replaced."""
    pools = tuple(
        pool.model_copy(update=fields) if pool.name == axis.pool else pool for pool in cluster.pools
    )
    return cluster.with_pools(pools)


def _as_device(cluster: ClusterSpec, axis: Axis, device: str) -> dict[str, object]:
    """Fields of the axis's pool that another device changes.

    Price and power are those of a device, not of a pool: they are taken from the pool itself or
    another one that has the device in the cluster file, and are unknown if there is none.
    """
    own = [pool for pool in cluster.pools if pool.name == axis.pool]
    alike = next((pool for pool in (*own, *cluster.pools) if pool.device == device), None)
    return {
        "device": device,
        "dollars_per_device_hour": alike.dollars_per_device_hour if alike else None,
        "watts_per_device": alike.watts_per_device if alike else None,
    }
