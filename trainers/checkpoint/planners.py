"""Pieces for torch.distributed.checkpoint: which to write, and which parts of which to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from planner.specs.errors import SpecError
from trainers.checkpoint.pieces import Piece


def _index(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.name, torch.Size(piece.offsets))


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.size())


def check_pieces(pieces: Sequence[Piece], metadata: Metadata) -> None:
    """Whether a checkpoint has all of them.

    Raises:
        SpecError: it lacks a tensor, or has it in another size.
    """
    for piece in pieces:
        saved = metadata.state_dict_metadata.get(piece.name)
        if not isinstance(saved, TensorStorageMetadata) or tuple(saved.size) != piece.size:
            found = "nothing" if saved is None else f"size {list(getattr(saved, 'size', []))}"
            raise SpecError(
                f"the checkpoint has {found} for {piece.name}, the model needs size "
                f"{list(piece.size)}",
                fix="go on with the model that it was saved from, or give another --checkpoint-dir",
            )


def _reads(piece: Piece, saved: Any) -> list[ReadItem]:
    found: list[ReadItem] = create_read_items_for_chunk_list(piece.name, saved, [_chunk(piece)])
    return found


class PieceWriter(DefaultSavePlanner):
    """Every rank writes its own pieces; no two ranks have the same."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {_index(piece): piece for piece in pieces}

    def create_local_plan(self) -> SavePlan:
        """See the base class."""
        self.plan = SavePlan(
            [
                WriteItem(
                    index=index,
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        _chunk(piece),
                        TensorProperties(piece.tensor.dtype),
                        torch.Size(piece.size),
                    ),
                )
                for index, piece in self._pieces.items()
            ]
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """See the base class."""
        return self._pieces[write_item.index].tensor


class PieceReader(DefaultLoadPlanner):
    """Every rank reads into its own pieces what overlaps them."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {_index(piece): piece for piece in pieces}

    def create_local_plan(self) -> LoadPlan:
        """See the base class."""
        assert self.metadata is not None
        tensors = self.metadata.state_dict_metadata
        return LoadPlan(
            [item for piece in self._pieces.values() for item in _reads(piece, tensors[piece.name])]
        )

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """See the base class."""
        return self._pieces[index].tensor

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Nothing but tensors was saved.

        Raises:
            SpecError: always.
        """
        raise SpecError(f"the checkpoint holds no tensor for {read_item.dest_index.fqn}")
