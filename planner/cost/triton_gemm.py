"""Time of one given Triton tile config: programs in waves, each as slow as its scarcest resource.

The kernel (``trainers.kernels``): one program for each tile of C and split of k; a loop over blocks
of k, loads s - 1 steps ahead; split sums go to a workspace (fp32) that a second kernel adds up.

Notation: C[m, n] = A[m, k] B[k, n]; blocks B_M, B_N, B_K; s stages; programs = ceil(m/B_M)
ceil(n/B_N) split_k; steps = ceil(ceil(k/B_K) / split_k); r programs share a unit (at most
``occupancy``; in the last wave what is left). ``x (+) y`` = (x^4 + y^4)^(1/4): resources overlap,
but not where they meet::

    t       = t_launch + waves (t_fill + sums t_finish) + prologue + (main (+) read) + store
              (+ second kernel)
    main    = steps (full_waves step(occupancy) + step(r of the last wave))
    step(r) = r matrix (+) r shared (+) r load (+) r issue (+) alone (+) sqrt(r) wait

* matrix: 2 B_M B_N B_K over a unit's rate: wgmma, or mma.sync below 64 rows (AMD: MFMA).
* shared: operands written to shared memory, and read by the matrix unit: for each 64 rows these
  and the columns of B (wgmma), or the blocks of each warp.
* load: operands over the L2 bandwidth of one unit; rows of less than 128 bytes use their lines
  badly.
* issue: load instructions. An operand whose contiguous size is no multiple of 16 bytes is copied by
  elements of 4 bytes, or, if these are smaller, goes through registers: not ahead, and what does
  not fit them spills. wgmma takes 4-byte operands along k only: others are transposed in the copy.
* alone: matrix + what a step costs a program that nothing overlaps (barriers, loads in registers).
* wait: load latency, growing with the bytes of a stage and with the share of the operands that the
  L2 does not hold, over the steps that loads are ahead.
* prologue: the first s - 1 blocks arrive with nothing to overlap them.
* read: A once, B again for each group of rows that the L2 does not cover; from HBM what the L2 does
  not hold.
* store: C (or partial sums) over the bandwidth of all units, or of the busiest; each thread stores
  its ``sums`` one after the other.

The loop's machine code, so its constants for shared memory, step and latency, depend on the layout
and on the size of the elements (``TritonProfile.loops``); the others are the device's. All are
fitted by ``benchmarks/fit_triton.py``.

Every term is nondecreasing in m, n and k. Alignment looks only at sizes that do not carry the batch
(nt, nn: n and k; tn: m and n), so the time is nondecreasing in the local batch; of two widths of a
layer, an aligned one may be faster than a smaller unaligned one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.triton_machine import LAYOUT_ROW, Loop, TritonMachine, triton_machine
from planner.kernels.resources import (
    SMALLEST_BLOCK,
    SUM_BYTES,
    WGMMA_ROWS,
    WGMMA_WARPS,
    TileArrays,
    accumulators,
    buffers,
    from_shared,
    occupancy,
    register_demand,
)
from planner.specs.device import DeviceProfile
from planner.specs.kernels import Epilogue, Gemm, Layout
from planner.specs.units import Dtype

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

VECTOR_BYTES = 16
"""Of one lane's widest load."""
COPY_BYTES = 4
"""Smallest asynchronous copy to shared memory."""
COPY_REGISTERS = 1.7
"""Of each element so copied: its address; between 1.4 and 1.9 in what ptxas reports for sm_90."""
LINE_BYTES = 128
CROSS_OPERANDS = 3
"""x_0 and x_l read, C + b written besides C."""
REDUCE_BLOCK = 1024
"""Elements of C that one program of the second kernel adds up."""
SHORT_LINE = 1.5
"""Cost of a byte in rows shorter than a line. This and the next two were fitted once, on H200."""
ISSUE_DELAY = 0.25
"""Share of a step after which its loads are issued: they have that much less time to arrive."""
PROLOGUE_SHARE = 0.7
"""Of the first blocks' load time that the launch of other programs does not hide."""
SPILL_S_PER_BYTE = 4e-12
"""Registers written to memory and read again, each step."""


