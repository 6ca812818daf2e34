"""Cluster spec: pools of identical nodes, the bridge between pools, links that let pools be joined.

Ranks of a pool are numbered node by node. G replica groups cut them into G equal runs, each of
whole nodes or an equal part of one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Annotated

from pydantic import Field, model_validator

from planner.specs.base import (
    Gbps,
    Name,
    NonNegativeInt,
    Spec,
    problem,
)
from planner.specs.units import gbps_to_bytes_per_s

JOIN = "+"
"""Between the names of pools that work as one."""


def group_shape(nodes: int, devices_per_node: int, groups: int) -> tuple[int, int] | None:
    """(nodes, devices per node) of one replica group; None if the pool cannot be cut so."""
    if nodes % groups == 0:
        return nodes // groups, devices_per_node
    per_node, rest = divmod(groups, nodes)
    if rest == 0 and devices_per_node % per_node == 0:
        return 1, devices_per_node // per_node
    return None


class PoolSpec(Spec):
    """Identical nodes of one device type under one collectives library."""

    name: Name
    device: str
    """A device type that hwplan ships, or the path of a profile (relative to this file)."""
    nodes: Annotated[int, Field(gt=0, le=100_000)]
    devices_per_node: Annotated[int, Field(gt=0, le=1_000)]
    min_nodes: NonNegativeInt = 0
    """Nodes that every plan must use; 0 lets a plan leave the pool out."""
    nic_gbps_per_device: Gbps | None = None
    """Scale-out bandwidth; the device profile's when left out."""
    host_memory_gib_per_node: Annotated[float, Field(ge=1e-3, le=1e7)] | None = None
    """Host memory for tables, shared by the node's devices; the profile's when left out."""
    reserved_memory: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """Share of each device's memory that plans leave free, beside the allocator's reserve."""
    cpu_cores: (
        Annotated[tuple[Annotated[int, Field(ge=0, le=100_000)], ...], Field(min_length=1)] | None
    ) = None
    """CPU pools: the cores that one node's workers share and are pinned to."""
    dollars_per_device_hour: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    """Price of one device with its share of the node, for ``hwplan sweep`` and ``size``; no plan
    depends on it."""
    watts_per_device: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    """Power of one device, for the same; the device profile's when left out."""

    @property
    def devices(self) -> int:
        """Devices in the pool."""
        return self.nodes * self.devices_per_node

    @property
    def parts(self) -> tuple[PoolSpec, ...]:
        """The cluster file's pools whose nodes work here, each with those nodes."""
        return (self,)

    @property
    def group_counts(self) -> tuple[int, ...]:
        """Every number of equal replica groups that the pool can be cut into, 1 first."""
        return tuple(
            groups
            for groups in range(1, self.devices + 1)
            if group_shape(self.nodes, self.devices_per_node, groups) is not None
        )

    def group(self, groups: int) -> PoolSpec:
        """One of so many equal replica groups.

        Host memory and cores stay those of a whole node, also where the group is a part of one.

        Raises:
            ValueError: the pool cannot be cut so.
        """
        shape = group_shape(self.nodes, self.devices_per_node, groups)
        if shape is None:
            raise ValueError(f"{self.nodes} x {self.devices_per_node} devices in {groups} groups")
        nodes, devices = shape
        return self.model_copy(update={"nodes": nodes, "devices_per_node": devices})

    @model_validator(mode="after")
    def _check(self) -> PoolSpec:
        if self.min_nodes > self.nodes:
            raise problem(
                f"min_nodes is {self.min_nodes}, but the pool has {self.nodes} nodes",
                "lower min_nodes, or raise nodes",
            )
        cores = self.cpu_cores or ()
        if len(set(cores)) < len(cores):
            raise problem(f"cpu_cores {list(cores)} names a core twice", "list each core once")
        return self


class JoinedPool(PoolSpec):
    """Linked pools that work as one: the nodes of the first, then those of the next.

    With fewer nodes than it has, the last ones rest. ``min_nodes`` leaves a node to every member:
    without one, the others are a pool of their own.
    """

    name: str
    members: tuple[PoolSpec, ...]
    link_gbps_per_device: Gbps
    """Of the slowest link between two members."""

    @property
    def parts(self) -> tuple[PoolSpec, ...]:
        left, found = self.nodes, []
        for member in self.members:
            nodes = min(left, member.nodes)
            left -= nodes
            if nodes:
                found.append(member.model_copy(update={"nodes": nodes}))
        return tuple(found)

    def group(self, groups: int) -> PoolSpec:
        """One replica group; where each lies inside one member, none of them uses the link."""
        one = super().group(groups)
        if any(part.nodes % one.nodes for part in self.parts):
            return one
        update = {"name": self.name, "nodes": one.nodes, "devices_per_node": one.devices_per_node}
        return self.members[0].model_copy(update=update)


class LinkSpec(Spec):
    """Network that one vendor's collectives can use between pools, each with each."""

    pools: Annotated[tuple[Name, ...], Field(min_length=2)]
    gbps_per_device: Gbps
    """Bandwidth of one device to the other pools, each way."""


OWN_FIELDS = ("name", "nodes", "min_nodes", "dollars_per_device_hour", "watts_per_device")
"""In which pools that work as one may differ, besides in which cores they have."""


