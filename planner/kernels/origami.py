"""Origami's tile latency with its published constants, for comparison with hwplan's own model.

All latencies are cycles of the compute clock. For a tile (m_T, n_T, K_T)::

    L_tile  = ceil(K/K_T) * max(L_compute, L_mem) + L_prefetch + L_store
    L_total = ceil(T_out / N_CU) * L_tile

* ``L_compute``: matrix instructions of one k step over the unit's four matrix cores.
* ``L_mem``: the slowest of L2, MALL and HBM for the operands of all active units. What a level
  passes on is 1 - hit rate of it, at least the unique operands; the hit rate is the reuse inside a
  rectangular patch of tiles (a chiplet's for the L2, all active tiles for the MALL):
  ``1 - (p m_T + q n_T) / (p q (m_T + n_T))`` for p x q tiles. HBM and MALL reach the share
  ``a n^2 + b n + c <= 1`` of their bandwidth with n active units.
* The package's weights: prefetch 1.5, store 2, 500 cycles for each k step, 0.95 for the occupancy,
  and work on padded tiles over work on the matrix as a factor on everything in the main loop.

Sources: the equation is Origami's (arXiv:2512.04226, tritonBLAS); constants, weights and grid rules
are those that the package rocm-origami 0.0.3 (MIT) publishes for gfx942 and gfx950. A step of the
main loop is counted as ``ceil(K/K_T) - 1``, at least one: the first is the prefetch. Without
counterpart here: the package's shrinking of patches that exceed the L2 (none does up to 256x256x128
at two bytes), the cost of converting emulated TF32, batches, and its list of hand-tuned kernels.
``benchmarks/origami_check.py`` compares the result with the package's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.kernels.origami_constants import PACKAGE, Architecture, Weights
from planner.specs.errors import UsageError
from planner.specs.kernels import Gemm, Layout
from planner.specs.units import Dtype

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

MATRIX_CORES = 4
"""Per compute unit."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
STEPS_OF_SPLIT = 8
"""k steps that a split must leave to each program."""
DEEP_STEPS = 64
"""k steps from which few tiles are split over all units at once."""
SKINNY_RATIO = 5
DEFAULT_HIT = 0.5
"""The package's L2 hit rate of a patch without reuse (one tile)."""
SPLIT_ELEMENTS_PER_CYCLE = 64
"""Partial sums of one tile added by its programs."""


class Grid(StrEnum):
    """How many programs run the tiles."""

    DATA_PARALLEL = "data_parallel"
    """One for each tile."""
    K_SPLIT_AWARE = "k_split_aware"
    """Stream-K: several for one tile where tiles are few, whole waves where they are many."""


class Tile(NamedTuple):
    """Output tile and k step of one program, elements."""

    m: int
    n: int
    k: int


def programs(tiles: Array, steps: Array, units: int, grid: Grid) -> Array:
    """Programs that run ``tiles`` output tiles of ``steps`` k steps each."""
    if grid is Grid.DATA_PARALLEL:
        return tiles
    # More tiles than units: so few programs that each has the same number of tiles, or of halves.
    waves = np.maximum(np.floor(tiles / units), 1.0)
    streamed = tiles
    for part in (0.5, 0.0):
        even = np.floor(tiles / (waves + part) + 0.5)
        streamed = np.where(even <= units, even, streamed)
    split = np.ones_like(tiles)
    for factor in SPLITS:
        possible = (tiles * factor <= units) & (steps >= STEPS_OF_SPLIT * factor)
        split = np.where(possible, factor, split)
    deep = (steps >= DEEP_STEPS) & (tiles <= units / 4)
    fill = np.minimum(np.floor(units / tiles), np.floor(steps / STEPS_OF_SPLIT))
    return np.where(tiles > units, streamed, tiles * np.where(deep, fill, split))


class _Run(NamedTuple):
    """Products (rows) under tiles (columns): sizes, tile sizes, tiles of the grid, and of the
    programs those that are active at once and those that share one tile; whether operands are
    contiguous along k; the elements of one line."""

    m: Array
    n: Array
    k: Array
    m_t: Array
    n_t: Array
    k_t: Array
    grid_m: Array
    grid_n: Array
    active: Array
    split: Array
    a_along_k: Mask
    b_along_k: Mask
    element_bytes: int
    line: float


