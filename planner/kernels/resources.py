"""What a Triton tile takes of one compute unit: shared memory (LDS), registers, resident programs.

Notation: B_M, B_N, B_K block sizes; w warps (AMD: waves); s stages; b bytes of an element::

    shared bytes = max(buffers * (B_M + B_N) * B_K * b, B_M * B_N * 4)
    registers    = 24 + 1.4 * B_M * B_N / threads + scalar        of each thread
    occupancy    = min(LDS / (shared + reserved), registers of a unit / of a program, warps)

``buffers`` is s where the matrix unit reads its operands from shared memory itself (wgmma, tcgen05)
and s - 1 where they pass through registers (mma.sync, AMD). On NVIDIA a tile of C is rearranged in
shared memory before it is stored. ``scalar``: operands that cannot be loaded as vectors pass
through registers, with an address each (3 of them for an element along k, 5 across). The formulas
for shared memory are exact, and those for registers within 15 % of what ptxas reports, for 50
kernels compiled for sm_90.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.specs.device import DeviceProfile
from planner.specs.errors import UsageError
from planner.specs.kernels import TileConfig
from planner.specs.units import Dtype

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

SMALLEST_BLOCK = 16
"""Sides of ``tl.dot``'s operands."""
WGMMA_ROWS = 64
WGMMA_WARPS = 4
"""A warp group issues one wgmma (or tcgen05) instruction for 64 rows."""
SUM_BYTES = 4
BASE_REGISTERS = 24
REGISTERS_PER_ACCUMULATOR = 1.4


class Architecture(NamedTuple):
    """Limits of one compute unit that do not depend on the product."""

    lanes: int
    """Threads of one warp (AMD: wave)."""
    warps: int
    """Resident at most."""
    registers: int
    """32-bit registers of a unit."""
    registers_per_thread: int
    accumulators_per_thread: int
    """Above it the compiler spills to memory."""
    reserved_bytes: int
    """Shared memory that the driver takes of each program's."""
    reads_shared: bool
    """Whether matrix instructions take both operands from shared memory."""
    stores_through_shared: bool
    """Whether a tile of C is rearranged in shared memory before it is stored."""
    vendor: str


_AMPERE = Architecture(32, 64, 65536, 255, 128, 1024, False, True, "nvidia")
_HOPPER = Architecture(32, 64, 65536, 255, 128, 1024, True, True, "nvidia")
_CDNA = Architecture(64, 32, 131072, 512, 256, 0, False, False, "amd")
ARCHITECTURES = {
    "sm_80": _AMPERE, "sm_90": _HOPPER, "sm_100": _HOPPER, "gfx942": _CDNA, "gfx950": _CDNA,
}  # fmt: skip


def architecture(device: DeviceProfile) -> Architecture:
    """Limits of the device's compute units.

    Raises:
        UsageError: the Triton kernels do not know its architecture.
    """
    found = ARCHITECTURES.get(device.arch)
    if found is None:
        raise UsageError(
            f"{device.name} has no Triton kernels",
            field="arch",
            value=device.arch,
            fix=f"use a device whose arch is one of {', '.join(ARCHITECTURES)}, "
            "or the vendor library",
        )
    return found


class TileArrays(NamedTuple):
    """Columns of many tile configs, each of shape (tiles,)."""

    block_m: Array
    block_n: Array
    block_k: Array
    num_warps: Array
    num_stages: Array
    split_k: Array
    group_m: Array
    matrix_instr_nonkdim: Array
    waves_per_eu: Array
    kpack: Array

    @classmethod
    def of(cls, tiles: Sequence[TileConfig]) -> TileArrays:
        """``tiles`` as columns, in their order."""
        return cls(*(np.array([getattr(t, name) for t in tiles], float) for name in cls._fields))


def from_shared(arch: Architecture, tiles: TileArrays) -> Mask:
    """Whether the matrix unit reads both operands from shared memory."""
    fit = (tiles.block_m >= WGMMA_ROWS) & (tiles.num_warps % WGMMA_WARPS == 0)
    return np.asarray(fit & arch.reads_shared)


def buffers(arch: Architecture, tiles: TileArrays) -> Array:
    """Blocks of k in shared memory at once."""
    fewer = np.where(from_shared(arch, tiles), 0, 1)
    return np.asarray(np.maximum(tiles.num_stages - fewer, 1.0))


def shared_bytes(arch: Architecture, element_bytes: int, tiles: TileArrays) -> Array:
    """Bytes of shared memory (LDS) of one program, at most: aligned operands, C in fp32."""
    operands = (tiles.block_m + tiles.block_n) * tiles.block_k * element_bytes
    scratch = tiles.block_m * tiles.block_n * SUM_BYTES * arch.stores_through_shared
    return np.asarray(np.maximum(buffers(arch, tiles) * operands, scratch))


def accumulators(arch: Architecture, tiles: TileArrays) -> Array:
    """fp32 sums that each thread holds."""
    return tiles.block_m * tiles.block_n / (tiles.num_warps * arch.lanes)


def register_demand(arch: Architecture, tiles: TileArrays, scalar_registers: Array) -> Array:
    """32-bit registers that each thread would use, in the hardware's steps of 8.

    Args:
        scalar_registers: of all threads of a program, for operands loaded by elements.
    """
    scalar = scalar_registers / (tiles.num_warps * arch.lanes)
    wanted = BASE_REGISTERS + REGISTERS_PER_ACCUMULATOR * accumulators(arch, tiles) + scalar
    return np.asarray(8 * np.ceil(wanted / 8))


def occupancy(
    arch: Architecture, lds_bytes: float, held_bytes: Array, registers: Array, warps: Array
) -> Array:
    """Programs that run on one unit at once, at least 1.

    Args:
        lds_bytes: of the unit.
        held_bytes, registers, warps: shared memory, registers of a thread, and warps of a program.
    """
    by_shared = lds_bytes / (held_bytes + arch.reserved_bytes)
    per_thread = np.minimum(registers, arch.registers_per_thread)
    by_registers = arch.registers / (per_thread * warps * arch.lanes)
    fewest = np.minimum(np.minimum(by_shared, by_registers), arch.warps / warps)
    return np.asarray(np.maximum(np.floor(fewest), 1.0))


def fitting(arch: Architecture, lds_bytes: float, element_bytes: int, tiles: TileArrays) -> Mask:
    """Which tiles compile and launch without spilling registers."""
    sides = np.minimum(np.minimum(tiles.block_m, tiles.block_n), tiles.block_k)
    return np.asarray(
        (shared_bytes(arch, element_bytes, tiles) <= lds_bytes - arch.reserved_bytes)
        & (accumulators(arch, tiles) <= arch.accumulators_per_thread)
        & (sides >= SMALLEST_BLOCK)
        & (tiles.num_warps <= arch.warps)
    )


def fits(device: DeviceProfile, dtype: Dtype, tile: TileConfig) -> bool:
    """Whether ``tile`` compiles and launches on ``device`` without spilling registers.

    Raises:
        UsageError: the Triton kernels do not know its architecture.
    """
    tiles = TileArrays.of((tile,))
    lds_bytes = device.compute.lds_bytes.value
    return bool(fitting(architecture(device), lds_bytes, dtype.bytes, tiles)[0])