class Products(NamedTuple):
    """Columns of many products; they broadcast with those of the tiles."""

    m: Array
    n: Array
    k: Array
    layout: NDArray[np.intp]
    """0 nt, 1 nn, 2 tn."""
    output_bytes: Array
    """Of one element of C: a weight gradient is summed into fp32 weights."""
    epilogue_bytes: Array
    """Read and written for each element of C besides it."""

    @classmethod
    def of(cls, gemms: Sequence[Gemm], element_bytes: int) -> Products:
        """``gemms`` as columns of shape (products, 1)."""
        sizes = np.array([gemm[:3] for gemm in gemms], dtype=np.float64).reshape(-1, 3)
        layout = np.array([[LAYOUT_ROW[gemm.layout]] for gemm in gemms], dtype=np.intp)
        cross = np.array([[gemm.epilogue is Epilogue.CROSS] for gemm in gemms], dtype=bool)
        output_bytes = np.where(layout == LAYOUT_ROW[Layout.TN], 4.0, max(element_bytes, 2))
        return cls(
            m=sizes[:, :1],
            n=sizes[:, 1:2],
            k=sizes[:, 2:],
            layout=layout,
            output_bytes=output_bytes,
            epilogue_bytes=np.where(cross, CROSS_OPERANDS * output_bytes, 0.0),
        )


def _overlapped(*terms_s: Array) -> Array:
    """Time of resources that overlap: the fourth root of the sum of fourth powers."""
    total = np.square(np.square(terms_s[0]))
    for term_s in terms_s[1:]:
        total = total + np.square(np.square(term_s))
    return np.sqrt(np.sqrt(total))


class _Operand(NamedTuple):
    """How one block of A or B reaches the matrix unit."""

    in_registers: Mask
    """Loaded by elements into registers, and from there to shared memory."""
    elements: Array
    scalar_registers: Array
    """Registers of the unit's threads that hold it, or its addresses."""
    issue_s: Array


def _operand(
    machine: TritonMachine, shared: Mask, elements: Array, contiguous: Array, along_k: Mask
) -> _Operand:
    """``contiguous``: its size in elements; ``along_k``: whether that is k."""
    element_bytes = machine.element_bytes
    odd = contiguous * element_bytes % VECTOR_BYTES != 0
    in_registers = odd & (element_bytes < COPY_BYTES)
    transposed = shared & ~along_k & (element_bytes == COPY_BYTES)
    loads = elements / machine.arch.lanes
    by_element_s = np.where(
        transposed, machine.transpose_s, machine.scalar_s if element_bytes < 4 else machine.copy_s
    )
    vectors_s = loads * (element_bytes / VECTOR_BYTES) * machine.issue_s
    return _Operand(
        in_registers=in_registers,
        elements=elements,
        # Neighbours along k share an address; along the other side each has its own. What is
        # copied has an address only.
        scalar_registers=elements
        * np.where(
            in_registers,
            np.where(along_k, 3.0, 5.0),
            np.where(odd | transposed, COPY_REGISTERS, 0.0),
        ),
        issue_s=np.where(odd | transposed, loads * by_element_s, vectors_s),
    )


class LoopWork(NamedTuple):
    """One block of k of one program: seconds of each resource. Independent of the split."""

    resident: Array
    """Programs that a unit holds."""

    divided: Array
    """What resident programs take in turn, overlapped."""
    alone: Array
    wait: Array
    first: Array
    """Loading it with nothing to overlap."""

    def seconds(self, resident: Array) -> Array:
        """Of one block of k with ``resident`` programs on the unit; 0 for none."""
        busy = _overlapped(resident * self.divided, self.alone, np.sqrt(resident) * self.wait)
        return np.where(resident > 0, busy, 0.0)


