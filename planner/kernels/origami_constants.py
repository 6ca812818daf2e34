"""What rocm-origami 0.0.3 (MIT) publishes: constants of gfx942 and gfx950, and the weights that the
package adds to the equation of ``planner.kernels.origami``."""

from __future__ import annotations

from typing import NamedTuple

from planner.specs.errors import UsageError
from planner.specs.units import Dtype


class Instruction(NamedTuple):
    """C[m, n] += A[m, k] B[k, n] on one matrix core."""

    m: int
    n: int
    k: int
    cycles: int


class Architecture(NamedTuple):
    """Published constants of one GPU architecture; bandwidths of the whole device."""

    units: int
    clock_hz: float
    l2_bytes_per_s: float
    mall_bytes_per_s: float
    hbm_bytes_per_s: float
    saturation: tuple[float, float, float]
    """(a, b, c): n active units reach a n^2 + b n + c of the MALL's and HBM's bandwidth."""
    instructions: dict[Dtype, Instruction]
    chiplets: int = 8


class Weights(NamedTuple):
    """What the package adds to the equation; ``Weights()`` is rocm-origami 0.0.3."""

    line_bytes: int = 128
    """Operands and results are rounded up to whole lines along their contiguous side."""
    prefetch: float = 1.5
    store: float = 2.0
    occupancy: float = 0.95
    """For each resident program, on prefetch and store."""
    step_cycles: float = 500.0
    """Overhead of each k step."""
    hbm_latency_cycles: float = 200.0
    """Of each k step, before the HBM's bytes."""
    split_cycles: float = 10_000.0
    ragged_k_cycles: float = 50_000.0
    """Times the share of k in an incomplete last step."""


PACKAGE = Weights()

# HBM: the package gives 4 and 6 TB/s at the memory clock, which it takes as the compute clock over
# 1.5 (hence 6 and 9 TB/s; data sheets say 5.3 and 8). MALL: 1.21875 TB/s times 6 and 7.
# The instruction of TF32 on gfx950 is three bf16 ones.
ARCHITECTURES = {
    "gfx942": Architecture(
        units=304,
        clock_hz=2.1e9,
        l2_bytes_per_s=17e12,
        mall_bytes_per_s=1.21875e12 * 6,
        hbm_bytes_per_s=6e12,
        saturation=(0.0, 0.015, 0.0),
        instructions={
            Dtype.BF16: Instruction(16, 16, 16, 16),
            Dtype.FP16: Instruction(16, 16, 16, 16),
            Dtype.FP8: Instruction(16, 16, 32, 16),
            Dtype.TF32: Instruction(32, 32, 4, 32),
            Dtype.FP32: Instruction(16, 16, 4, 32),
        },
    ),
    "gfx950": Architecture(
        units=256,
        clock_hz=2.2e9,
        l2_bytes_per_s=17e12,
        mall_bytes_per_s=1.21875e12 * 7,
        hbm_bytes_per_s=9e12,
        saturation=(0.0, 0.008, 0.0),
        instructions={
            Dtype.BF16: Instruction(16, 16, 32, 16),
            Dtype.FP16: Instruction(16, 16, 32, 16),
            Dtype.FP8: Instruction(16, 16, 128, 32),
            Dtype.TF32: Instruction(16, 16, 32, 48),
            Dtype.FP32: Instruction(16, 16, 4, 32),
        },
    ),
}


def architecture(name: str) -> Architecture:
    """Published constants of ``name``; MI355X is gfx950 with ``clock_hz`` replaced by 2.4e9.

    Raises:
        UsageError: nothing is published for it.
    """
    if name not in ARCHITECTURES:
        raise UsageError(
            "no Origami constants are published for this architecture",
            field="arch",
            value=name,
            fix=f"use one of {', '.join(ARCHITECTURES)}; hwplan's own model covers all devices",
        )
    return ARCHITECTURES[name]