def _unlike(one: PoolSpec, other: PoolSpec) -> str:
    """What keeps two pools from working as one; empty if nothing does."""
    for name in PoolSpec.model_fields:
        values = [getattr(pool, name) for pool in (one, other)]
        if name == "cpu_cores":
            values = [len(cores or ()) for cores in values]
        if name not in OWN_FIELDS and values[0] != values[1]:
            return name
    return ""


class BridgeSpec(Spec):
    """Path between pools that uses neither NCCL nor RCCL (gloo over host memory)."""

    gbps: Gbps
    """Bandwidth of one rail, each way."""
    latency_us: Annotated[float, Field(ge=0, le=1e6)]
    rails: Annotated[int, Field(gt=0, le=1_000)] = 1
    """Leaders per pool that exchange their slice in parallel."""

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of one rail, each way, bytes per second."""
        return gbps_to_bytes_per_s(self.gbps)

    @property
    def latency_s(self) -> float:
        """Latency of one message, seconds."""
        return self.latency_us * 1e-6


class ClusterSpec(Spec):
    """Pools, the bridge between them, and links over which alike pools may work as one."""

    name: Name
    description: str = ""
    pools: Annotated[tuple[PoolSpec, ...], Field(min_length=1)]
    bridge: BridgeSpec | None = None
    links: tuple[LinkSpec, ...] = ()
    reference_device: str = "b200"
    """Device type that the naive port's recipe was made for."""

    def pool(self, name: str) -> PoolSpec:
        """The pool called ``name``; ``a+b``: linked pools as one (KeyError if there is none)."""
        known = {pool.name: pool for pool in self.pools}
        members = tuple(known[part] for part in name.split(JOIN))
        if len(members) == 1:
            return members[0]
        joined = self.joined(members)
        if joined is None:
            raise KeyError(name)
        return joined

    def joined(self, members: Sequence[PoolSpec]) -> JoinedPool | None:
        """Several pools as one; None unless all are alike and each is linked with each."""
        speeds = [self._link_gbps(one, other) for one, other in combinations(members, 2)]
        if not speeds or not min(speeds):
            return None
        first, last = members[0], members[-1]
        nodes = sum(pool.nodes for pool in members)
        shared = {n: getattr(first, n) for n in PoolSpec.model_fields if n not in OWN_FIELDS}
        return JoinedPool(
            **shared,
            name=JOIN.join(pool.name for pool in members),
            nodes=nodes,
            min_nodes=nodes - last.nodes + max(1, last.min_nodes),
            members=tuple(members),
            link_gbps_per_device=min(speeds),
        )

    def with_pools(self, pools: tuple[PoolSpec, ...]) -> ClusterSpec:
        """The cluster with these pools instead, and those links that are between alike ones."""
        known = {pool.name: pool for pool in pools}
        links = tuple(
            LinkSpec(pools=pair, gbps_per_device=link.gbps_per_device)
            for link in self.links
            for pair in combinations((name for name in link.pools if name in known), 2)
            if not _unlike(known[pair[0]], known[pair[1]])
        )
        return self.model_copy(update={"pools": pools, "links": links})

    def ways(self) -> Iterator[tuple[PoolSpec, ...]]:
        """Every way to join linked pools or not, all apart first; pools in the file's order."""
        yield from self._ways(self.pools) if self.links else (self.pools,)

    def _ways(self, left: tuple[PoolSpec, ...]) -> Iterator[tuple[PoolSpec, ...]]:
        if not left:
            yield ()
            return
        first, others = left[0], left[1:]
        for count in range(len(left)):
            for company in combinations(others, count):
                one = self.joined((first, *company)) if company else first
                if one is not None:
                    rest = tuple(pool for pool in others if pool not in company)
                    yield from ((one, *way) for way in self._ways(rest))

    def _link_gbps(self, one: PoolSpec, other: PoolSpec) -> float:
        """Of the fastest link between two pools; 0 without any, or where they are not alike."""
        if one.name == other.name or _unlike(one, other):
            return 0.0
        both = {one.name, other.name}
        return max(
            (link.gbps_per_device for link in self.links if both <= {*link.pools}), default=0.0
        )

    @model_validator(mode="after")
    def _check(self) -> ClusterSpec:
        names = [pool.name for pool in self.pools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise problem(f"two pools are named {twice[0]!r}", "give every pool its own name")
        if len(self.pools) > 1 and self.bridge is None:
            raise problem(
                "several pools, but no bridge between them",
                "add bridge: {gbps: …, latency_us: …}",
            )
        self._check_links()
        return self

    def _check_links(self) -> None:
        known = {pool.name: pool for pool in self.pools}
        for link in self.links:
            for name in link.pools:
                if name not in known:
                    raise problem(
                        f"a link names pool {name!r}, which is not in the file",
                        f"use the names of pools: {', '.join(known)}",
                    )
            for one, other in combinations((known[name] for name in link.pools), 2):
                if one.name == other.name:
                    raise problem(f"a link names pool {one.name!r} twice", "name each pool once")
                unlike = _unlike(one, other)
                if unlike:
                    raise problem(
                        f"pools {one.name!r} and {other.name!r} are linked, but differ in {unlike}",
                        "link pools of one kind only: the ranks of a joined pool are alike",
                    )