def loop_work(machine: TritonMachine, products: Products, tiles: TileArrays) -> LoopWork:
    """Work of the products' loops under the tiles; columns of both broadcast."""
    m_b, n_b, k_b = tiles.block_m, tiles.block_n, tiles.block_k
    loop = Loop(*np.moveaxis(machine.loops[products.layout], -1, 0))
    a_along_k, b_along_k = products.layout < 2, products.layout == 0
    shared = from_shared(machine.arch, tiles)
    a = _operand(machine, shared, m_b * k_b, np.where(a_along_k, products.k, products.m), a_along_k)
    b = _operand(machine, shared, n_b * k_b, np.where(b_along_k, products.k, products.n), b_along_k)
    ahead = buffers(machine.arch, tiles)
    operand_bytes = machine.element_bytes * (
        a.elements * np.where(a.in_registers, 1.0, ahead)
        + b.elements * np.where(b.in_registers, 1.0, ahead)
    )
    scratch_bytes = m_b * n_b * SUM_BYTES * machine.arch.stores_through_shared
    held_bytes = np.maximum(operand_bytes, scratch_bytes)
    demand = register_demand(machine.arch, tiles, a.scalar_registers + b.scalar_registers)
    resident = occupancy(machine.arch, machine.lds_bytes, held_bytes, demand, tiles.num_warps)
    threads = tiles.num_warps * machine.arch.lanes
    spilled_bytes = 8 * threads * np.maximum(demand - machine.arch.registers_per_thread, 0)

    matrix_s = (
        2 * m_b * n_b * k_b / np.where(shared, machine.flops_per_s, machine.register_flops_per_s)
    )
    line_bytes = k_b * machine.element_bytes
    wide = machine.element_bytes == COPY_BYTES
    read_lines = np.where(
        shared, _group_lines(tiles), _warp_lines(tiles, wide & ~a_along_k, wide & ~b_along_k)
    )
    shared_s = (read_lines + m_b + n_b) * line_bytes / loop.shared_bytes_per_s
    a_bytes = np.minimum(m_b, products.m) * line_bytes
    b_bytes = np.minimum(n_b, products.n) * line_bytes
    short_a, short_b = _short_lines(machine, products, tiles)
    load_s = (a_bytes * short_a + b_bytes * short_b) / machine.unit_l2_bytes_per_s
    spill_s = spilled_bytes * SPILL_S_PER_BYTE
    issue_s = a.issue_s + b.issue_s + spill_s
    serial_s = np.where(a.in_registers, a.issue_s, 0.0) + np.where(b.in_registers, b.issue_s, 0.0)
    in_registers = a.in_registers | b.in_registers
    serial_s = np.where(in_registers, machine.register_load_s + serial_s + spill_s, 0.0)
    latency_s = loop.latency_s + machine.hbm_latency_s * _cold(machine, products)
    steps_ahead = np.maximum(ahead - 1, 1)
    arrival = steps_ahead - np.where(steps_ahead > 1, ISSUE_DELAY, 0.0)
    return LoopWork(
        resident=resident,
        divided=_overlapped(matrix_s, shared_s, load_s, issue_s),
        alone=matrix_s + loop.step_s + serial_s,
        wait=(latency_s + (a_bytes + b_bytes) * loop.latency_s_per_byte) / arrival,
        first=PROLOGUE_SHARE * np.maximum(issue_s, load_s),
    )


def _short_lines(
    machine: TritonMachine, products: Products, tiles: TileArrays
) -> tuple[Array, Array]:
    """Cost of a byte of A and of B: rows of a block along k that are shorter than a line of the
    cache, and no whole rows of the matrix, read it in parts."""
    in_parts = (tiles.block_k * machine.element_bytes < LINE_BYTES) & (products.k > tiles.block_k)
    return (
        np.where(in_parts & (products.layout < 2), SHORT_LINE, 1.0),
        np.where(in_parts & (products.layout == 0), SHORT_LINE, 1.0),
    )


def _cold(machine: TritonMachine, products: Products) -> Array:
    """Share of a product's matrices that the cache does not hold."""
    m, n, k = products.m, products.n, products.k
    all_bytes = (m + n) * k * machine.element_bytes + m * n * products.output_bytes
    return np.minimum(all_bytes / machine.cache_bytes, 1.0)


def _group_lines(tiles: TileArrays) -> Array:
    """Lines of k that warp groups read: 64 rows of A with the columns of B of their group."""
    slabs = np.maximum(tiles.block_m / WGMMA_ROWS, 1)
    groups_along_n = np.maximum(tiles.num_warps / WGMMA_WARPS / slabs, 1)
    return np.asarray(slabs * (groups_along_n * WGMMA_ROWS + tiles.block_n))


def _warp_lines(tiles: TileArrays, a_by_words: Mask, b_by_words: Mask) -> Array:
    """Lines of k that warps read, laid out over the tile as near to square as it allows; twice
    those of 4-byte operands across k, which come word by word."""
    warps = tiles.num_warps
    square = np.sqrt(warps * tiles.block_m / tiles.block_n)
    along_m = np.clip(np.minimum(square, tiles.block_m / SMALLEST_BLOCK), 1, warps)
    a_lines = warps / along_m * tiles.block_m * np.where(a_by_words, 2, 1)
    return np.asarray(a_lines + along_m * tiles.block_n * np.where(b_by_words, 2, 1))


