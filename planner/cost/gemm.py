"""GEMM time of the vendor's library: tiles over the compute units, the fastest of many candidates.

C[m, n] = A[m, k] B[k, n], e bytes an element. For a tile m_T x n_T, k in steps of 128 bytes
(k_T = 128 / e), split-K s and N_CU units::

    tiles = ceil(m/m_T) ceil(n/n_T) s batch            steps = ceil(k / (s k_T))
    waves = (1 - o) ceil(tiles/N_CU) + o max(tiles/N_CU, 1)
    step  = max(compute + element loads, l2, t_step)
    t     = t_launch + waves t_fill + ((waves steps step)^3 + hbm^3)^(1/3) + store + reduce

* waves: the units of the last wave that have no tile are idle; the share o of that is hidden, by
  smaller tiles at the end or by splitting them along k (stream-K, persistent kernels).
* compute: 2 m_T n_T k_T FLOP at one unit's share of the peak. fp32 on vector units (c > 0) reads
  operands from shared memory besides: times 1 + c (1/m_T + 1/n_T).
* l2: operands of a step over one unit's share of the L2's bandwidth.
* element loads: rows that are no multiple of 16 bytes exclude the kernels that load tiles by bulk
  copies: the others issue (m_T + n_T) k_T e / (load width) loads, and their matrix instructions are
  slower (``narrow_compute``). Matrix units want 32-bit operands contiguous along k: tf32 operands
  that are not are transposed, element by element.
* A matrix times a vector (m or n is 1) has kernels of its own: neither compute nor element loads
  nor the latency of a step limit them.
* t_step: latency of a step, however small the tile. tf32 kernels have longer steps and fills.
* loop and memory overlap, but less where they meet: hence the third powers.
* hbm: A, unless the kernel before left it in the L2; B, unless five of its size fit there too.
* store: C over the store bandwidth. reduce (s > 1): fixed time and s fp32 sums, written and read.

Time is nondecreasing in m, n, k and batch for sizes of one alignment. Alignment looks only at sizes
that do not carry the local batch (nt, nn: k and n; tn: m and n), so the time is nondecreasing in
the local batch; between two widths of a layer, an aligned one may be faster than a smaller odd one.
Constants are fitted by ``benchmarks/fit_gemm.py``.

A CPU core has no waves: t = t_launch + FLOP / rate + (A + B + C bytes) / bandwidth. Packing
the operands does not overlap with the multiplication; the small matrices of a batch are not packed
and have the L2's bandwidth (``l2_over_hbm`` of the packing one).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.specs.device import DeviceProfile
from planner.specs.errors import UsageError
from planner.specs.kernels import Gemm, Layout
from planner.specs.units import Dtype

Array = NDArray[np.float64]

TILES = (
    (256, 256), (256, 128), (128, 256), (192, 128), (128, 192), (128, 128), (256, 64), (64, 256),
    (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (64, 32), (32, 64), (64, 16), (16, 64),
)  # fmt: skip
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
LARGEST_TILE = {64: 128 * 64, 128: 64 * 64, 256: 64 * 64}
"""m_T n_T for so many splits and more: few tiles leave units to fill only in a small matrix."""
STEP_BYTES = 128
"""Of one row of a tile in one step of k: a cache line."""
PARTIAL_SUM_BYTES = 8
"""One fp32 partial sum written and read again."""
VECTOR_BYTES = 16
"""Of the widest load; bulk copies need rows that are multiples of it."""
COPIES_OF_B = 5
"""B of this many products pass between two uses of one: weights of a few layers."""
OPERANDS_ACROSS_K = {Layout.NT: 0, Layout.NN: 1, Layout.TN: 2}
"""Operands that are not contiguous along k: none, B, both."""

CANDIDATES = tuple(
    (m, n, s) for m, n in TILES for s in SPLITS if m * n <= LARGEST_TILE.get(s, m * n)
)
"""m_T, n_T and s."""
_M_T, _N_T, _S = (np.array(column, dtype=np.float64) for column in zip(*CANDIDATES, strict=True))

_ANY_ROWS, _ALONG_K, _MATRIX = (np.array([[value]]) for value in (float(VECTOR_BYTES), 0.0, 1.0))


class Machine(NamedTuple):
    """What the formula needs of a device for one dtype; efficiencies are applied already."""

    units: float
    flops_per_s: float
    hbm_bytes_per_s: float
    l2_bytes_per_s: float
    store_bytes_per_s: float
    reduce_bytes_per_s: float
    cache_bytes: float
    element_bytes: float
    launch_s: float
    fill_s: float
    step_s: float
    reduce_s: float
    narrow_load_s: float
    narrow_compute: float
    transposed_load_s: float
    vector_operands: float
    """c of the formula."""
    wave_overlap: float


class Core(NamedTuple):
    """What the formula needs of a CPU core."""

    flops_per_s: float
    bytes_per_s: float
    small_bytes_per_s: float
    """Of the small matrices of a batch."""
    element_bytes: float
    launch_s: float


def peak_flops_per_s(device: DeviceProfile, dtype: Dtype) -> float:
    """Peak of the matrix units.

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
    return peak.value


