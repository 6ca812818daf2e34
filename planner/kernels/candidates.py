"""Tile configs worth considering on an architecture, whatever the product's size.

The family covers blocks of 16 to 256, the warps and stages that go with them, and splits of k. What
never wins is left out: one warp group for more accumulators than its registers, two for fewer than
they need to be busy, and splits where k is a layer's width (nt, nn) beyond a few.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.kernels.resources import (
    SMALLEST_BLOCK,
    WGMMA_ROWS,
    Architecture,
    TileArrays,
    architecture,
    fitting,
)
from planner.specs.device import DeviceProfile
from planner.specs.errors import UsageError
from planner.specs.kernels import Layout, TileConfig
from planner.specs.units import Dtype

BLOCKS = (16, 32, 64, 128, 256)
LINES = (64, 128, 256)
"""Bytes of one block's row along k."""
LARGE = 128 * 128
"""Elements of C from which two warp groups share a tile."""
LEAST = 512
"""Elements of C that keep four warps busy."""


def _shapes(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """(block_m, block_n, bytes along k): the larger the tile, the shorter its steps."""
    for block_m, block_n, line in itertools.product(BLOCKS, BLOCKS, LINES):
        area = block_m * block_n
        if not LEAST <= area <= 2 * LARGE or (area >= LARGE and line == LINES[-1]):
            continue
        # Slower than tiles of half the height, which leave a unit more programs.
        if (block_m == BLOCKS[-1] and block_n <= 32) or (block_n == BLOCKS[-1] and block_m == 16):
            continue
        # For a few rows only, whose steps are short as it is.
        if layout is not Layout.TN and block_m == BLOCKS[0] and line == LINES[0]:
            continue
        # Long sums in small tiles: only long steps are worth their cost.
        if layout is Layout.TN and (
            (line == LINES[0] and area <= LARGE // 8) or (line == LINES[-1] and area > LARGE // 2)
        ):
            continue
        yield block_m, block_n, line


def _splits(layout: Layout, area: int) -> tuple[int, ...]:
    """Of k: the local batch (tn) in as many parts as fill the device with tiles of this size; a
    layer's width (nt, nn) in a few."""
    if layout is not Layout.TN:
        return (1, 2, 4) if LARGE // 16 <= area <= LARGE else (1,)
    if area >= LARGE:
        return (1, 2, 3, 4, 6, 8, 12, 16, 24)
    return (1, 2, 3, 4, 8, 12, 16, 32) if area >= LARGE // 4 else (1, 2, 4, 8, 16, 32, 64)


def _stages(dtype: Dtype, layout: Layout, block_m: int, area: int, line: int) -> tuple[int, ...]:
    """Where the loads of a step arrive late (narrow elements across k), four; three where four
    would leave a unit one program; both where neither is certain."""
    if layout is Layout.NT:
        return (3,) if LARGE // 4 < area <= LARGE and line >= LINES[1] else (3, 4)
    if dtype.bytes == 4:
        return (3, 4) if layout is Layout.NN or area >= LARGE // 2 else (4,)
    if area == LARGE and block_m == 256:
        return (3, 4)
    return (3, 4) if layout is Layout.NN and (block_m < WGMMA_ROWS or area < LARGE // 4) else (4,)


def _warps(dtype: Dtype, layout: Layout, area: int) -> tuple[int, ...]:
    """One warp group holds the sums of a large tile; two may hide its loads better (nt)."""
    if area != LARGE:
        return (4,) if area < LARGE else (8,)
    return (4, 8) if layout is Layout.NT and dtype.bytes < 4 else (4,)


def _nvidia(dtype: Dtype, layout: Layout) -> Iterator[TileConfig]:
    for block_m, block_n, line in _shapes(layout):
        area = block_m * block_n
        # A 4-byte operand across k is transposed on its way to wgmma: tiles for mma.sync win,
        # unless C is narrow or the operand's size is odd.
        across = dtype.bytes == 4 and layout is not Layout.NT
        if across and WGMMA_ROWS <= block_m < 256 and LARGE // 4 < area <= LARGE:
            continue
        warps = _warps(dtype, layout, area)
        for stages, num_warps, split_k in itertools.product(
            _stages(dtype, layout, block_m, area, line), warps, _splits(layout, area)
        ):
            yield TileConfig(
                block_m=block_m,
                block_n=block_n,
                block_k=max(SMALLEST_BLOCK, line // dtype.bytes),
                num_warps=num_warps,
                num_stages=stages,
                split_k=split_k,
            )


def _amd(arch: str, dtype: Dtype, layout: Layout) -> Iterator[TileConfig]:
    for block_m, block_n, line in _shapes(layout):
        area = block_m * block_n
        for split_k in _splits(layout, area):
            yield TileConfig(
                block_m=block_m,
                block_n=block_n,
                block_k=max(SMALLEST_BLOCK, line // dtype.bytes),
                num_warps=8 if area >= LARGE else 4,
                num_stages=2,
                split_k=split_k,
                matrix_instr_nonkdim=32 if min(block_m, block_n) >= WGMMA_ROWS else 16,
                waves_per_eu=0 if area >= LARGE else 2,
                kpack=2 if arch == "gfx942" else 1,
            )


class TileFamily(NamedTuple):
    """Candidates, and the loops that they share: a split changes no program's loop."""

    tiles: tuple[TileConfig, ...]
    columns: TileArrays
    loops: TileArrays
    """Distinct tiles but for the split."""
    loop: NDArray[np.intp]
    """Which of them each tile runs."""

    @classmethod
    def of(cls, tiles: Sequence[TileConfig]) -> TileFamily:
        """``tiles`` in their order."""
        columns = TileArrays.of(tiles)
        shapes = np.stack(columns._replace(split_k=np.ones(len(tiles))))
        loops, loop = np.unique(shapes, axis=1, return_inverse=True)
        return cls(tuple(tiles), columns, TileArrays(*loops), loop.reshape(-1))


@lru_cache(maxsize=64)
def _family(
    arch: str, limits: Architecture, lds_bytes: float, dtype: Dtype, layout: Layout
) -> tuple[TileConfig, ...]:
    found = _amd(arch, dtype, layout) if limits.vendor == "amd" else _nvidia(dtype, layout)
    family = tuple(dict.fromkeys(found))
    keep = fitting(limits, lds_bytes, dtype.bytes, TileArrays.of(family))
    return tuple(family[index] for index in np.flatnonzero(keep))


def tile_candidates(device: DeviceProfile, dtype: Dtype, layout: Layout) -> tuple[TileConfig, ...]:
    """The tiles that fit ``device``, in a fixed order.

    Raises:
        UsageError: the Triton kernels do not know the architecture, or none fits its shared memory.
    """
    lds_bytes = device.compute.lds_bytes.value
    family = _family(device.arch, architecture(device), lds_bytes, dtype, layout)
    if not family:
        raise UsageError(
            f"no tile of the Triton kernels fits {device.name}",
            field="compute.lds_bytes",
            value=lds_bytes,
            fix="correct the device profile, or remove its section triton: the vendor library "
            "runs every product then",
        )
    return family
