"""The GEMM family: C[m, n] = A[m, k] B[k, n] in three layouts, split over k, with an epilogue.

One program computes one tile of C over one of the grid's ranges of k. Alone, it applies the
epilogue and stores C. Where k is split (``PARTIAL``), it stores its sums (fp32) to ``c[split]``,
and ``gemm_reduce`` adds them in order (the result does not depend on timing) and applies the
epilogue.

All matrices are dense: A is stored by rows as [m, k] (``A_BY_ROWS``) or [k, m], B as [k, n]
(``B_BY_ROWS``) or [n, k], C as [m, n]. Sizes need not be multiples of a block: loads and stores are
masked, and lanes beyond a matrix count as zero.

Epilogues (``EPILOGUE``, on fp32 sums): 0 none; 1 bias; 2 bias, ReLU; 3 bias, sigmoid; 4 DCN's
tail x0 * (C + bias) + xl, which also stores C + bias to ``u`` for the backward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _finish(
    acc, c, bias, x0, xl, u, offset, column, mask, EPILOGUE: tl.constexpr
):  # fmt: skip
    """Epilogue and store of fp32 sums at ``offset`` (elements of C); ``column`` as wide as it."""
    if EPILOGUE > 0:
        acc += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    if EPILOGUE == 2:
        acc = tl.maximum(acc, 0.0)
    if EPILOGUE == 3:
        acc = tl.sigmoid(acc)
    if EPILOGUE == 4:
        tl.store(u + offset, acc.to(u.dtype.element_ty), mask=mask)
        first = tl.load(x0 + offset, mask=mask, other=0.0).to(tl.float32)
        last = tl.load(xl + offset, mask=mask, other=0.0).to(tl.float32)
        acc = first * acc + last
    tl.store(c + offset, acc.to(c.dtype.element_ty), mask=mask)


@triton.jit
def gemm(
    a, b, c, bias, x0, xl, u, m, n, k,
    A_BY_ROWS: tl.constexpr, B_BY_ROWS: tl.constexpr, PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTIAL: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of C, splits of k)."""
    grid_m, grid_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0)
    # GROUP_M rows of tiles run column by column: their rows of A stay in the L2.
    group = tile // (GROUP_M * grid_n)
    rows_in_group = tl.minimum(grid_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + tile % (GROUP_M * grid_n) % rows_in_group
    tile_n = tile % (GROUP_M * grid_n) // rows_in_group

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    steps_in_all = tl.cdiv(k, BLOCK_K)
    steps = tl.cdiv(steps_in_all, tl.num_programs(1))
    first_step = tl.program_id(1) * steps
    steps = tl.minimum(steps, steps_in_all - first_step)
    first_k = first_step * BLOCK_K

    # Offsets inside a tile fit 32 bits; a matrix may not.
    if A_BY_ROWS:
        a += tile_m.to(tl.int64) * BLOCK_M * k + first_k
        a_tile = a + tl.arange(0, BLOCK_M)[:, None] * k + depth[None, :]
        a_step = BLOCK_K
    else:
        a += first_k.to(tl.int64) * m
        a_tile = a + row[:, None] + depth[None, :] * m
        a_step = BLOCK_K * m
    if B_BY_ROWS:
        b += first_k.to(tl.int64) * n
        b_tile = b + depth[:, None] * n + column[None, :]
        b_step = BLOCK_K * n
    else:
        b += tile_n.to(tl.int64) * BLOCK_N * k + first_k
        b_tile = b + depth[:, None] + tl.arange(0, BLOCK_N)[None, :] * k
        b_step = BLOCK_K

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, steps):
        left = k - first_k - step * BLOCK_K
        a_block = tl.load(a_tile, mask=(row < m)[:, None] & (depth < left)[None, :], other=0.0)
        b_block = tl.load(b_tile, mask=(depth < left)[:, None] & (column < n)[None, :], other=0.0)
        acc = tl.dot(a_block, b_block, acc, input_precision=PRECISION)
        a_tile += a_step
        b_tile += b_step

    mask = (row < m)[:, None] & (column < n)[None, :]
    start = tile_m.to(tl.int64) * BLOCK_M * n
    offset = start + tl.arange(0, BLOCK_M)[:, None] * n + column[None, :]
    if PARTIAL:
        tl.store(c + tl.program_id(1).to(tl.int64) * m * n + offset, acc, mask=mask)
    else:
        _finish(acc, c, bias, x0, xl, u, offset, column[None, :], mask, EPILOGUE)


@triton.jit
def gemm_reduce(
    partial, c, bias, x0, xl, u, elements, n,
    EPILOGUE: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """C = epilogue(sum over splits of ``partial`` [SPLIT_K, elements]); grid: blocks of C."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < elements
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLIT_K):
        acc += tl.load(partial + split * elements.to(tl.int64) + offset, mask=mask, other=0.0)
    _finish(acc, c, bias, x0, xl, u, offset, offset % n, mask, EPILOGUE)
