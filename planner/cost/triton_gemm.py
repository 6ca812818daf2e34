"""Time of one given Triton tile config: programs in waves, each the slowest of its resources.

The kernel (``trainers.kernels``): one program for each tile of C and split of k; a loop over blocks
of k, loads s - 1 steps ahead; split sums go to a workspace (fp32) that a second kernel adds up.

Notation: C[m, n] = A[m, k] B[k, n]; blocks B_M, B_N, B_K; s stages; r programs on one unit (at most
``occupancy``); programs = ceil(m/B_M) ceil(n/B_N) split_k; steps = ceil(ceil(k/B_K) / split_k)::

    t        = t_launch + waves * t_fill + (main^4 + hbm^4)^(1/4) + store (+ second kernel)
    main     = full_waves * steps * step(occupancy) + steps * step(r of the last wave)
    step(r)  = max(r matrix, r shared, r load, matrix + t_step, t_latency / (s - 1)) + r scalar

* matrix: 2 B_M B_N B_K over one unit's rate (wgmma, or mma.sync below 64 rows).
* shared: operands written to shared memory once, and read by the matrix unit: 64 + B_N columns for
  each 64 rows (wgmma), or the blocks of each warp.
* load: operands over the L2's bandwidth, of one unit and of all that are active.
* scalar: operands whose contiguous size is no multiple of 16 bytes are loaded one by one.
* hbm: what the L2 does not hold: A once, B again for each group of rows that it does not cover.
* store: C (or the partial sums) over the store bandwidth.

Every term is nondecreasing in m, n, k. Alignment looks only at sizes that do not carry the batch
(nt, nn: n and k; tn: m and n), so the time is nondecreasing in the local batch; between two widths
of a layer, an aligned one may be faster than a smaller unaligned one. Constants are fitted by
``benchmarks/fit_triton.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.kernels.resources import (
    SMALLEST_BLOCK,
    WGMMA_ROWS,
    WGMMA_WARPS,
    Architecture,
    TileArrays,
    architecture,
    from_shared,
    occupancy,
)
from planner.specs.device import DeviceProfile
from planner.specs.errors import UsageError
from planner.specs.kernels import Epilogue, Gemm, Layout
from planner.specs.units import Dtype

Array = NDArray[np.float64]

OVERLAP = 4.0
"""Exponent of the sum of matrix and memory time: they overlap, but not at their meeting point."""
VECTOR_BYTES = 16
"""Of one lane's widest load."""
SHARED_BYTES_PER_CLOCK = 128
PARTIAL_BYTES = 4
CROSS_OPERANDS = 3
"""x_0 and x_l read, C + b written besides C."""


class TritonMachine(NamedTuple):
    """What the formula needs of a device for one dtype; efficiencies are applied already."""

    arch: Architecture
    units: float
    lds_bytes: float
    cache_bytes: float
    element_bytes: int
    flops_per_s: float
    """Of one unit, from shared memory."""
    register_flops_per_s: float
    """Of one unit, from registers."""
    shared_bytes_per_s: float
    """Of one unit."""
    l2_bytes_per_s: float
    unit_l2_bytes_per_s: float
    hbm_bytes_per_s: float
    store_bytes_per_s: float
    launch_s: float
    fill_s: float
    step_s: float
    latency_s: float
    reduce_s: float
    scalar_s: float
    """Of one element."""


class Products(NamedTuple):
    """Columns of many products; they broadcast with those of the tiles."""

    m: Array
    n: Array
    k: Array
    rows_a: NDArray[np.bool_]
    """Whether A is stored by rows (nt, nn)."""
    rows_b: NDArray[np.bool_]
    """Whether B is stored by rows (nn, tn)."""
    output_bytes: Array
    """Of one element of C: a weight gradient is summed into fp32 weights."""
    epilogue_bytes: Array
    """Read and written for each element of C besides it."""

    @classmethod
    def of(cls, gemms: Sequence[Gemm], element_bytes: int) -> Products:
        """``gemms`` as columns of shape (products, 1)."""
        sizes = np.array([gemm[:3] for gemm in gemms], dtype=np.float64).reshape(-1, 3)
        weight_gradient = np.array([[gemm.layout is Layout.TN] for gemm in gemms], dtype=bool)
        cross = np.array([[gemm.epilogue is Epilogue.CROSS] for gemm in gemms], dtype=bool)
        output_bytes = np.where(weight_gradient, 4.0, max(element_bytes, 2))
        return cls(
            m=sizes[:, :1],
            n=sizes[:, 1:2],
            k=sizes[:, 2:],
            rows_a=~weight_gradient,
            rows_b=np.array([[gemm.layout is not Layout.NT] for gemm in gemms], dtype=bool),
            output_bytes=output_bytes,
            epilogue_bytes=np.where(cross, CROSS_OPERANDS * output_bytes, 0.0),
        )


