"""The pieces of embedding tables that this rank holds: weights and optimizer state, as views."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainers.counter_rng import text_counter, uniform

_INIT_CHUNK_ELEMENTS = 1 << 20


@dataclass
class Shard:
    """A rectangle of one table on this rank. Tensors are views: writing them changes the model."""

    table: str
    row_offset: int
    column_offset: int
    weight: torch.Tensor
    """[rows, columns] in the table's storage precision."""
    replicated: bool
    """Data-parallel: every rank of the replica group holds the whole table."""
    kernel: Any
    """FBGEMM's module: one per group of tables."""
    state: tuple[torch.Tensor, ...] = field(default=())
    """Optimizer state, each [rows] (row-wise) or [rows, columns]."""

    @property
    def rows(self) -> int:
        """Rows held here."""
        return self.weight.shape[0]

    @property
    def columns(self) -> int:
        """Columns held here."""
        return self.weight.shape[1]


def local_shards(embeddings: nn.Module) -> list[Shard]:
    """This rank's shards of a sharded ``EmbeddingBagCollection``.

    State of data-parallel tables is filled in by the optimizer that owns it
    (``trainers.optimizers.ReplicatedTables``).
    """
    shards = []
    for lookup in embeddings._lookups:
        # Data-parallel lookups are wrapped in DDP.
        for kernel in getattr(lookup, "module", lookup)._emb_modules:
            tbe = kernel.emb_module
            fused = hasattr(tbe, "split_optimizer_states")
            weights = tbe.split_embedding_weights()
            states = tbe.split_optimizer_states() if fused else []
            for index, config in enumerate(kernel.config.embedding_tables):
                offsets = config.local_metadata.shard_offsets if config.local_metadata else (0, 0)
                shards.append(
                    Shard(
                        table=config.name,
                        row_offset=offsets[0],
                        column_offset=offsets[1],
                        weight=weights[index].view(-1, config.local_cols),
                        replicated=not fused,
                        kernel=tbe,
                        # FBGEMM lists states per table; SGD has none.
                        state=tuple(states[index]) if states else (),
                    )
                )
    return shards


def _caching(shards: list[Shard]) -> Iterator[Any]:
    for tbe in {id(shard.kernel): shard.kernel for shard in shards}.values():
        if getattr(tbe, "lxu_cache_weights", torch.empty(0)).numel():
            yield tbe


def flush_caches(shards: list[Shard]) -> None:
    """Bring cached rows (``fused_uvm_caching``) to the weights that ``Shard.weight`` shows."""
    for tbe in _caching(shards):
        tbe.flush()


def write_back_caches(shards: list[Shard]) -> None:
    """The same, and empty the caches, so that rows written through the views are read again."""
    for tbe in _caching(shards):
        tbe.flush()
        tbe.reset_cache_states()


def initialise(shards: list[Shard], table_rows: dict[str, int], seed: int) -> None:
    """Uniform in ±1/sqrt(rows of the table), a function of (seed, table, row, column) only.

    Args:
        table_rows: rows of the whole table, by name.
    """
    for shard in shards:
        bound = table_rows[shard.table] ** -0.5
        device = shard.weight.device
        column = torch.arange(shard.columns, dtype=torch.int64, device=device)
        column += shard.column_offset
        chunk = max(1, _INIT_CHUNK_ELEMENTS // max(1, shard.columns))
        for low in range(0, shard.rows, chunk):
            high = min(low + chunk, shard.rows)
            row = torch.arange(low, high, dtype=torch.int64, device=device) + shard.row_offset
            drawn = uniform(seed, text_counter(shard.table), row[:, None], column[None, :])
            shard.weight[low:high] = ((2.0 * drawn - 1.0) * bound).to(shard.weight.dtype)