def machine(device: DeviceProfile, dtype: Dtype) -> Machine:
    """The accelerator as the GEMM model sees it.

    Raises:
        UsageError: the device cannot multiply in ``dtype``.
    """
    gemm = device.gemm
    tf32 = dtype is Dtype.TF32
    # Vector units have no bulk copies to miss.
    vector = dtype is Dtype.FP32
    hbm = device.memory.hbm_bytes_per_s.value * gemm.hbm_efficiency.value
    return Machine(
        units=device.compute.units.value,
        flops_per_s=peak_flops_per_s(device, dtype) * gemm.compute_efficiency.value,
        hbm_bytes_per_s=hbm,
        l2_bytes_per_s=hbm * gemm.l2_over_hbm.value,
        store_bytes_per_s=hbm * gemm.store_over_hbm.value,
        reduce_bytes_per_s=hbm * gemm.reduce_over_hbm.value,
        cache_bytes=device.memory.l2_bytes.value,
        element_bytes=dtype.bytes,
        launch_s=gemm.launch_s.value,
        fill_s=(gemm.tf32_fill_s if tf32 else gemm.fill_s).value,
        step_s=(gemm.tf32_step_s if tf32 else gemm.step_s).value,
        reduce_s=gemm.reduce_s.value,
        narrow_load_s=0.0 if vector else gemm.narrow_load_s.value,
        narrow_compute=1.0 if vector else gemm.narrow_compute.value,
        transposed_load_s=gemm.transposed_load_s.value if tf32 else 0.0,
        vector_operands=gemm.vector_operands.value if vector else 0.0,
        wave_overlap=gemm.wave_overlap.value,
    )


def core(device: DeviceProfile, dtype: Dtype) -> Core:
    """The CPU core as the GEMM model sees it.

    Raises:
        UsageError: the device cannot multiply in ``dtype``.
    """
    gemm = device.gemm
    bytes_per_s = device.memory.hbm_bytes_per_s.value * gemm.hbm_efficiency.value
    return Core(
        flops_per_s=peak_flops_per_s(device, dtype) * gemm.compute_efficiency.value,
        bytes_per_s=bytes_per_s,
        small_bytes_per_s=bytes_per_s * gemm.l2_over_hbm.value,
        element_bytes=dtype.bytes,
        launch_s=gemm.launch_s.value,
    )


def load_bytes(gemm: Gemm, element_bytes: int) -> int:
    """Widest load, at most 16 bytes, that divides every row of A, B and C."""
    row = gemm.m if gemm.layout is Layout.TN else gemm.k
    return math.gcd(VECTOR_BYTES, row * element_bytes, gemm.n * element_bytes)