def triton_machine(device: DeviceProfile, dtype: Dtype) -> TritonMachine:
    """The device as the model of the Triton kernels sees it.

    Raises:
        UsageError: no Triton kernels on it (a CPU, no section ``triton``, unknown architecture), or
            it cannot multiply in ``dtype``.
    """
    constants = device.triton
    if constants is None:
        raise UsageError(
            f"{device.name} has no Triton kernels",
            field="triton",
            fix="add a section triton to the device profile, or use the vendor library",
        )
    peak = device.compute.peak_flops_per_s.get(dtype)
    if peak is None:
        raise UsageError(
            f"{device.name} cannot multiply matrices in this precision",
            field="compute_precision",
            value=str(dtype),
            fix=f"use one of {', '.join(device.compute.peak_flops_per_s)}",
        )
    unit_flops_per_s = peak.value / device.compute.units.value
    clock_hz = device.compute.clock_hz.value
    hbm = device.memory.hbm_bytes_per_s.value
    return TritonMachine(
        arch=architecture(device),
        units=device.compute.units.value,
        lds_bytes=device.compute.lds_bytes.value,
        cache_bytes=device.memory.last_level_cache_bytes.value,
        element_bytes=dtype.bytes,
        flops_per_s=unit_flops_per_s * constants.matrix_efficiency.value,
        register_flops_per_s=unit_flops_per_s * constants.register_efficiency.value,
        shared_bytes_per_s=SHARED_BYTES_PER_CLOCK * clock_hz * constants.shared_efficiency.value,
        l2_bytes_per_s=hbm * constants.l2_over_hbm.value,
        unit_l2_bytes_per_s=clock_hz * constants.unit_l2_bytes_per_clock.value,
        hbm_bytes_per_s=hbm * constants.hbm_efficiency.value,
        store_bytes_per_s=hbm * constants.store_over_hbm.value,
        launch_s=constants.launch_s.value,
        fill_s=constants.fill_s.value,
        step_s=constants.step_s.value,
        latency_s=constants.latency_s.value,
        reduce_s=constants.reduce_s.value,
        scalar_s=constants.scalar_s.value,
    )


def seconds(machine: TritonMachine, products: Products, tiles: TileArrays) -> Array:
    """Seconds of the products under the tiles; columns of both broadcast."""
    m, n, k = products.m, products.n, products.k
    split = tiles.split_k
    grid_m, grid_n = np.ceil(m / tiles.block_m), np.ceil(n / tiles.block_n)
    programs = grid_m * grid_n * split
    steps = np.ceil(np.ceil(k / tiles.block_k) / split)
    resident = occupancy(machine.arch, machine.lds_bytes, machine.element_bytes, tiles)
    slots = machine.units * resident
    full_waves = np.floor(programs / slots)
    last_resident = np.ceil((programs - full_waves * slots) / machine.units)

    step = _Step.of(machine, products, tiles, np.minimum(programs, machine.units))
    main_s = steps * (full_waves * step.seconds(resident) + step.seconds(last_resident))
    hbm_s = _hbm_bytes(machine, products, tiles, grid_m, grid_n, slots) / machine.hbm_bytes_per_s
    body_s = (main_s**OVERLAP + hbm_s**OVERLAP) ** (1 / OVERLAP)
    fill_s = machine.fill_s * (full_waves + (last_resident > 0))

    elements = m * n
    finish_bytes = elements * (products.output_bytes + products.epilogue_bytes)
    partial_bytes = elements * PARTIAL_BYTES * split
    alone_s = finish_bytes / machine.store_bytes_per_s
    split_s = machine.reduce_s + (2 * partial_bytes + finish_bytes) / machine.store_bytes_per_s
    store_s = np.where(split > 1, split_s, alone_s)
    return np.asarray(machine.launch_s + fill_s + body_s + store_s)


