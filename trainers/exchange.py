"""Exchange of table copies between replica groups: rows touched since the last exchange only.

A pool holds one copy of the tables, or G of them in as many replica groups. Each group i trains its
copy for K steps. A touched row then becomes w0 + sum_i a_i (w_i - w0), a_i = group i's share of the
samples (its pool's over G). Copies were equal (w0) after the last exchange and the shares add up to
1, so that is sum_i a_i w_i: every rank adds a_i x its shards' rows into a zeroed buffer laid out
over the union of touched rows, the bridge sums the buffers, and every rank writes its shards' part
back. Optimizer state likewise. No group needs to know another's placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from planner.specs.model import Table
from trainers.rank import Bridge, RankEnv
from trainers.shards import Shard, write_back_caches

__all__ = ["Bridge", "EmbeddingExchange"]

MARKS_PER_ROW = 8
"""Marking beats sorting up to about twice that on a CPU core (then the marks leave its cache)."""


@dataclass(frozen=True)
class _Slot:
    """Part of the buffer that belongs to one shard."""

    weight: torch.Tensor
    """[touched rows of the shard, its columns]."""
    states: tuple[torch.Tensor, ...]
    rows: torch.Tensor
    """The touched rows, counted inside the shard."""


class EmbeddingExchange:
    """Combines this rank's shards with the other copies' every ``interval_steps`` steps.

    Args:
        shards: with their optimizer state filled in.
        row_wise_state: each optimizer state is one number per row, not per element.
        states: optimizer states per shard.
        share: a_i, the replica group's share of the global batch.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        shards: Sequence[Shard],
        *,
        row_wise_state: bool,
        states: int,
        share: float,
        interval_steps: int,
        rank: RankEnv,
    ) -> None:
        self.bytes = 0
        self._tables = tables
        self._first_row = [0, *accumulate(table.num_embeddings for table in tables)]
        self._shards = shards
        self._row_wise_state = row_wise_state
        self._states = states
        self._share = share
        self._interval_steps = interval_steps
        self._rank = rank
        self._touched: list[torch.Tensor] = []
        self.steps = 0
        """Of training so far."""
        position = {table.name: index for index, table in enumerate(tables)}
        self._table_of_shard = [position[shard.table] for shard in shards]
        self._feature_first_row = torch.tensor(
            [self._first_row[i] for i, table in enumerate(tables) for _ in table.feature_names]
        )

    def after_step(self, sparse: KeyedJaggedTensor) -> None:
        """Note the rows that this rank's samples touched; exchange when it is time."""
        values = sparse.values().cpu()
        per_feature = torch.tensor(sparse.length_per_key())
        first = torch.repeat_interleave(self._feature_first_row, per_feature)
        self._touched.append(values + first)
        self.steps += 1
        if self.steps % self._interval_steps == 0:
            self.exchange()

    def exchange(self) -> None:
        """Combine all rows touched since the last exchange; every rank must call it."""
        union = self._union()
        self._touched = []
        if not len(union):
            return
        bounds = torch.searchsorted(union, torch.tensor(self._first_row)).tolist()
        columns = [
            table.embedding_dim + self._states * self._state_columns(table)
            for table in self._tables
        ]
        counts = [high - low for low, high in pairwise(bounds)]
        starts = [0, *accumulate(n * width for n, width in zip(counts, columns, strict=True))]
        buffer = torch.zeros(starts[-1], device=self._rank.device)
        write_back_caches(list(self._shards))
        slots = list(self._slots(buffer, union, bounds, starts))
        for shard, slot in slots:
            self._contribute(shard, slot)
        self._rank.bridge.all_reduce_sum(buffer)
        self.bytes += buffer.nbytes
        for shard, slot in slots:
            shard.weight.index_copy_(0, slot.rows, slot.weight.to(shard.weight.dtype))
            for state, part in zip(shard.state, slot.states, strict=True):
                state.index_copy_(0, slot.rows, part.to(state.dtype))

    def _state_columns(self, table: Table) -> int:
        return 1 if self._row_wise_state else table.embedding_dim

    def _union(self) -> torch.Tensor:
        """Sorted rows (numbered through all tables) that any rank touched."""
        own = self._distinct(torch.cat([torch.empty(0).long(), *self._touched]))
        group = self._rank.world_group
        sizes = torch.empty(group.size(), dtype=torch.int64)
        dist.all_gather_into_tensor(sizes, torch.tensor([len(own)]), group=group)
        longest = int(sizes.max())
        padded = torch.full((longest,), -1, dtype=torch.int64)
        padded[: len(own)] = own
        gathered = torch.empty(group.size() * longest, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, padded, group=group)
        return self._distinct(gathered[gathered >= 0])

    def _distinct(self, rows: torch.Tensor) -> torch.Tensor:
        """Sorted, each once: marked in a list of all rows where that is not much longer, which
        takes a fifth of sorting them."""
        if self._first_row[-1] > MARKS_PER_ROW * len(rows):
            return torch.unique(rows)
        marks = torch.zeros(self._first_row[-1], dtype=torch.bool)
        return marks.index_fill_(0, rows, True).nonzero().view(-1)

    def _slots(
        self, buffer: torch.Tensor, union: torch.Tensor, bounds: list[int], starts: list[int]
    ) -> Iterator[tuple[Shard, _Slot]]:
        """Each shard with its part of the buffer: per table, weights first, then each state."""
        for shard, index in zip(self._shards, self._table_of_shard, strict=True):
            table = self._tables[index]
            count = bounds[index + 1] - bounds[index]
            rows = union[bounds[index] : bounds[index + 1]] - self._first_row[index]
            low, high = torch.searchsorted(
                rows, torch.tensor([shard.row_offset, shard.row_offset + shard.rows])
            ).tolist()
            across = slice(shard.column_offset, shard.column_offset + shard.columns)
            start = starts[index]
            end = start + count * table.embedding_dim
            weight = buffer[start:end].view(count, table.embedding_dim)[low:high, across]
            states = []
            for _ in shard.state:
                start, end = end, end + count * self._state_columns(table)
                state = buffer[start:end].view(count, -1)[low:high]
                states.append(state[:, 0] if self._row_wise_state else state[:, across])
            local = (rows[low:high] - shard.row_offset).to(shard.weight.device)
            yield shard, _Slot(weight, tuple(states), local)

    def _contribute(self, shard: Shard, slot: _Slot) -> None:
        """Add this group's share of the shard's rows."""
        if shard.replicated and self._rank.group_rank != 0:
            return
        slot.weight.add_(shard.weight.index_select(0, slot.rows), alpha=self._share)
        share = self._share
        if self._row_wise_state:
            # Column shards each keep their own row-wise state: the row's is their mean by width.
            share *= shard.columns / self._width(shard)
        for state, part in zip(shard.state, slot.states, strict=True):
            part.add_(state.index_select(0, slot.rows), alpha=share)

    def _width(self, shard: Shard) -> int:
        return next(t.embedding_dim for t in self._tables if t.name == shard.table)