def _lines(run: _Run, elements: Array) -> Array:
    """Bytes of the whole lines that ``elements`` contiguous ones touch."""
    return np.asarray(np.ceil(elements / run.line) * run.line * run.element_bytes)


def _patch(run: _Run, count: Array, rows: Array, columns: Array) -> tuple[Array, Array]:
    """Rows and columns of ``count`` tiles inside the grid; too many rows become more columns."""
    wrapped = np.maximum(columns, np.ceil(count / run.grid_m))
    columns = np.where(rows > run.grid_m, wrapped, columns)
    return np.minimum(rows, run.grid_m), np.minimum(columns, run.grid_n)


def _hit_rate(run: _Run, patch: tuple[Array, Array]) -> Array:
    """Share of a patch's operand reads that repeat what another of its tiles reads."""
    rows, columns = patch
    unique = rows * run.m_t + columns * run.n_t
    return np.asarray(1 - unique / (rows * columns * (run.m_t + run.n_t)))


def _hbm_bytes_per_cycle(target: Architecture, run: _Run) -> Array:
    return target.hbm_bytes_per_s / target.clock_hz * _reached(target, run)


def _reached(target: Architecture, run: _Run) -> Array:
    a, b, c = target.saturation
    return np.asarray(np.minimum(a * run.active**2 + b * run.active + c, 1.0))


