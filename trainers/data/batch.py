"""One rank's samples of one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):
    """What TorchRec's pipeline copies to the device and hands to the model."""

    dense: torch.Tensor
    """float32 [samples, dense features]."""
    sparse: KeyedJaggedTensor
    """Ids per feature and sample."""
    labels: torch.Tensor
    """float32 [samples], 0 or 1."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """A copy on ``device``."""
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until ``stream`` has used it."""
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        """A copy in page-locked host memory."""
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())

    @property
    def size(self) -> int:
        """Samples."""
        return len(self.labels)