def candidate_seconds(
    machine: Machine,
    m: Array,
    n: Array,
    k: Array,
    batch: Array,
    load_bytes: Array = _ANY_ROWS,
    across_k: Array = _ALONG_K,
    is_matrix: Array = _MATRIX,
) -> Array:
    """Seconds of every product (rows) under every candidate (columns: ``CANDIDATES``).

    Args:
        m, n, k, batch: one column vector each, shape (products, 1).
        load_bytes: widest load that the rows of A, B and C allow.
        across_k: how many of B and A are not contiguous along k (1: B).
        is_matrix: 0 where m or n is 1, else 1.
    """
    element_bytes = machine.element_bytes
    step_k = STEP_BYTES / element_bytes
    filled = np.ceil(m / _M_T) * np.ceil(n / _N_T) * (_S * batch) / machine.units
    idle_hidden = machine.wave_overlap
    waves = (1 - idle_hidden) * np.ceil(filled) + idle_hidden * np.maximum(filled, 1)
    steps = np.ceil(k / (_S * step_k))

    compute_s = 2 * _M_T * _N_T * step_k / (machine.flops_per_s / machine.units)
    compute_s = compute_s * (1 + machine.vector_operands * (1 / _M_T + 1 / _N_T))
    narrow = load_bytes < VECTOR_BYTES
    compute_s = compute_s * np.where(narrow, machine.narrow_compute, 1)
    narrow_loads = np.where(narrow, STEP_BYTES / load_bytes, 0) * (_M_T + _N_T)
    transposed_loads = step_k * ((across_k > 0) * _N_T + (across_k > 1) * _M_T)
    loads_s = narrow_loads * machine.narrow_load_s + transposed_loads * machine.transposed_load_s
    l2_bytes = (np.minimum(_M_T, m) + np.minimum(_N_T, n)) * STEP_BYTES
    l2_s = l2_bytes / (machine.l2_bytes_per_s / machine.units)
    busy_s = np.maximum(compute_s + loads_s, machine.step_s)
    loop_s = waves * steps * np.maximum(is_matrix * busy_s, l2_s)

    a_bytes, b_bytes = m * k * batch * element_bytes, k * n * batch * element_bytes
    c_bytes = m * n * batch * element_bytes
    a_absent = np.minimum((a_bytes + b_bytes + c_bytes) / machine.cache_bytes, 1)
    b_absent = np.minimum((a_bytes + COPIES_OF_B * b_bytes + c_bytes) / machine.cache_bytes, 1)
    hbm_s = (a_absent * a_bytes + b_absent * b_bytes) / machine.hbm_bytes_per_s
    body_s = np.cbrt(loop_s * loop_s * loop_s + hbm_s * hbm_s * hbm_s)

    partial_bytes = PARTIAL_SUM_BYTES * m * n * batch * _S
    split_s = machine.reduce_s + partial_bytes / machine.reduce_bytes_per_s
    reduce_s = np.where(_S > 1, split_s, 0.0)
    fixed_s = machine.launch_s + c_bytes / machine.store_bytes_per_s
    return np.asarray(fixed_s + waves * machine.fill_s + body_s + reduce_s)


def core_seconds(core: Core, m: Array, n: Array, k: Array, batch: Array) -> Array:
    """Seconds of every product on one CPU core; arrays of one shape."""
    flops = 2 * m * n * k
    moved_bytes = (m * k + k * n + m * n) * core.element_bytes
    bandwidth = np.where(batch > 1, core.small_bytes_per_s, core.bytes_per_s)
    return np.asarray(core.launch_s + batch * (flops / core.flops_per_s + moved_bytes / bandwidth))


def library_seconds(machine: Machine, gemms: Sequence[Gemm]) -> Array:
    """Seconds of each product with its fastest candidate, shape (products,)."""
    element_bytes = int(machine.element_bytes)
    columns = np.array(
        [
            (
                *gemm[:4],
                load_bytes(gemm, element_bytes),
                OPERANDS_ACROSS_K[gemm.layout],
                1 not in gemm[:2],
            )
            for gemm in gemms
        ],
        dtype=np.float64,
    )
    seconds = candidate_seconds(machine, *(columns[:, index : index + 1] for index in range(7)))
    return np.asarray(seconds.min(axis=1))


@lru_cache(maxsize=4096)
def _fastest_seconds(machine: Machine | Core, gemms: tuple[Gemm, ...]) -> tuple[float, ...]:
    if isinstance(machine, Machine):
        return tuple(library_seconds(machine, gemms).tolist())
    sizes = np.array([gemm[:4] for gemm in gemms], dtype=np.float64)
    return tuple(core_seconds(machine, *sizes.T).tolist())


def gemms_seconds(device: DeviceProfile, gemms: Sequence[Gemm], dtype: Dtype) -> tuple[float, ...]:
    """Seconds of each product in the vendor's library, without its epilogue.

    Raises:
        UsageError: the device cannot multiply in ``dtype``.
    """
    if not gemms:
        return ()
    return _fastest_seconds((core if device.is_cpu else machine)(device, dtype), tuple(gemms))


def gemm_seconds(
    device: DeviceProfile, m: int, n: int, k: int, dtype: Dtype, batch: int = 1
) -> float:
    """Seconds of one forward product (or ``batch`` equal ones in one launch).

    Raises:
        UsageError: the device cannot multiply in ``dtype``.
    """
    return gemms_seconds(device, (Gemm(m, n, k, batch),), dtype)[0]
