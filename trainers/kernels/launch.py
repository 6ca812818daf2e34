"""Run one planned product on this rank's GPU (or in Triton's interpreter)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton

from planner.specs.errors import RunError
from planner.specs.kernels import Epilogue, Gemm, Layout
from planner.specs.units import Dtype
from trainers.kernels.build import (
    REDUCE_BLOCK,
    KernelKey,
    compiled,
    main_constants,
    reduce_constants,
)
from trainers.kernels.gemm import gemm, gemm_reduce

TORCH_DTYPE = {
    Dtype.FP32: torch.float32,
    Dtype.TF32: torch.float32,
    Dtype.BF16: torch.bfloat16,
    Dtype.FP16: torch.float16,
    Dtype.FP8: torch.float8_e4m3fn,
}
INTERPRETED = not isinstance(gemm, triton.JITFunction)
"""Whether Triton was imported with its interpreter on: kernels run on the CPU, for tests."""


@cache
def device_arch(index: int) -> str:
    """Compiler target of a GPU of this machine: sm_90, gfx950, …"""
    if INTERPRETED:
        return "sm_90"
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def product_shape(layout: Layout, a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int]:
    """(m, n, k) of operands as stored.

    Raises:
        RunError: they do not fit each other.
    """
    k, m = a.shape if layout is Layout.TN else reversed(a.shape)
    n, other_k = b.shape if layout is Layout.NT else reversed(b.shape)
    if k != other_k:
        raise RunError(
            f"operands {tuple(a.shape)} and {tuple(b.shape)} do not fit each other",
            field="layout",
            value=layout.value,
            fix="the inner sizes must be equal",
        )
    return m, n, k


def multiply(
    key: KernelKey,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    x0: torch.Tensor | None = None,
    xl: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """C = epilogue(A B) by the kernel of ``key``.

    Args:
        a, b: dense, as ``key.layout`` stores them, in ``key.dtype``.
        bias: fp32 [n], for every epilogue but ``none``.
        x0, xl: [m, n] in ``key.output``, for ``cross``.

    Returns:
        C [m, n] in ``key.output``, and for ``cross`` C + bias before the tail, else None.
    """
    m, n, k = product_shape(key.layout, a, b)
    c = torch.empty(m, n, dtype=TORCH_DTYPE[key.output], device=a.device)
    u = torch.empty_like(c) if key.epilogue is Epilogue.CROSS else None
    # Pointers that the epilogue does not read may point anywhere.
    extras = [c if extra is None else extra for extra in (bias, x0, xl, u)]
    tile = key.tile
    grid = (triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n), tile.split_k, 1)
    if tile.split_k == 1:
        _launch(key, False, grid, a, b, c, *extras, m, n, k)
        return c, u
    partial = torch.empty(tile.split_k, m, n, dtype=torch.float32, device=a.device)
    _launch(key, False, grid, a, b, partial, *extras, m, n, k)
    blocks = (triton.cdiv(m * n, REDUCE_BLOCK), 1, 1)
    _launch(key, True, blocks, partial, c, *extras, m * n, n)
    return c, u


def _launch(key: KernelKey, reduction: bool, grid: tuple[int, int, int], *arguments: Any) -> None:
    constants = reduce_constants(key) if reduction else main_constants(key)
    if INTERPRETED:
        kernel = gemm_reduce if reduction else gemm
        kernel[grid](*arguments, **constants)
        return
    binaries = compiled(key)
    binary = binaries.reduction if reduction else binaries.main
    binary[grid](*arguments, *constants.values())


def problem_of(layout: Layout, a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue) -> Gemm:
    """The product as the plan names it."""
    m, n, k = product_shape(layout, a, b)
    return Gemm(m, n, k, 1, layout, epilogue)
