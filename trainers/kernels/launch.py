"""Run one planned product on this rank's GPU (or in Triton's interpreter)."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import triton

from planner.specs.errors import RunError
from planner.specs.kernels import Epilogue, Layout
from planner.specs.units import Dtype
from trainers.kernels.build import (
    REDUCE_BLOCK,
    Compiled,
    KernelKey,
    compiled,
    main_constants,
    reduce_constants,
)
from trainers.kernels.gemm import gemm, gemm_reduce
from trainers.kernels.usage import usage_of

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


class Product:
    """C[m, n] = epilogue(A B) of fixed sizes, ready to launch: grids and binaries are found once,
    for a step launches it again and again."""

    def __init__(self, key: KernelKey, m: int, n: int, k: int, binaries: Compiled) -> None:
        tile = key.tile
        tiles = triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n)
        self.key = key
        self._sizes = m, n, k
        self._output = TORCH_DTYPE[key.output]
        self._main = _launcher(key, False, (tiles, tile.split_k, 1), binaries)
        blocks = (triton.cdiv(m * n, REDUCE_BLOCK), 1, 1)
        self._reduce = _launcher(key, True, blocks, binaries) if tile.split_k > 1 else None

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        x0: torch.Tensor | None = None,
        xl: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch.

        Args:
            a, b: dense, as ``key.layout`` stores them, in ``key.dtype``.
            bias: fp32 [n], for every epilogue but ``none``.
            x0, xl: [m, n] in ``key.output``, for ``cross``.

        Returns:
            C in ``key.output``, and for ``cross`` C + bias before the tail, else None.
        """
        m, n, k = self._sizes
        c = torch.empty(m, n, dtype=self._output, device=a.device)
        u = torch.empty_like(c) if self.key.epilogue is Epilogue.CROSS else None
        # Pointers that the epilogue does not read may point anywhere.
        extras = [c if extra is None else extra for extra in (bias, x0, xl, u)]
        if self._reduce is None:
            self._main(a, b, c, *extras, m, n, k)
            return c, u
        splits = self.key.tile.split_k
        partial = torch.empty(splits, m, n, dtype=torch.float32, device=a.device)
        self._main(a, b, partial, *extras, m, n, k)
        self._reduce(partial, c, *extras, m * n, n)
        return c, u


def _launcher(
    key: KernelKey, reduction: bool, grid: tuple[int, int, int], binaries: Compiled
) -> Any:
    """A callable over the kernel's run-time arguments."""
    constants = reduce_constants(key) if reduction else main_constants(key)
    if INTERPRETED:
        kernel = gemm_reduce if reduction else gemm
        return lambda *arguments: kernel[grid](*arguments, **constants)
    launch = (binaries.reduction if reduction else binaries.main)[grid]
    return lambda *arguments: launch(*arguments, *constants.values())


def compile_here(key: KernelKey) -> Compiled | None:
    """Binaries compiled on this machine; None if the compiler fails or spills registers."""
    if INTERPRETED:
        return Compiled(None, None)
    try:
        binaries = compiled(key)
    except (triton.CompilationError, RuntimeError):  # a pass or the assembler: RuntimeError
        return None
    return None if usage_of(binaries.main).spilled else binaries


@lru_cache(maxsize=65536)
def _product(key: KernelKey, m: int, n: int, k: int) -> Product:
    return Product(key, m, n, k, Compiled(None, None) if INTERPRETED else compiled(key))


def multiply(
    key: KernelKey, a: torch.Tensor, b: torch.Tensor, **extras: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``Product`` of the operands' sizes, compiled here, launched on them.

    Raises:
        RunError: the operands do not fit each other.
    """
    return _product(key, *product_shape(key.layout, a, b))(a, b, **extras)
