"""Collectives of one pool: scale-up fabric inside a node, NICs between nodes.

Inside a node of L ranks::

    t = latency + per_rank_latency * (L - 1) + wire bytes / (efficiency * link(L))

``link(L)`` is a device's whole bandwidth behind a switch; in a full mesh of N devices a group of L
uses L - 1 of the N - 1 links, so it gets (L - 1) / (N - 1) of it. Wire bytes per rank of a buffer
of S bytes: all-reduce 2 (L-1)/L S, all-gather and reduce-scatter (L-1)/L S (S the whole buffer),
all-to-all (W-1)/W S. ``pool_sum`` is what the bridge does inside a pool, a reduce and a broadcast:
the bytes of an all-reduce.

Across nodes reduce-type collectives are hierarchical: reduce-scatter inside, the 1/L slice between
nodes over each rank's NIC, all-gather inside. A NIC moves b bytes in
(b + half_bytes) / (efficiency * NIC): half of its rate at ``half_bytes``. An all-to-all uses
fabric and NIC at the same time. CPU workers copy through host memory with the core that also
computes: their link is divided among the workers that share it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from planner.cost.context import PoolContext
from planner.specs.device import CollectiveConstants, Topology

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "pool_sum"]


@dataclass(frozen=True)
class Fabric:
    """One collective's constants for one pool, efficiencies applied."""

    local: int
    """Ranks of one scale-up domain (node)."""
    nodes: int
    fixed_s: float
    """Latency of the collective over the whole pool."""
    link_bytes_per_s: float
    nic_bytes_per_s: float

    @property
    def ranks(self) -> int:
        """Ranks of the pool."""
        return self.local * self.nodes

    def spread_seconds(self, bytes_per_peer: float) -> float:
        """One rank sends ``bytes_per_peer`` to (or receives it from) every other rank."""
        inside = (self.local - 1) * bytes_per_peer / self.link_bytes_per_s
        across = (self.ranks - self.local) * bytes_per_peer / self.nic_bytes_per_s
        return max(inside, across)

    def scatter_seconds(self, total_bytes: float) -> float:
        """Half of an all-reduce over the pool (reduce-scatter or all-gather), no latency."""
        inside = (self.local - 1) / self.local * total_bytes / self.link_bytes_per_s
        slice_bytes = total_bytes / self.local
        across = (self.nodes - 1) / self.nodes * slice_bytes / self.nic_bytes_per_s
        return inside + across


def fabric(ctx: PoolContext, collective: Collective, spanning_nodes: bool = True) -> Fabric:
    """Constants of ``collective`` over the pool, or over one node of it."""
    scale_up, network = ctx.device.scale_up, ctx.device.network
    found: CollectiveConstants | None = getattr(scale_up.collectives, collective)
    constants = found or scale_up.collectives.all_reduce
    domain = int(scale_up.devices.value)
    local = min(ctx.pool.devices_per_node, domain)
    nodes = math.ceil(ctx.ranks / local) if spanning_nodes else 1
    link = scale_up.bytes_per_s.value * constants.efficiency.value
    if scale_up.topology is Topology.MESH:
        link *= max(local - 1, 1) / (domain - 1)
    fixed_s = 0.0
    if local > 1:
        fixed_s += constants.latency_s.value + constants.per_rank_latency_s.value * (local - 1)
    nic = ctx.nic_bytes_per_s * network.efficiency.value
    if nodes > 1:
        rounds = math.ceil(math.log2(nodes))
        fixed_s += network.latency_s.value * rounds + network.half_bytes.value / nic
    if scale_up.topology is Topology.HOST:
        link *= ctx.compute_share
        fixed_s /= ctx.compute_share
    return Fabric(local, nodes, fixed_s, link, nic)


def collective_seconds(ctx: PoolContext, collective: Collective, total_bytes: float) -> float:
    """Seconds of one collective over the whole pool.

    Args:
        total_bytes: the buffer; for all_gather and reduce_scatter the gathered whole; for
            all_to_all what one rank sends, its own part included.
    """
    if ctx.ranks == 1:
        return 0.0
    paths = fabric(ctx, collective)
    if collective == "all_to_all":
        return paths.fixed_s + paths.spread_seconds(total_bytes / paths.ranks)
    halves = 2 if collective in ("all_reduce", "pool_sum") else 1
    return paths.fixed_s + halves * paths.scatter_seconds(total_bytes)
