"""What a Triton tile takes of one compute unit: shared memory (LDS), registers, resident programs.

Notation: B_M, B_N, B_K block sizes; w warps (AMD: waves); s stages; b bytes of an element::

    shared bytes = buffers * (B_M + B_N) * B_K * b
    registers    = 24 + 1.4 * B_M * B_N / (threads)            of each thread
    occupancy    = min(LDS / (shared + reserved), registers of a unit / of a program, warps)

``buffers`` is s where the matrix unit reads its operands from shared memory itself (wgmma, tcgen05)
and s - 1 where they pass through registers (mma.sync, AMD). The line for the registers is a fit to
what ptxas reports for 30 kernels on sm_90 (within 15 %).
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

SMALLEST_BLOCK = 16
"""Sides of ``tl.dot``'s operands."""
WGMMA_ROWS = 64
WGMMA_WARPS = 4
"""A warp group issues one wgmma (or tcgen05) instruction for 64 rows."""
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
    vendor: str


_AMPERE = Architecture(32, 64, 65536, 255, 128, 1024, False, "nvidia")
_HOPPER = Architecture(32, 64, 65536, 255, 128, 1024, True, "nvidia")
_CDNA = Architecture(64, 32, 131072, 512, 256, 0, False, "amd")
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


def from_shared(arch: Architecture, tiles: TileArrays) -> NDArray[np.bool_]:
    """Whether the matrix unit reads both operands from shared memory."""
    fit = (tiles.block_m >= WGMMA_ROWS) & (tiles.num_warps % WGMMA_WARPS == 0)
    return np.asarray(fit & arch.reads_shared)


def shared_bytes(arch: Architecture, element_bytes: int, tiles: TileArrays) -> Array:
    """Bytes of shared memory (LDS) of one program."""
    buffers = np.where(from_shared(arch, tiles), tiles.num_stages, tiles.num_stages - 1)
    operands = (tiles.block_m + tiles.block_n) * tiles.block_k * element_bytes
    return np.asarray(np.maximum(buffers, 1) * operands)


def accumulators(arch: Architecture, tiles: TileArrays) -> Array:
    """fp32 sums that each thread holds."""
    return tiles.block_m * tiles.block_n / (tiles.num_warps * arch.lanes)


def registers(arch: Architecture, tiles: TileArrays) -> Array:
    """32-bit registers of each thread, in the hardware's steps of 8."""
    wanted = BASE_REGISTERS + REGISTERS_PER_ACCUMULATOR * accumulators(arch, tiles)
    return np.asarray(np.minimum(8 * np.ceil(wanted / 8), arch.registers_per_thread))


def occupancy(arch: Architecture, lds_bytes: float, element_bytes: int, tiles: TileArrays) -> Array:
    """Programs that run on one unit at once, at least 1."""
    by_shared = lds_bytes / (shared_bytes(arch, element_bytes, tiles) + arch.reserved_bytes)
    threads = tiles.num_warps * arch.lanes
    by_registers = arch.registers / (registers(arch, tiles) * threads)
    by_warps = arch.warps / tiles.num_warps
    fewest = np.minimum(np.minimum(by_shared, by_registers), by_warps)
    return np.asarray(np.maximum(np.floor(fewest), 1.0))


def fitting(
    arch: Architecture, lds_bytes: float, element_bytes: int, tiles: TileArrays
) -> NDArray[np.bool_]:
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
