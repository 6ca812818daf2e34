"""The bridge: exact sums over the ranks of all pools, where no collectives library spans them.

NCCL and RCCL do not interoperate, so a tensor is reduced inside each pool over the vendor's own
library, summed between the pools' rail leaders over gloo in host memory, and broadcast inside
each pool again. Rail i is the link between the i-th ranks of all pools and carries slice i.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from planner.specs.plan import Plan

VENDOR_BACKEND = "cpu:gloo,cuda:nccl"
"""Of a GPU pool. PyTorch for ROCm calls RCCL ``nccl``."""
COLLECTIVE_TIMEOUT = timedelta(minutes=5)
CHUNK_BYTES = 8 << 20
"""Of a device tensor's way through host memory: while a chunk travels, the next is copied."""
STAGING_BYTES = 128 << 20
"""Pinned host memory of one rank, at most."""
PROBE_BYTES = 16 << 20
"""Of the all-reduce that measures the bridge."""
PROBES = 3


@dataclass(frozen=True)
class JobGroups:
    """Process groups of one rank. The default group is the world, over gloo."""

    pool: dist.ProcessGroup
    """All ranks of this rank's pool, for the trainer."""
    replica: dist.ProcessGroup
    """Those of its replica group, for the trainer: TorchRec's sharding group."""
    bridge_pool: dist.ProcessGroup
    """The same ranks, for the bridge alone: it runs on a thread of its own, and collectives of
    two threads in one group would be matched up wrongly."""
    bridge_leaders: tuple[int, ...]
    """World ranks of this pool's rail leaders, rail 0 first."""
    rail: dist.ProcessGroup | None
    """Leaders of all pools on this rank's rail; None when it leads none, or in a single pool."""
    pools: int


