"""GEMM time: tiles in waves over the compute units, the fastest of a few candidate tiles.

For a tile (m_T, n_T, K_T), split-K s and N_CU compute units::

    T_out = ceil(M/m_T) * ceil(N/n_T) * s * batch        waves = ceil(T_out / N_CU)
    L_tile = L_prefetch + ceil(K / (s K_T)) * max(L_compute, L_l2, L_hbm) + L_store
    t = t_launch + waves * L_tile  (+ t_reduce + partial sums through the L2 if s > 1)

``L_compute`` is the tile's FLOP over one unit's share of the peak, derated for small tiles (fewer
FLOP per operand fetch); ``L_l2`` is the tile's operands over one unit's share of the L2; ``L_hbm``
is the unique operands of the patch of tiles that run together (near-square, within the grid) over
HBM bandwidth. Form: tile/wave analysis as in Origami and stream-K papers; constants are fitted by
``benchmarks/fit_gemm.py``. For every candidate the time is nondecreasing in M, N, K and batch, so
the minimum is too.

A CPU core has no waves: t = t_launch + FLOP / rate + (A + B + C bytes) / bandwidth. Packing
the operands does not overlap with the multiplication; the small matrices of a batch are not packed
and have the L2's bandwidth (``l2_over_hbm`` of the packing one).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.specs.device import DeviceProfile
from planner.specs.errors import UsageError
from planner.specs.units import Dtype

Array = NDArray[np.float64]

TILES = (
    (256, 256), (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128),
    (64, 64), (128, 32), (32, 128), (64, 32), (32, 64), (32, 32), (128, 16), (16, 128), (64, 16),
    (16, 64), (16, 16),
)  # fmt: skip
TILE_K = 64
SPLITS = (1, 2, 4, 8, 16, 32)
SMALL_TILE_ELEMENTS = 1024
"""Output elements at which a tile reaches half of the unit's rate."""
PARTIAL_SUM_BYTES = 8
"""One fp32 partial sum written and read again."""

_M_T, _N_T, _S = (
    np.array(column, dtype=np.float64)
    for column in zip(*((m, n, s) for m, n in TILES for s in SPLITS), strict=True)
)


class Shape(NamedTuple):
    """C[m, n] = A[m, k] B[k, n], ``batch`` times."""

    m: int
    n: int
    k: int
    batch: int = 1


class Machine(NamedTuple):
    """What the formula needs of a device for one dtype; efficiencies are applied already."""

    units: float
    flops_per_s: float
    hbm_bytes_per_s: float
    l2_bytes_per_s: float
    element_bytes: float
    launch_s: float
    prefetch_s: float
    reduce_s: float


def machine(device: DeviceProfile, dtype: Dtype) -> Machine:
    """The device as the GEMM model sees it.

    Raises:
        UsageError: the device cannot multiply in ``dtype``.
    """
    peak = device.compute.peak_flops_per_s.get(dtype)
    if peak is None:
        raise UsageError(
            f"{device.name} cannot multiply matrices in this precision",
            field="compute_precision",
            value=str(dtype),
            fix=f"use one of {', '.join(device.compute.peak_flops_per_s)}, "
            f"or add compute.peak_flops_per_s.{dtype} to the device profile",
        )
    gemm = device.gemm
    hbm = device.memory.hbm_bytes_per_s.value * gemm.hbm_efficiency.value
    return Machine(
        units=device.compute.units.value,
        flops_per_s=peak.value * gemm.compute_efficiency.value,
        hbm_bytes_per_s=hbm,
        l2_bytes_per_s=hbm * gemm.l2_over_hbm.value,
        element_bytes=dtype.bytes,
        launch_s=gemm.launch_s.value,
        prefetch_s=gemm.prefetch_s.value,
        reduce_s=gemm.reduce_s.value,
    )


