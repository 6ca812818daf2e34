"""Rank load: what a piece of a table adds to the ranks of a pool. Additive, hence linear in an ILP.

A placement option of a table is a set of *pieces*. A piece lands on one rank (a table-wise table,
a column shard), on one node (the rows of a table-row-wise table or of one grid column), or on the
whole pool (row-wise, data-parallel). It puts ``owner`` on each rank that it lands on and
``everyone`` on every rank of the pool (receiving pooled rows, say).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from planner.specs.model import ComputeKernel, ShardingType
from planner.specs.units import Dtype


@dataclass(frozen=True)
class RankLoad:
    """Seconds per step and bytes that one rank spends on embedding shards."""

    lookup_forward_s: float = 0.0
    cache_fetch_s: float = 0.0
    """Rows that the next batch misses in software caches, fetched ahead from host memory."""
    lookup_backward_s: float = 0.0
    """Fused backward and optimizer of the shards."""
    input_send_s: float = 0.0
    """Ids of the next batch, sample owner to shard owner."""
    input_receive_s: float = 0.0
    output_send_s: float = 0.0
    """Pooled rows, shard owner to sample owner (forward)."""
    output_receive_s: float = 0.0
    gradient_send_s: float = 0.0
    """Gradients of pooled rows, sample owner to shard owner (backward)."""
    gradient_receive_s: float = 0.0
    table_all_reduce_s: float = 0.0
    """Gradients of data-parallel tables, inside the pool."""
    hbm_bytes: float = 0.0
    host_bytes: float = 0.0

    def __add__(self, other: RankLoad) -> RankLoad:
        return RankLoad(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def scaled(self, factor: float) -> RankLoad:
        """Every component times ``factor``."""
        return RankLoad(**{f.name: getattr(self, f.name) * factor for f in fields(self)})


COMPONENTS = tuple(f.name for f in fields(RankLoad))
TIME_COMPONENTS = tuple(name for name in COMPONENTS if name.endswith("_s"))


class Scope(StrEnum):
    """Where a piece lands."""

    RANK = "rank"
    NODE = "node"
    POOL = "pool"


@dataclass(frozen=True)
class Piece:
    """One shard (or evenly spread group of shards) of a table."""

    scope: Scope
    columns: int
    owner: RankLoad
    everyone: RankLoad = RankLoad()


@dataclass(frozen=True)
class PlacementOption:
    """One way to place a table in a pool; the ILP picks exactly one per table."""

    sharding_type: ShardingType
    compute_kernel: ComputeKernel
    data_type: Dtype
    pieces: tuple[Piece, ...]
    cache_load_factor: float | None = None