def kernel_seconds(
    machine: TritonMachine, products: Products, tiles: TileArrays, work: LoopWork
) -> Array:
    """Seconds of the products under the tiles, whose loops take ``work``; columns broadcast."""
    m, n, k, split = products.m, products.n, products.k, tiles.split_k
    grid_m, grid_n = np.ceil(m / tiles.block_m), np.ceil(n / tiles.block_n)
    programs = grid_m * grid_n * split
    steps = np.ceil(np.ceil(k / tiles.block_k) / split)
    resident = work.resident
    slots = machine.units * resident
    full_waves = np.floor(programs / slots)
    last_resident = np.ceil((programs - full_waves * slots) / machine.units)

    main_s = steps * (full_waves * work.seconds(resident) + work.seconds(last_resident))
    read_s = _read_s(machine, products, tiles, grid_m, grid_n, slots)
    waves = full_waves + (last_resident > 0)
    # Programs that the busiest unit runs, one after the other.
    in_turn = full_waves * resident + last_resident
    blocks_ahead = np.minimum(steps, np.maximum(buffers(machine.arch, tiles) - 1, 1))
    prologue_s = in_turn * blocks_ahead * work.first

    program_elements = np.minimum(tiles.block_m, m) * np.minimum(tiles.block_n, n)
    finish_bytes = products.output_bytes + products.epilogue_bytes
    stored_bytes = np.where(split > 1, SUM_BYTES, finish_bytes)
    store_s = stored_bytes * np.maximum(
        m * n * split / machine.store_bytes_per_s,
        in_turn * program_elements / machine.unit_store_bytes_per_s,
    )
    reduce_turns = np.ceil(np.ceil(m * n / REDUCE_BLOCK) / machine.units)
    reduce_s = machine.reduce_s + np.maximum(
        m * n * (SUM_BYTES * split + finish_bytes) / machine.store_bytes_per_s,
        reduce_turns * REDUCE_BLOCK * SUM_BYTES * split / machine.unit_reduce_bytes_per_s,
    )
    return np.asarray(
        machine.launch_s
        + waves * (machine.fill_s + machine.finish_s * accumulators(machine.arch, tiles))
        + prologue_s
        + _overlapped(main_s, read_s)
        + store_s
        + np.where(split > 1, reduce_s, 0.0)
    )


def _read_s(
    machine: TritonMachine,
    products: Products,
    tiles: TileArrays,
    grid_m: Array,
    grid_n: Array,
    slots: Array,
) -> Array:
    """Seconds to read the operands: from the cache what it still holds from their last use."""
    short_a, short_b = _short_lines(machine, products, tiles)
    a_bytes = products.m * products.k * machine.element_bytes
    b_bytes = products.n * products.k * machine.element_bytes
    patch_m = np.minimum(grid_m, np.maximum(tiles.group_m, slots / grid_n))
    reread = (np.ceil(grid_m / patch_m) - 1) * np.minimum(b_bytes / machine.cache_bytes, 1)
    read_bytes = a_bytes * short_a + b_bytes * short_b * (1 + reread)
    all_bytes = a_bytes + b_bytes * (1 + reread) + products.m * products.n * products.output_bytes
    cold = np.minimum(all_bytes / machine.cache_bytes, 1)
    return np.asarray(
        read_bytes * (cold / machine.hbm_bytes_per_s + (1 - cold) / machine.l2_bytes_per_s)
    )


def seconds(machine: TritonMachine, products: Products, tiles: TileArrays) -> Array:
    """Seconds of the products under the tiles; columns of both broadcast."""
    return kernel_seconds(machine, products, tiles, loop_work(machine, products, tiles))


def tile_seconds(
    device: DeviceProfile, dtype: Dtype, gemms: Sequence[Gemm], tiles: TileArrays
) -> Array:
    """Seconds of each product (rows) under each tile (columns); ``batch`` must be 1.

    Raises:
        UsageError: no Triton kernels on the device, or it cannot multiply in ``dtype``.
    """
    return seconds(triton_machine(device, dtype), Products.of(gemms, dtype.bytes), tiles)
