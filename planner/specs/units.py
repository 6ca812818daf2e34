"""Data types and their sizes; unit helpers. Inside hwplan: bytes, seconds, FLOP."""

from __future__ import annotations

from enum import StrEnum

GIB = 1024**3
MIB = 1024**2
BITS_PER_BYTE = 8


class Dtype(StrEnum):
    """Number formats. ``tf32`` is fp32 storage with reduced-precision matrix multiply."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"

    @property
    def bytes(self) -> int:
        """Bytes of one stored element."""
        return {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}[self.value]


def gbps_to_bytes_per_s(gbps: float) -> float:
    """Network gigabits per second to bytes per second."""
    return gbps * 1e9 / BITS_PER_BYTE
