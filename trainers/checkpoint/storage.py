"""torch.distributed.checkpoint's files without pickle: tensors are loaded as weights only, which it
does by itself, and its index, which it pickles, is JSON here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

INDEX = "index.json"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64)
}


class IndexWriter(FileSystemWriter):
    """Writes tensors as its base does, and the index as JSON."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; called on the coordinator, after all ranks have written."""
        places = {
            (result.index.fqn, tuple(result.index.offset or ())): result.storage_data
            for rank in results
            for result in rank
        }
        tensors: dict[str, Any] = {}
        for name, tensor in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(tensor, TensorStorageMetadata)
            chunks = []
            for chunk in tensor.chunks:
                place = places[name, tuple(chunk.offsets)]
                chunks.append(
                    {
                        "offsets": list(chunk.offsets),
                        "sizes": list(chunk.sizes),
                        "file": place.relative_path,
                        "offset": place.offset,
                        "length": place.length,
                    }
                )
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
        with open(Path(self.path) / INDEX, "w", encoding="utf-8") as stream:
            json.dump(tensors, stream)
            stream.flush()
            os.fsync(stream.fileno())


class IndexReader(FileSystemReader):
    """Reads what ``IndexWriter`` wrote, once its digests were checked."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        tensors = json.loads((Path(self.path) / INDEX).read_text(encoding="utf-8"))
        described: dict[str, Any] = {}
        places = {}
        for name, tensor in tensors.items():
            chunks = []
            for chunk in tensor["chunks"]:
                offsets = torch.Size(chunk["offsets"])
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk["sizes"])))
                # Nothing outside the folder is opened, whatever the index says.
                file = Path(chunk["file"]).name
                places[MetadataIndex(name, offsets)] = _StorageInfo(
                    file, chunk["offset"], chunk["length"]
                )
            described[name] = TensorStorageMetadata(
                TensorProperties(DTYPES[tensor["dtype"]]), torch.Size(tensor["size"]), chunks
            )
        return Metadata(described, storage_data=places, storage_meta=StorageMeta())
