"""What a rank holds of a job's state, as rectangles of named whole tensors.

Names and sizes belong to the model, never to the plan:

    tables/<table>/weight               [rows, dim]
    tables/<table>/state<i>             [rows, dim]   per element (Adagrad, Adam)
    tables/<table>/state<i>/<c0>-<c1>   [rows]        row-wise, of the columns c0 to c1
    dense/<parameter>                   its shape
    dense/<parameter>/<state>           its shape, or [1] for a number

Row-wise state is the one thing that a cut through the columns changes: each column shard sums the
mean square gradient of its own columns. It is kept by range of columns, so that the same cut finds
it bit for bit; another cut gets the mean weighted by width (``combined``), which for whole rows is
just what they would have summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from planner.specs.model import Table
from trainers.shards import Shard


@dataclass(frozen=True)
class Piece:
    """A rectangle of a whole tensor, and the view of the model (or a copy) that holds it."""

    name: str
    size: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class RowState:
    """Row-wise state of a shard."""

    prefix: str
    """tables/<table>/state<i>"""
    table_rows: int
    first_row: int
    columns: tuple[int, int]
    tensor: torch.Tensor
    """[rows of the shard]"""

    @property
    def piece(self) -> Piece:
        """Under the name of its own columns."""
        low, high = self.columns
        return Piece(
            f"{self.prefix}/{low}-{high}", (self.table_rows,), (self.first_row,), self.tensor
        )


def table_pieces(
    shards: Iterable[Shard], tables: Sequence[Table], row_wise: bool
) -> Iterator[Piece]:
    """Weights of the shards, and optimizer state that is per element."""
    sizes = {table.name: (table.num_embeddings, table.embedding_dim) for table in tables}
    for shard in shards:
        size, offsets = sizes[shard.table], (shard.row_offset, shard.column_offset)
        yield Piece(f"tables/{shard.table}/weight", size, offsets, shard.weight)
        for index, state in enumerate(() if row_wise else shard.state):
            state = state.view(shard.rows, shard.columns)
            yield Piece(f"tables/{shard.table}/state{index}", size, offsets, state)


def row_states(shards: Iterable[Shard], tables: Sequence[Table]) -> Iterator[RowState]:
    """Row-wise optimizer state of the shards."""
    rows = {table.name: table.num_embeddings for table in tables}
    for shard in shards:
        for index, state in enumerate(shard.state):
            yield RowState(
                prefix=f"tables/{shard.table}/state{index}",
                table_rows=rows[shard.table],
                first_row=shard.row_offset,
                columns=(shard.column_offset, shard.column_offset + shard.columns),
                tensor=state.view(shard.rows),
            )


def sources(wanted: RowState, saved: Iterable[str]) -> list[tuple[str, float]]:
    """Names of the saved states that make up one that is wanted, and their weights.

    Args:
        saved: names in the checkpoint.
    """
    low, high = wanted.columns
    found = []
    for name in saved:
        if name.startswith(f"{wanted.prefix}/"):
            first, last = map(int, name.rsplit("/", 1)[1].split("-"))
            shared = min(high, last) - max(low, first)
            if shared > 0:
                found.append((name, shared / (high - low)))
    return found


def combined(parts: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """Mean by width of row-wise states; of one alone itself, bit for bit."""
    (first, weight), *rest = parts
    total = first * weight if rest else first
    for part, weight in rest:
        total = total + part * weight
    return total


def dense_pieces(
    network: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Piece, bool]]:
    """Parameters of the dense network and their optimizer state, as far as this rank keeps it, and
    whether it alone keeps it: all other pieces are the same on every rank of the pool."""
    dealt = isinstance(optimizer, ZeroRedundancyOptimizer)
    states = optimizer.optim.state if dealt else optimizer.state
    for name, parameter in network.named_parameters():
        cut = isinstance(parameter, DTensor)
        yield _piece(f"dense/{name}", parameter.detach()), cut
        state: Mapping[str, object] = states.get(parameter, {})
        for key, value in sorted(state.items()):
            if isinstance(value, torch.Tensor):
                yield _piece(f"dense/{name}/{key}", value), dealt or isinstance(value, DTensor)


def _piece(name: str, tensor: torch.Tensor) -> Piece:
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        shape, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return Piece(name, tuple(tensor.shape), tuple(offsets), local.view(shape))
    if not tensor.dim():
        tensor = tensor.view(1)
    return Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def distinct(pieces: Iterable[Piece]) -> list[Piece]:
    """Empty pieces and repeated ones left out: a rank may hold a table's columns twice."""
    ordered = sorted(
        (piece for piece in pieces if piece.tensor.numel()), key=lambda one: (one.name, one.offsets)
    )
    return [next(same) for _, same in groupby(ordered, key=lambda one: (one.name, one.offsets))]
