"""Cluster spec: pools of identical nodes, and the bridge between pools."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from planner.specs.base import (
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Spec,
    problem,
)
from planner.specs.units import gbps_to_bytes_per_s


class PoolSpec(Spec):
    """Identical nodes of one device type under one collectives library."""

    name: Name
    device: str
    """A device type that hwplan ships, or the path of a profile (relative to this file)."""
    nodes: Annotated[int, Field(gt=0, le=100_000)]
    devices_per_node: Annotated[int, Field(gt=0, le=1_000)]
    min_nodes: NonNegativeInt = 0
    """Nodes that every plan must use; 0 lets a plan leave the pool out."""
    nic_gbps_per_device: PositiveFloat | None = None
    """Scale-out bandwidth; the device profile's when left out."""
    host_memory_gib_per_node: PositiveFloat | None = None
    """Host memory for tables, shared by the node's devices; the profile's when left out."""
    cpu_cores: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    """CPU pools: the cores that one node's workers share and are pinned to."""
    dollars_per_device_hour: PositiveFloat | None = None
    """Price of one device with its share of the node, for ``hwplan sweep`` and ``size``; no plan
    depends on it."""
    watts_per_device: PositiveFloat | None = None
    """Power of one device, for the same; the device profile's when left out."""

    @property
    def devices(self) -> int:
        """Devices in the pool."""
        return self.nodes * self.devices_per_node

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


class BridgeSpec(Spec):
    """Path between pools that uses neither NCCL nor RCCL (gloo over host memory)."""

    gbps: PositiveFloat
    """Bandwidth of one rail, each way."""
    latency_us: NonNegativeFloat
    rails: PositiveInt = 1
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
    """Pools and the bridge between them."""

    name: Name
    description: str = ""
    pools: Annotated[tuple[PoolSpec, ...], Field(min_length=1)]
    bridge: BridgeSpec | None = None
    reference_device: str = "b200"
    """Device type that the naive port's recipe was made for."""

    def pool(self, name: str) -> PoolSpec:
        """The pool called ``name`` (KeyError if there is none)."""
        return next(pool for pool in self.pools if pool.name == name)

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
        return self
