"""Table-batched embedding (TBE) time of one shard: forward look-up, fused backward.

With n ids drawn from R rows under the table's Zipf law, r bytes per row (whole sectors) and an
on-chip cache of C bytes holding the c = C / r hottest rows::

    rows from memory  = distinct(c hottest) + n * (1 - mass(c hottest))
    forward  = t_table + max((ids + offsets + rows * r + pooled output) / (e_r * HBM), n * r / L2)
    backward = t_table + n * t_sort
               + (2 * ids + gradient + distinct * 2 * (r + optimizer state)) / (e_w * HBM)

``fused_uvm`` reads rows from host memory instead, over the host link; ``fused_uvm_caching`` adds a
look-up per id and moves only missed distinct rows (the cache holds the hottest) over that link,
before the look-up or, fetched ahead, while the batch before computes (``fetch_seconds``).
The fixed cost of a TBE call is not here: one call serves many tables (see ``graph``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from planner.cost.zipf import expected_distinct, top_mass
from planner.specs.device import DeviceProfile
from planner.specs.model import ComputeKernel

ID_BYTES = 8
"""One id, or one offset or length (int64)."""
FLOAT_BYTES = 4


class Rates(NamedTuple):
    """What the formulas need of a device; efficiencies are applied already."""

    table_s: float
    read_bytes_per_s: float
    update_bytes_per_s: float
    l2_bytes_per_s: float
    cache_bytes: float
    access_bytes: float
    sort_s_per_id: float
    uvm_bytes_per_s: float
    cache_lookup_s_per_id: float


def rates(device: DeviceProfile, compute_share: float) -> Rates:
    """The device as TBE sees it, ``compute_share`` of it."""
    memory, embedding = device.memory, device.embedding
    hbm = memory.hbm_bytes_per_s.value * compute_share
    return Rates(
        table_s=embedding.table_s.value / compute_share,
        read_bytes_per_s=hbm * embedding.read_efficiency.value,
        update_bytes_per_s=hbm * embedding.update_efficiency.value,
        l2_bytes_per_s=memory.l2_bytes_per_s.value * compute_share,
        cache_bytes=memory.last_level_cache_bytes.value * compute_share,
        access_bytes=memory.access_bytes.value,
        sort_s_per_id=embedding.sort_s_per_id.value / compute_share,
        uvm_bytes_per_s=device.host.link_bytes_per_s.value * embedding.uvm_efficiency.value,
        cache_lookup_s_per_id=embedding.cache_lookup_s_per_id.value / compute_share,
    )


def device_memory_is_faster(device: DeviceProfile) -> bool:
    """Whether ``fused_uvm`` is never faster than ``fused``, forward and backward (below)."""
    known = rates(device, 1.0)
    return known.uvm_bytes_per_s <= min(known.read_bytes_per_s, known.update_bytes_per_s / 2)


@dataclass(frozen=True)
class Shard:
    """What one TBE table works on in a step."""

    table_rows: int
    """Rows of the whole table: its popularity law."""
    table_draws: float
    """Ids that the pool looks up in the whole table."""
    row_share: float
    """Share of the table's rows in this shard; ids spread alike."""
    zipf_exponent: float
    bags: float
    """Pooled outputs: samples x features."""
    columns: int
    element_bytes: int
    state_floats_per_row: int

    @property
    def draws(self) -> float:
        """Ids looked up in this shard."""
        return self.table_draws * self.row_share

    @property
    def distinct(self) -> float:
        """Expected distinct rows looked up in this shard."""
        return self.row_share * expected_distinct(
            self.table_rows, self.zipf_exponent, self.table_draws
        )

    @property
    def pooled_bytes(self) -> float:
        """The fp32 pooled output, or its gradient."""
        return self.bags * self.columns * FLOAT_BYTES

    def row_bytes(self, access_bytes: float) -> float:
        """One row in whole sectors."""
        return math.ceil(self.columns * self.element_bytes / access_bytes) * access_bytes

    def state_bytes(self, access_bytes: float) -> float:
        """Optimizer state of one row in whole sectors."""
        state = self.state_floats_per_row * FLOAT_BYTES
        return math.ceil(state / access_bytes) * access_bytes


def rows_from_memory(shard: Shard, cache_bytes: float, row_bytes: float) -> float:
    """Row reads that the on-chip cache does not serve."""
    hottest = cache_bytes / row_bytes / shard.row_share
    tail_draws = shard.draws * (1.0 - top_mass(shard.table_rows, shard.zipf_exponent, hottest))
    tail_distinct = shard.row_share * expected_distinct(
        shard.table_rows, shard.zipf_exponent, shard.table_draws, hottest
    )
    return shard.distinct - tail_distinct + tail_draws


def missed_rows(shard: Shard, load_factor: float) -> float:
    """Distinct rows per step outside a software cache of ``load_factor`` of the rows."""
    return shard.row_share * expected_distinct(
        shard.table_rows,
        shard.zipf_exponent,
        shard.table_draws,
        load_factor * shard.table_rows,
    )


def fetch_seconds(shard: Shard, rates: Rates, load_factor: float) -> float:
    """Rows that a software cache of ``load_factor`` of the rows misses, from host memory.

    The link is full duplex: a missed row comes in while an evicted one goes out.
    """
    row = shard.row_bytes(rates.access_bytes)
    return missed_rows(shard, load_factor) * row / rates.uvm_bytes_per_s


def forward_seconds(shard: Shard, rates: Rates, kernel: ComputeKernel) -> float:
    """Look-up and pooling of one shard, rows missed by a software cache left out."""
    row = shard.row_bytes(rates.access_bytes)
    stream_bytes = ID_BYTES * (shard.draws + shard.bags) + shard.pooled_bytes
    memory_rows = rows_from_memory(shard, rates.cache_bytes, row)
    cached_s = shard.draws * row / rates.l2_bytes_per_s
    if kernel is ComputeKernel.FUSED_UVM:
        device_s = max(stream_bytes / rates.read_bytes_per_s, cached_s)
        return rates.table_s + device_s + memory_rows * row / rates.uvm_bytes_per_s
    seconds = max((stream_bytes + memory_rows * row) / rates.read_bytes_per_s, cached_s)
    if kernel is ComputeKernel.FUSED_UVM_CACHING:
        seconds += shard.draws * rates.cache_lookup_s_per_id
    return rates.table_s + seconds


def backward_seconds(shard: Shard, rates: Rates, kernel: ComputeKernel) -> float:
    """Gradient of one shard with the optimizer fused into it."""
    row = shard.row_bytes(rates.access_bytes)
    state = shard.state_bytes(rates.access_bytes)
    stream_bytes = 2 * ID_BYTES * shard.draws + shard.pooled_bytes
    update_bytes = shard.distinct * (row + state)
    seconds = rates.table_s + shard.draws * rates.sort_s_per_id
    if kernel is ComputeKernel.FUSED_UVM:
        # Rows and their state live in host memory; reads and writes overlap (full duplex).
        return (
            seconds + stream_bytes / rates.update_bytes_per_s + update_bytes / rates.uvm_bytes_per_s
        )
    return seconds + (stream_bytes + 2 * update_bytes) / rates.update_bytes_per_s