def _compute_cycles(target: Architecture, run: _Run, dtype: Dtype) -> Array:
    """Matrix instructions of one k step of one tile."""
    m, n, k, cycles = target.instructions[dtype]
    issued = np.ceil(run.m_t / m) * np.ceil(run.n_t / n) * np.ceil(run.k_t / k)
    return np.asarray(issued * (cycles // MATRIX_CORES))


def _memory_cycles(target: Architecture, run: _Run, latency_cycles: float) -> Array:
    """Operands of one k step of all active tiles, through the slowest level."""
    width = np.ceil(np.sqrt(target.units / target.chiplets))
    columns = np.minimum(width, run.grid_n)
    count = np.minimum(run.grid_m * run.grid_n, target.units)
    count = np.maximum(np.ceil(np.ceil(count / run.split) / target.chiplets), 1.0)
    chiplet = _patch(run, count, np.ceil(count / columns), columns)
    device = _patch(run, run.active, np.ceil(run.active / width), columns)
    l2_hit = _hit_rate(run, chiplet)
    l2_hit = np.where(l2_hit == 0, DEFAULT_HIT, l2_hit)

    m_t, n_t, k_t = run.m_t, run.n_t, run.k_t
    a = np.where(run.a_along_k, m_t * _lines(run, k_t), _lines(run, m_t) * k_t)
    b = np.where(run.b_along_k, n_t * _lines(run, k_t), _lines(run, n_t) * k_t)
    l2_bytes = (a + b) * run.active
    unique_bytes = (device[0] * m_t + device[1] * n_t) * k_t * run.element_bytes
    mall_bytes = np.maximum((1 - l2_hit) * l2_bytes, unique_bytes)
    hbm_bytes = np.maximum((1 - _hit_rate(run, device)) * mall_bytes, unique_bytes)

    l2_rate = target.l2_bytes_per_s / target.clock_hz * run.active / target.units
    mall_rate = target.mall_bytes_per_s / target.clock_hz * _reached(target, run)
    hbm = hbm_bytes / _hbm_bytes_per_cycle(target, run) + latency_cycles
    return np.asarray(np.maximum(np.maximum(l2_bytes / l2_rate, mall_bytes / mall_rate), hbm))


def _refused(run: _Run) -> Mask:
    """Where the package refuses a tile for want of a cache hint: operands in whole lines, the
    product over five times as long as wide (in whole multiples), its short side at most two tiles.
    """
    tall = run.a_along_k & (run.n <= 2 * run.n_t) & (np.floor(run.m / run.n) > SKINNY_RATIO)
    wide = run.b_along_k & (run.m <= 2 * run.m_t) & (np.floor(run.n / run.m) > SKINNY_RATIO)
    return np.asarray((run.k % run.line == 0) & (run.k_t % run.line == 0) & (tall | wide))


def _sizes(rows: Sequence[Gemm] | Sequence[Tile], what: str) -> list[Array]:
    """m, n and k of each, one array for each letter."""
    for row in rows:
        if min(row[:3]) < 1:
            raise UsageError(
                f"a {what} without elements",
                field="m, n, k",
                value=tuple(row[:3]),
                fix="use sizes of at least 1",
            )
    return [np.array([row[index] for row in rows], dtype=np.float64) for index in range(3)]


def tile_cycles(
    target: Architecture,
    gemms: Sequence[Gemm],
    tiles: Sequence[Tile],
    *,
    dtype: Dtype = Dtype.BF16,
    grid: Grid = Grid.DATA_PARALLEL,
    occupancy: int = 1,
    weights: Weights = PACKAGE,
    refuse_skinny: bool = False,
) -> Array:
    """Predicted cycles of every product (rows) under every tile (columns).

    The epilogue has no part in the equation.

    Args:
        occupancy: programs that fit one compute unit at a time.
        refuse_skinny: infinite where the package refuses a tile that comes without cache hints.

    Raises:
        UsageError: no instruction for ``dtype``; a size below one; a batch.
    """
    if dtype not in target.instructions:
        raise UsageError(
            "no matrix instruction is published for this precision",
            field="dtype",
            value=str(dtype),
            fix=f"use one of {', '.join(target.instructions)}",
        )
    for gemm in gemms:
        if gemm.batch != 1:
            raise UsageError(
                "Origami's equation is here for single products",
                field="batch",
                value=gemm.batch,
                fix="use batch 1, or hwplan's own model",
            )
    m, n, k = (size[:, None] for size in _sizes(gemms, "product"))
    m_t, n_t, k_t = _sizes(tiles, "tile")
    a_along_k = np.array([[gemm.layout is not Layout.TN] for gemm in gemms])
    b_along_k = np.array([[gemm.layout is Layout.NT] for gemm in gemms])

    grid_m, grid_n, steps = np.ceil(m / m_t), np.ceil(n / n_t), np.ceil(k / k_t)
    count = grid_m * grid_n
    launched = programs(count, steps, target.units, grid)
    active, split = np.minimum(launched, target.units), np.ceil(launched / count)
    line = weights.line_bytes / dtype.bytes
    run = _Run(
        m, n, k, m_t, n_t, k_t, grid_m, grid_n, active, split, a_along_k, b_along_k,
        dtype.bytes, line,
    )  # fmt: skip
    compute = _compute_cycles(target, run, dtype)
    memory = _memory_cycles(target, run, weights.hbm_latency_cycles)
    padding = grid_m * m_t * grid_n * n_t * steps * k_t / (m * n * k)
    resident = np.minimum(max(occupancy, 1), np.ceil(count * split / target.units))
    hidden = weights.occupancy**resident

    column_cycles = _lines(run, m_t) / _hbm_bytes_per_cycle(target, run)
    store = hidden * (np.floor(active / split) * n_t * column_cycles + compute * padding)
    partial_sums = (
        count * split * n_t * column_cycles + m_t * n_t * split / SPLIT_ELEMENTS_PER_CYCLE
    )
    store = store + np.where(split > 1, partial_sums + weights.split_cycles, 0.0)
    store = store + weights.ragged_k_cycles * (k % k_t) / k
    prefetch = memory * padding * hidden
    loops = np.maximum(np.ceil(np.ceil(k / split) / k_t) - 1, 1.0)
    step = np.maximum(compute, memory) * padding + weights.step_cycles
    tile = loops * step + weights.prefetch * prefetch + weights.store * store + 1
    cycles = np.ceil(np.maximum(launched, count) / target.units) * tile
    if refuse_skinny:
        cycles = np.where(_refused(run), np.inf, cycles)
    return np.asarray(cycles)
