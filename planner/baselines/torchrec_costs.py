"""TorchRec's cost model without TorchRec: seconds and bytes of each shard of a table.

What ``EmbeddingPerfEstimator`` and ``EmbeddingStorageEstimator`` of torchrec 1.8 say of training
pooled tables without weighted ids, quantised collectives or a prefetch pipeline, as its planner
asks them by default. With

    W, L      ranks, and ranks of a node
    b         samples of a rank
    n, m      ids and pooled rows of a rank's samples: sum pooling b; sum min(1, pooling) b
    d, e      columns of the shard, bytes of a weight
    B         bandwidth of the memory that the kernel reads

    read      8 n W / s + f n W d e / s + m W d e      s = 1 (whole rows), L (rows of a node),
                                                       W (rows of the pool)
    out       m W d e                                  pooled rows sent, or received

a shard takes, forward, read / B and out over the exchange's bandwidth, backward twice the read and
the exchange once more. Look-ups of whole rows are at least 32 columns wide (f), and slower where
they are less than 128. Rows cut among ranks cost a copy, 2.455 out / B, in backward. A replicated
table reads its own samples only and pays the all-reduce and the element-wise kernels of its whole
gradient. There are no latencies, no skew and no overlap, and a rank's time is the sum over its
shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.baselines.greedy import CACHE_LOAD_FACTOR
from planner.cost.context import PoolContext
from planner.cost.memory import base_memory_bytes
from planner.specs.model import ComputeKernel, ShardingType, Table

ID_BYTES = 8
FULL_BLOCK_COLUMNS, HALF_BLOCK_COLUMNS, LEAST_COLUMNS = 128, 64, 32
HALF_BLOCK_PENALTY, QUARTER_BLOCK_PENALTY = 1.15, 1.75
BACKWARD_READS = 2.0
COPY_FACTOR = 2.455
ELEMENTWISE_FACTOR = 9.22
"""All of these: torchrec/distributed/planner/constants.py, "empirical studies" there."""
HOST_SLOWDOWN = 10.0
"""Tables in host memory are read at this fraction of the link (``kernel_bw_lookup``)."""
ROW_CUT = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)
STATE_PER_WEIGHT = {"sgd": 0.0, "adagrad": 1.0, "adam": 2.0}
"""Optimizer state as a multiple of the weights; row-wise Adagrad has one value per row."""


@dataclass(frozen=True)
class TorchRecTopology:
    """What TorchRec's ``Topology`` says of a pool; bytes and bytes per second."""

    ranks: int
    node_ranks: int
    on_cpu: bool
    hbm_room_bytes: int
    host_room_bytes: int
    hbm_bytes_per_s: float
    host_bytes_per_s: float
    """Of the processor's own memory; CPU pools only."""
    link_bytes_per_s: float
    """Host memory to device."""
    node_bytes_per_s: float
    """One rank's share of the node's links."""
    nic_bytes_per_s: float

    @property
    def nodes(self) -> int:
        return max(1, self.ranks // self.node_ranks)

    def exchange_bytes_per_s(self) -> float:
        """Of a collective over all ranks."""
        return self.node_bytes_per_s if self.ranks <= self.node_ranks else self.nic_bytes_per_s

    def memory_bytes_per_s(self, kernel: ComputeKernel, cached_share: float) -> float:
        """Bandwidth at which a kernel reads rows."""
        own = self.host_bytes_per_s if self.on_cpu else self.hbm_bytes_per_s
        if kernel is ComputeKernel.DENSE:
            return own / 2
        if kernel is ComputeKernel.FUSED:
            return own
        if kernel is ComputeKernel.FUSED_UVM:
            return self.link_bytes_per_s / HOST_SLOWDOWN
        cached = cached_share * self.hbm_bytes_per_s
        return (cached + (1 - cached_share) * self.link_bytes_per_s) / HOST_SLOWDOWN


def torchrec_topology(ctx: PoolContext) -> TorchRecTopology:
    """A pool as a careful user would describe it to TorchRec's planner.

    Bandwidths are the profile's; memory is what the pool's dense network leaves, so that no
    further share needs to be reserved.
    """
    device = ctx.device
    room = max(0, ctx.hbm_capacity_bytes - sum(base_memory_bytes(ctx).values()))
    hbm = device.memory.hbm_bytes_per_s.value
    return TorchRecTopology(
        ranks=ctx.ranks,
        node_ranks=ctx.pool.devices_per_node,
        on_cpu=device.is_cpu,
        hbm_room_bytes=0 if device.is_cpu else room,
        host_room_bytes=room if device.is_cpu else ctx.host_capacity_bytes,
        hbm_bytes_per_s=hbm,
        host_bytes_per_s=hbm * ctx.compute_share,
        link_bytes_per_s=device.host.link_bytes_per_s.value,
        node_bytes_per_s=device.scale_up.bytes_per_s.value,
        nic_bytes_per_s=ctx.nic_bytes_per_s,
    )


@dataclass(frozen=True)
class TorchRecTable:
    """A table as the formulas see it."""

    table: Table
    weight_bytes: int
    """Of one weight."""
    optimizer: str
    """Of the model's sparse part."""
    local_batch: int

    @property
    def ids(self) -> float:
        """Of one rank's samples."""
        return sum(pooling * self.local_batch for pooling in self.table.pooling_factors)

    @property
    def pooled(self) -> float:
        """Pooled rows of one rank's samples."""
        return sum(min(1.0, factor) * self.local_batch for factor in self.table.pooling_factors)

    @property
    def bytes(self) -> int:
        """Of all weights."""
        return self.table.num_embeddings * self.table.embedding_dim * self.weight_bytes

    @property
    def state_per_weight(self) -> float:
        """Optimizer state, as a multiple of the weights."""
        if self.optimizer == "rowwise_adagrad":
            return 1 / self.table.embedding_dim
        return STATE_PER_WEIGHT[self.optimizer]


@dataclass(frozen=True)
class TorchRecWay:
    """A shard's sharding type, kernel, and rectangle of the table."""

    sharding_type: ShardingType
    compute_kernel: ComputeKernel
    rows: int
    columns: int
    cached_share: float = CACHE_LOAD_FACTOR


def shard_seconds(topology: TorchRecTopology, table: TorchRecTable, way: TorchRecWay) -> float:
    """Time that a shard adds to its rank: ``Perf.total``."""
    memory = topology.memory_bytes_per_s(way.compute_kernel, way.cached_share)
    if way.sharding_type is ShardingType.DATA_PARALLEL:
        return _replicated_seconds(topology, table, memory)
    pooled_bytes = table.pooled * topology.ranks * way.columns * table.weight_bytes
    if way.sharding_type in ROW_CUT:
        cuts = topology.ranks
        if way.sharding_type is not ShardingType.ROW_WISE:
            cuts = topology.node_ranks
        width, penalty = way.columns, 1.0
        copy_s = COPY_FACTOR * pooled_bytes / memory
    else:
        cuts, width, penalty = 1, max(way.columns, LEAST_COLUMNS), _block_penalty(way.columns)
        copy_s = 0.0
    ids = table.ids / cuts * topology.ranks
    read = math.ceil(ID_BYTES * ids) + ids * width * table.weight_bytes + pooled_bytes
    read_s = read * penalty / memory
    return (1 + BACKWARD_READS) * read_s + 2 * _exchange_seconds(topology, table, way) + copy_s


def _block_penalty(columns: int) -> float:
    if columns >= FULL_BLOCK_COLUMNS:
        return 1.0
    return HALF_BLOCK_PENALTY if columns >= HALF_BLOCK_COLUMNS else QUARTER_BLOCK_PENALTY


def _exchange_seconds(topology: TorchRecTopology, table: TorchRecTable, way: TorchRecWay) -> float:
    """Of pooled rows, one way: over all ranks, or inside the node and then between nodes."""
    row_bytes = table.pooled * way.columns * table.weight_bytes
    if way.sharding_type not in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD):
        return row_bytes * topology.ranks / topology.exchange_bytes_per_s()
    inside_s = row_bytes * topology.ranks / topology.node_bytes_per_s
    if topology.nodes == 1:
        return inside_s
    return inside_s + row_bytes * topology.nodes / topology.nic_bytes_per_s


