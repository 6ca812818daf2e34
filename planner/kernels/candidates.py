"""Tile configs worth considering on an architecture, whatever the product's size.

The family covers blocks of 16 to 256, the warps and stages that go with them, and splits of k. What
never wins is left out: one warp group for more accumulators than its registers, two for fewer than
they need to be busy, and splits where k is a layer's width (nt, nn) beyond a few.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from planner.kernels.resources import Architecture, TileArrays, architecture, fitting
from planner.specs.device import DeviceProfile
from planner.specs.errors import UsageError
from planner.specs.kernels import Layout, TileConfig
from planner.specs.units import Dtype

BLOCKS = (
    (16, 64), (16, 128), (32, 32), (32, 64), (64, 16), (64, 32), (64, 64), (64, 128), (64, 256),
    (128, 16), (128, 32), (128, 64), (128, 128), (128, 256), (256, 32), (256, 64), (256, 128),
)  # fmt: skip
DEPTH_BYTES = (64, 128, 256)
"""Of one block's row along k."""
SPLITS = {
    Layout.NT: (1, 2, 4),
    Layout.NN: (1, 2, 4),
    Layout.TN: (1, 2, 4, 6, 8, 12, 16, 32, 64),
}
BYTES_IN_FLIGHT = 16384
"""Fewer stages than would hold this many bytes do not hide the memory's latency."""


def _nvidia(dtype: Dtype, layout: Layout) -> Iterator[TileConfig]:
    for (block_m, block_n), depth_bytes, stages, split_k in itertools.product(
        BLOCKS, DEPTH_BYTES, (3, 4), SPLITS[layout]
    ):
        small = block_m * block_n <= 2048
        if (stages == 3) == small:
            continue
        yield TileConfig(
            block_m=block_m,
            block_n=block_n,
            block_k=max(16, depth_bytes // dtype.bytes),
            num_warps=8 if block_m * block_n > 128 * 128 else 4,
            num_stages=stages,
            split_k=split_k,
        )


def _amd(arch: str, dtype: Dtype, layout: Layout) -> Iterator[TileConfig]:
    for (block_m, block_n), depth_bytes, split_k in itertools.product(
        (*BLOCKS, (256, 256)), DEPTH_BYTES, SPLITS[layout]
    ):
        wide = block_m * block_n >= 128 * 128
        yield TileConfig(
            block_m=block_m,
            block_n=block_n,
            block_k=max(16, depth_bytes // dtype.bytes),
            num_warps=8 if wide else 4,
            num_stages=2,
            split_k=split_k,
            matrix_instr_nonkdim=16,
            waves_per_eu=0 if wide else 2,
            kpack=2 if arch == "gfx942" else 1,
        )


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