def build_groups(plan: Plan, world_rank: int, timeout: timedelta = COLLECTIVE_TIMEOUT) -> JobGroups:
    """Create every group of the job on this rank; all ranks must call it, once.

    ``torch.distributed.new_group`` counts the groups created so far, so every rank creates every
    group in the same order, its own or not.
    """
    own_pool, pool_rank = plan.pool_of_rank(world_rank)
    pool_groups, replica_groups, first = {}, {}, 0
    for name, pool in plan.pools.items():
        ranks = list(range(first, first + pool.ranks))
        first += pool.ranks
        # A rank outside the group may lack the vendor's library; it only counts the group.
        on_gpu = plan.cluster.pool(name).cpu_cores is None and name == own_pool
        trainer, bridge = (VENDOR_BACKEND, "nccl") if on_gpu else ("gloo", "gloo")
        pool_groups[name] = [
            dist.new_group(ranks, timeout=timeout, backend=backend) for backend in (trainer, bridge)
        ]
        size = pool.group_ranks
        replica_groups[name] = (
            [
                dist.new_group(ranks[low : low + size], timeout=timeout, backend=trainer)
                for low in range(0, pool.ranks, size)
            ]
            if pool.replica_groups > 1
            else pool_groups[name][:1]
        )
    leaders = rail_leaders(plan)
    rails = [dist.new_group(list(rail), timeout=timeout, backend="gloo") for rail in leaders]
    own = list(plan.pools).index(own_pool)
    pool_group, bridge_pool_group = pool_groups[own_pool]
    return JobGroups(
        pool=pool_group,
        replica=replica_groups[own_pool][pool_rank // plan.pools[own_pool].group_ranks],
        bridge_pool=bridge_pool_group,
        bridge_leaders=tuple(rail[own] for rail in leaders),
        rail=rails[pool_rank] if pool_rank < len(rails) else None,
        pools=len(plan.pools),
    )


def rail_leaders(plan: Plan) -> list[tuple[int, ...]]:
    """World ranks on each rail, one per pool; no more rails than the smallest pool has ranks.

    Empty for a single pool.
    """
    if len(plan.pools) == 1 or plan.cluster.bridge is None:
        return []
    ranks = [pool.ranks for pool in plan.pools.values()]
    starts = [sum(ranks[:index]) for index in range(len(ranks))]
    rails = min(plan.cluster.bridge.rails, *ranks)
    return [tuple(start + rail for start in starts) for rail in range(rails)]


@dataclass
class Traffic:
    """What this rank sent to other pools so far."""

    calls: int = 0
    bytes: int = 0
    """On the wire, each way: a ring all-reduce of n bytes among P leaders sends 2 (P-1)/P n."""
    seconds: float = 0.0
    """Wall time inside the bridge, pool-internal legs included."""


@dataclass
class HierarchicalBridge:
    """Sums tensors over all ranks of all pools, in place.

    Every rank must call it in the same order with equally shaped tensors. Not thread-safe, but it
    may run on another thread than the trainer's collectives (its groups are its own).
    """

    groups: JobGroups
    wire: torch.dtype | None = None
    """Number format between pools of tensors that may be rounded; None: their own."""
    traffic: Traffic = field(default_factory=Traffic)
    _staging: torch.Tensor | None = None
    _stream: torch.cuda.Stream | None = None

    def all_reduce_sum(self, tensor: torch.Tensor, *, exact: bool = True) -> None:
        """Replace ``tensor`` (any shape, CPU or CUDA) by its sum over all ranks of the job.

        For CUDA tensors the result is ordered on the caller's current stream.

        Args:
            exact: whether it may not travel between pools in the narrower ``wire`` format.
        """
        begin = time.perf_counter()
        wire = tensor.dtype if exact or self.wire is None else self.wire
        flat = tensor.detach().contiguous().view(-1)
        if tensor.is_cuda:
            self._on_own_stream(flat, wire)
        else:
            self._sum(flat, wire)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))
        self.traffic.calls += 1
        self.traffic.seconds += time.perf_counter() - begin

    def measure(self) -> float | None:
        """Bandwidth of this rank's rail, bytes per second each way; None if it leads none.

        That of an all-reduce in host memory, the fastest of a few. Every rank must call it.
        """
        if self.groups.rail is None:
            return None
        probe = torch.zeros(PROBE_BYTES // 4)
        times = []
        for _ in range(PROBES):
            dist.barrier(self.groups.rail)
            begin = time.perf_counter()
            dist.all_reduce(probe, group=self.groups.rail)
            times.append(time.perf_counter() - begin)
        pools = self.groups.pools
        return 2 * (pools - 1) / pools * PROBE_BYTES / min(times)

    def _on_own_stream(self, flat: torch.Tensor, wire: torch.dtype) -> None:
        """Keep waits for the host copy off the stream that computes gradients."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
        caller = torch.cuda.current_stream(flat.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            self._sum(flat, wire)
        flat.record_stream(self._stream)
        caller.wait_stream(self._stream)

    def _sum(self, flat: torch.Tensor, wire: torch.dtype) -> None:
        group = self.groups.bridge_pool
        pool_size = group.size()
        if self.groups.pools == 1:
            if pool_size > 1:
                dist.all_reduce(flat, group=group)
            return
        if pool_size > 1:
            for leader, part in self._slices(flat):
                dist.reduce(part, dst=leader, group=group)
        for leader, part in self._slices(flat):
            if leader == dist.get_rank():
                self._sum_between_pools(part, wire)
        if pool_size > 1:
            for leader, part in self._slices(flat):
                dist.broadcast(part, src=leader, group=group)

    def _slices(self, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(leader's world rank, its slice): one per rail, equal up to rounding, none empty."""
        leaders = self.groups.bridge_leaders
        bounds = [rail * flat.numel() // len(leaders) for rail in range(len(leaders) + 1)]
        for leader, (low, high) in zip(leaders, pairwise(bounds), strict=True):
            if low < high:
                yield leader, flat[low:high]

    def _sum_between_pools(self, part: torch.Tensor, wire: torch.dtype) -> None:
        """All-reduce among the pools' leaders of this rail, in host memory."""
        pools = self.groups.pools
        self.traffic.bytes += 2 * (pools - 1) * part.numel() * wire.itemsize // pools
        if part.is_cuda:
            for block in torch.split(part, STAGING_BYTES // wire.itemsize):
                self._staged_sum(block, wire)
        elif wire == part.dtype:
            dist.all_reduce(part, group=self.groups.rail)
        else:
            rounded = part.to(wire)
            dist.all_reduce(rounded, group=self.groups.rail)
            part.copy_(rounded)

    def _staged_sum(self, block: torch.Tensor, wire: torch.dtype) -> None:
        """Chunks through pinned memory: all copies to the host are queued at once, each chunk
        travels when its copy has ended, and is copied back while the later ones still travel."""
        stream = torch.cuda.current_stream(block.device)
        size = CHUNK_BYTES // wire.itemsize
        chunks = list(
            zip(
                torch.split(block, size),
                torch.split(self._host_buffer(block.numel(), wire), size),
                strict=True,
            )
        )
        copied = []
        for device, host in chunks:
            # The cast happens on the device: half of the bytes over its link too.
            host.copy_(device.to(wire), non_blocking=True)
            copied.append(stream.record_event())
        travelling = []
        for (_, host), event in zip(chunks, copied, strict=True):
            event.synchronize()
            travelling.append(dist.all_reduce(host, group=self.groups.rail, async_op=True))
        for (device, host), work in zip(chunks, travelling, strict=True):
            work.wait()
            device.copy_(host.to(device.device, non_blocking=True))
        # The next call reuses the buffer.
        stream.synchronize()

    def _host_buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Pinned host memory, kept for the next call."""
        needed = elements * dtype.itemsize
        if self._staging is None or self._staging.numel() < needed:
            self._staging = torch.empty(needed, dtype=torch.uint8, pin_memory=True)
        return self._staging[:needed].view(dtype)