def _replicated_seconds(topology: TorchRecTopology, table: TorchRecTable, memory: float) -> float:
    """Own samples' look-ups; a ring all-reduce of the gradient and its element-wise kernels."""
    columns, e = table.table.embedding_dim, table.weight_bytes
    read = math.ceil(ID_BYTES * table.ids) + (table.ids + table.pooled) * columns * e
    nodes = min(topology.ranks / topology.node_ranks, 2)
    ring = (2 * nodes - 1) / nodes * (2 if topology.ranks > 2 * topology.node_ranks else 1)
    reduce_s = table.bytes * ring / (topology.nic_bytes_per_s * topology.node_ranks)
    kernels_s = table.bytes * ELEMENTWISE_FACTOR / memory
    return (1 + BACKWARD_READS) * read / memory + reduce_s + kernels_s


def shard_bytes(
    topology: TorchRecTopology, table: TorchRecTable, way: TorchRecWay
) -> tuple[int, int]:
    """Device and host memory of a shard: ``Storage.hbm``, ``Storage.ddr``."""
    in_host = way.compute_kernel in (ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING)
    cached = way.compute_kernel is ComputeKernel.FUSED_UVM_CACHING
    hbm = host = 0
    if in_host or topology.on_cpu:
        host = _with_state(table, way, table.bytes)
    else:
        hbm = _with_state(table, way, table.bytes)
    if cached:
        share = way.cached_share
        # Per row: which slot holds it; per cached row: the id that it holds, and when it was used.
        hbm = _with_state(table, way, round(table.bytes * share))
        hbm += math.ceil(way.rows * (4 + share * 16))
    buffers = _buffer_bytes(topology, table, way)
    return (hbm, host + buffers) if topology.on_cpu else (hbm + buffers, host)


def _with_state(table: TorchRecTable, way: TorchRecWay, stored: int) -> int:
    """The shard's part of the stored weights, and the optimizer's state for it."""
    whole = table.table.num_embeddings * table.table.embedding_dim
    if way.sharding_type is not ShardingType.DATA_PARALLEL:
        stored = math.ceil(stored * (way.rows * way.columns) / whole)
    return stored + math.ceil(stored * table.state_per_weight)


def _buffer_bytes(topology: TorchRecTopology, table: TorchRecTable, way: TorchRecWay) -> int:
    """Ids received and pooled rows sent. Row-wise shards get all ids of the pool over the ranks."""
    if way.rows * way.columns == 0:
        return 0
    samples_of = topology.ranks
    cuts = 1
    if way.sharding_type is ShardingType.DATA_PARALLEL:
        samples_of = 1
    elif way.sharding_type is ShardingType.ROW_WISE:
        cuts = topology.ranks
    elif way.sharding_type in ROW_CUT:
        cuts = topology.node_ranks
    ids = table.ids / cuts * samples_of * ID_BYTES
    pooled = table.pooled * samples_of * way.columns * table.weight_bytes
    return math.ceil(ids) + math.ceil(pooled)