def candidate_seconds(machine: Machine, m: Array, n: Array, k: Array, batch: Array) -> Array:
    """Seconds of every shape (rows) under every candidate (columns: ``TILES`` x ``SPLITS``).

    Args:
        m, n, k, batch: one column vector each, shape (shapes, 1).
    """
    grid_m, grid_n = np.ceil(m / _M_T), np.ceil(n / _N_T)
    tiles = grid_m * grid_n * _S * batch
    waves = np.ceil(tiles / machine.units)
    steps = np.ceil(k / (_S * TILE_K))
    # Lanes beyond the matrix load nothing, but the unit computes the whole tile.
    rows, columns, depth = np.minimum(_M_T, m), np.minimum(_N_T, n), k / _S

    unit_flops_per_s = machine.flops_per_s / machine.units
    tile_rate = unit_flops_per_s / (1 + SMALL_TILE_ELEMENTS / (_M_T * _N_T))
    compute_s = steps * 2 * _M_T * _N_T * TILE_K / tile_rate
    unit_l2_bytes_per_s = machine.l2_bytes_per_s / machine.units
    l2_s = (rows + columns) * depth * machine.element_bytes / unit_l2_bytes_per_s

    # Patch of one wave: patch_m x patch_n tiles of one (split, batch) slice.
    slices = np.minimum(_S * batch, tiles / waves)
    active = tiles / waves / slices
    square = np.sqrt(active * columns / rows)
    patch_m = np.clip(square, np.maximum(active / grid_n, 1.0), np.minimum(grid_m, active))
    unique_elements = slices * (patch_m * rows + active / patch_m * columns) * depth
    hbm_s = unique_elements * machine.element_bytes / machine.hbm_bytes_per_s

    store_s = rows * columns * tiles / waves * machine.element_bytes / machine.hbm_bytes_per_s
    tile_s = machine.prefetch_s + np.maximum(compute_s, np.maximum(l2_s, hbm_s)) + store_s
    partial_bytes = PARTIAL_SUM_BYTES * m * n * batch * _S
    reduce_s = np.where(_S > 1, machine.reduce_s + partial_bytes / machine.l2_bytes_per_s, 0.0)
    return np.asarray(machine.launch_s + waves * tile_s + reduce_s)


def core_seconds(machine: Machine, m: Array, n: Array, k: Array, batch: Array) -> Array:
    """Seconds of every shape on one CPU core; arrays of one shape."""
    flops = 2 * m * n * k
    moved_bytes = (m * k + k * n + m * n) * machine.element_bytes
    bandwidth = np.where(batch > 1, machine.l2_bytes_per_s, machine.hbm_bytes_per_s)
    return np.asarray(
        machine.launch_s + batch * (flops / machine.flops_per_s + moved_bytes / bandwidth)
    )


@lru_cache(maxsize=4096)
def _fastest_seconds(
    machine: Machine, is_core: bool, shapes: tuple[Shape, ...]
) -> tuple[float, ...]:
    sizes = np.array(shapes, dtype=np.float64)
    columns = (sizes[:, index : index + 1] for index in range(4))
    seconds = (core_seconds if is_core else candidate_seconds)(machine, *columns)
    return tuple(seconds.min(axis=1).tolist())


def gemms_seconds(
    device: DeviceProfile, shapes: Sequence[Shape], dtype: Dtype
) -> tuple[float, ...]:
    """Seconds of each GEMM with its fastest candidate.

    Raises:
        UsageError: the device cannot multiply in ``dtype``.
    """
    if not shapes:
        return ()
    return _fastest_seconds(machine(device, dtype), device.is_cpu, tuple(shapes))


def gemm_seconds(
    device: DeviceProfile, m: int, n: int, k: int, dtype: Dtype, batch: int = 1
) -> float:
    """Seconds of one GEMM (or ``batch`` equal ones in one launch) with its fastest candidate.

    Raises:
        UsageError: the device cannot multiply in ``dtype``.
    """
    return gemms_seconds(device, (Shape(m, n, k, batch),), dtype)[0]
