"""Linear layers whose products run with the kernels that the plan names.

Forward y = x W^T + b with its activation (or DCN's tail) as epilogue; backward the weight gradient
dW = dz^T x, summed into fp32, and the input gradient dx = dz W. Each of the three is looked up on
its own: a product that the plan gives to the vendor's library, or does not hold (another batch than
the planned one), runs as ``nn.Linear`` runs it. Where a kernel must not run (it spills, or the
store lacks it), the plan's next candidate does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from triton.runtime.errors import OutOfResources

from planner.specs.kernels import Epilogue, Gemm, Layout, PlannedGemm
from planner.specs.units import Dtype
from trainers.kernels.build import Compiled, KernelKey
from trainers.kernels.launch import TORCH_DTYPE, Product, compile_here


class KernelTable:
    """The kernels of one pool's plan, for one precision and one GPU architecture."""

    def __init__(
        self,
        kernels: Iterable[PlannedGemm],
        dtype: Dtype,
        arch: str,
        find: Callable[[KernelKey], Compiled | None] = compile_here,
    ) -> None:
        """Finds every kernel now, so that none is compiled or loaded while training goes on.

        Args:
            find: binaries of a key; None: this kernel must not run, the next candidate takes its
                place.
        """
        self.dtype = dtype
        self.compute_dtype = TORCH_DTYPE[dtype]
        self._products = {
            item.gemm: _first_usable(item, arch, find) for item in kernels if item.dtype is dtype
        }

    @property
    def own(self) -> int:
        """Products that run outside the vendor's library."""
        return sum(product is not None for product in self._products.values())

    def product(self, gemm: Gemm) -> Product | None:
        """Ready to launch; None: the vendor's library."""
        return self._products.get(gemm)


def _first_usable(
    item: PlannedGemm, arch: str, find: Callable[[KernelKey], Compiled | None]
) -> Product | None:
    for candidate in item.candidates:
        if candidate.tile is None:
            return None
        key = KernelKey.of(arch, item.dtype, item.gemm, candidate.tile)
        binaries = find(key)
        if binaries is None:
            continue
        try:
            return Product(key, item.m, item.n, item.k, binaries)
        except OutOfResources:  # of this very GPU: more shared memory or threads than it has
            continue
    return None


class PlannedLinear(nn.Module):
    """``nn.Linear`` (its parameters are shared) followed by the activation of ``epilogue``."""

    def __init__(self, linear: nn.Linear, epilogue: Epilogue, table: KernelTable) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.epilogue = epilogue
        self.table = table

    def forward(
        self,
        x: torch.Tensor,
        x0: torch.Tensor | None = None,
        xl: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[rows, inputs] to [rows, outputs].

        Args:
            x0, xl: [rows, outputs], with ``cross``: x0 * (x W^T + b) + xl.
        """
        x, x0, xl = (
            None if tensor is None else tensor.to(self.table.compute_dtype).contiguous()
            for tensor in (x, x0, xl)
        )
        y: torch.Tensor = _LinearFunction.apply(
            x, self.weight, self.bias, x0, xl, self.epilogue, self.table
        )
        return y


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        x0: torch.Tensor | None,
        xl: torch.Tensor | None,
        epilogue: Epilogue,
        table: KernelTable,
    ) -> torch.Tensor:
        w = weight.to(table.compute_dtype)
        shape = Gemm(len(x), len(w), x.shape[1], layout=Layout.NT, epilogue=epilogue)
        kernel = table.product(shape)
        if kernel is not None:
            y, u = kernel(x, w, bias=bias, x0=x0, xl=xl)
        else:
            b = None if bias is None else bias.to(table.compute_dtype)
            y, u = _vendor_forward(nn.functional.linear(x, w, b), x0, xl, epilogue)
        ctx.epilogue, ctx.table, ctx.has_bias = epilogue, table, bias is not None
        activated = epilogue in (Epilogue.BIAS_RELU, Epilogue.BIAS_SIGMOID)
        ctx.save_for_backward(x, w, y if activated else u, x0)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, w, saved, x0 = ctx.saved_tensors
        table: KernelTable = ctx.table
        gradient = gradient.to(table.compute_dtype).contiguous()
        dz, d_x0, d_xl = _through_epilogue(ctx.epilogue, gradient, saved, x0)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            kernel = table.product(Gemm(len(dz), w.shape[1], len(w), layout=Layout.NN))
            dx = dz @ w if kernel is None else kernel(dz, w)[0]
        if ctx.needs_input_grad[1]:
            kernel = table.product(Gemm(len(w), x.shape[1], len(x), layout=Layout.TN))
            dw = (dz.t() @ x).float() if kernel is None else kernel(dz, x)[0]
        if ctx.has_bias and ctx.needs_input_grad[2]:
            db = dz.sum(0, dtype=torch.float32)
        return dx, dw, db, d_x0, d_xl, None, None


def _vendor_forward(
    z: torch.Tensor, x0: torch.Tensor | None, xl: torch.Tensor | None, epilogue: Epilogue
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The epilogue as operators of its own: (y, what ``cross`` keeps)."""
    if epilogue is Epilogue.BIAS_RELU:
        return torch.relu(z), None
    if epilogue is Epilogue.BIAS_SIGMOID:
        return torch.sigmoid(z), None
    if epilogue is Epilogue.CROSS:
        assert x0 is not None and xl is not None
        return torch.addcmul(xl, x0, z), z
    return z, None


def _through_epilogue(
    epilogue: Epilogue, gradient: torch.Tensor, saved: torch.Tensor | None, x0: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of z = x W^T + b, of x0 and of xl."""
    if epilogue is Epilogue.BIAS_RELU:
        return torch.ops.aten.threshold_backward(gradient, saved, 0), None, None
    if epilogue is Epilogue.BIAS_SIGMOID:
        return torch.ops.aten.sigmoid_backward(gradient, saved), None, None
    if epilogue is Epilogue.CROSS:
        assert saved is not None and x0 is not None
        return gradient * x0, gradient * saved, gradient
    return gradient, None, None