class _Step(NamedTuple):
    """Seconds that one block of k takes of each resource of a unit, for one program."""

    shared_out: Array
    """The slowest of what resident programs share."""
    alone: Array
    """What one program needs, however many there are."""
    scalar: Array

    @classmethod
    def of(
        cls, machine: TritonMachine, products: Products, tiles: TileArrays, active: Array
    ) -> _Step:
        """``active``: units that work."""
        m_b, n_b, k_b = tiles.block_m, tiles.block_n, tiles.block_k
        shared = from_shared(machine.arch, tiles)
        rate = np.where(shared, machine.flops_per_s, machine.register_flops_per_s)
        matrix_s = 2 * m_b * n_b * k_b / rate
        line_bytes = k_b * machine.element_bytes
        touched = np.where(shared, _group_lines(tiles), _warp_lines(tiles)) + m_b + n_b
        shared_s = touched * line_bytes / machine.shared_bytes_per_s
        loaded_bytes = (np.minimum(m_b, products.m) + np.minimum(n_b, products.n)) * line_bytes
        load_s = loaded_bytes * np.maximum(
            active / machine.l2_bytes_per_s, 1 / machine.unit_l2_bytes_per_s
        )
        ahead = np.maximum(tiles.num_stages - np.where(shared, 1, 2), 1)
        odd_a = _is_odd(np.where(products.rows_a, products.k, products.m), machine.element_bytes)
        odd_b = _is_odd(np.where(products.rows_b, products.n, products.k), machine.element_bytes)
        return cls(
            shared_out=np.maximum(np.maximum(matrix_s, shared_s), load_s),
            alone=np.maximum(matrix_s + machine.step_s, machine.latency_s / ahead),
            scalar=(odd_a * m_b + odd_b * n_b) * k_b * machine.scalar_s,
        )

    def seconds(self, resident: Array) -> Array:
        """Of one block of k with ``resident`` programs on the unit; 0 for none."""
        busy = np.maximum(resident * self.shared_out, self.alone) + resident * self.scalar
        return np.where(resident > 0, busy, 0.0)


def _is_odd(contiguous: Array, element_bytes: int) -> NDArray[np.bool_]:
    return np.asarray(contiguous * element_bytes % VECTOR_BYTES != 0)


def _group_lines(tiles: TileArrays) -> Array:
    """Lines of k that warp groups read: 64 rows of A with the columns of B of their group."""
    slabs = np.maximum(tiles.block_m / WGMMA_ROWS, 1)
    groups_along_n = np.maximum(tiles.num_warps / WGMMA_WARPS / slabs, 1)
    return np.asarray(slabs * (groups_along_n * WGMMA_ROWS + tiles.block_n))


def _warp_lines(tiles: TileArrays) -> Array:
    """Lines of k that warps read, laid out over the tile as near to square as it allows."""
    warps = tiles.num_warps
    square = np.sqrt(warps * tiles.block_m / tiles.block_n)
    along_m = np.clip(np.minimum(square, tiles.block_m / SMALLEST_BLOCK), 1, warps)
    return np.asarray(warps / along_m * tiles.block_m + along_m * tiles.block_n)


def _hbm_bytes(
    machine: TritonMachine,
    products: Products,
    tiles: TileArrays,
    grid_m: Array,
    grid_n: Array,
    slots: Array,
) -> Array:
    """Operands read from device memory: those that the cache holds from their last use are not."""
    a_bytes = products.m * products.k * machine.element_bytes
    b_bytes = products.n * products.k * machine.element_bytes
    patch_m = np.minimum(grid_m, np.maximum(tiles.group_m, slots / grid_n))
    reread = (np.ceil(grid_m / patch_m) - 1) * np.minimum(b_bytes / machine.cache_bytes, 1)
    read_bytes = a_bytes + b_bytes * (1 + reread)
    all_bytes = read_bytes + products.m * products.n * products.output_bytes
    return np.asarray(read_bytes * np.minimum(all_bytes / machine.cache_bytes, 1))


def tile_seconds(
    device: DeviceProfile, dtype: Dtype, gemms: Sequence[Gemm], tiles: TileArrays
) -> Array:
    """Seconds of each product (rows) under each tile (columns); ``batch`` must be 1.

    Raises:
        UsageError: no Triton kernels on the device, or it cannot multiply in ``dtype``.
    """
    return seconds(triton_machine(device, dtype), Products.of(gemms, dtype.bytes), tiles)
