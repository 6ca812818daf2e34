"""Kernels in Triton's interpreter: a process of its own, for it must be on before any import.

Prints one JSON object: case to largest error, relative to the largest value of the exact result.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import torch
from torch import nn

from planner.specs.kernels import (
    Backend,
    Epilogue,
    Gemm,
    Layout,
    PlannedGemm,
    RankedKernel,
    TileConfig,
)
from planner.specs.units import Dtype
from tests.trainers.epilogues import finish
from trainers.kernels.build import KernelKey
from trainers.kernels.launch import INTERPRETED, TORCH_DTYPE, multiply
from trainers.kernels.linear import KernelTable
from trainers.kernels.swap import use_kernels
from trainers.models.networks import CrossTail, Mlp

SIZES = [(37, 13, 70), (64, 1, 48), (1, 33, 200), (50, 70, 1), (130, 64, 96)]
ROWS = 40


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-12))


def products() -> Iterator[tuple[str, float]]:
    sizes = itertools.product(Layout, SIZES, (1, 3), [Epilogue.BIAS_RELU], [Dtype.FP32])
    rest = itertools.product([Layout.NT], SIZES[:1], (1, 3), Epilogue, (Dtype.FP32, Dtype.FP16))
    for layout, (m, n, k), split, epilogue, dtype in dict.fromkeys((*sizes, *rest)):
        tile = TileConfig(
            block_m=32, block_n=16, block_k=32, num_warps=4, num_stages=2, split_k=split, group_m=2
        )
        a = torch.randn((k, m) if layout is Layout.TN else (m, k)).to(TORCH_DTYPE[dtype])
        b = torch.randn((n, k) if layout is Layout.NT else (k, n)).to(TORCH_DTYPE[dtype])
        bias, x0, xl = torch.randn(n), torch.randn(m, n), torch.randn(m, n)
        key = KernelKey.of(
            "sm_90", dtype, Gemm(m, n, k, 1, layout, epilogue), tile, output=Dtype.FP32
        )
        c, u = multiply(key, a, b, bias=bias, x0=x0, xl=xl)
        left = (a.t() if layout is Layout.TN else a).double()
        right = (b.t() if layout is Layout.NT else b).double()
        name = f"{layout} {m}x{n}x{k} split {split} {epilogue} {dtype}"
        yield name, relative_error(c, finish(left @ right, epilogue, bias, x0, xl))
        if u is not None:
            yield f"{name}: u", relative_error(u, left @ right + bias)


def planned(m: int, n: int, k: int, layout: Layout, epilogue: Epilogue) -> PlannedGemm:
    tile = TileConfig(
        block_m=16, block_n=16, block_k=16, num_warps=4, num_stages=2, split_k=1 + (k > 30)
    )
    kernel = RankedKernel(backend=Backend.TRITON, tile=tile, predicted_us=1.0)
    return PlannedGemm(
        layout=layout, m=m, n=n, k=k, epilogue=epilogue, dtype=Dtype.FP32, count=1,
        candidates=(kernel,),
    )  # fmt: skip


def layer(outputs: int, inputs: int, epilogue: Epilogue) -> list[PlannedGemm]:
    return [
        planned(ROWS, outputs, inputs, Layout.NT, epilogue),
        planned(ROWS, inputs, outputs, Layout.NN, Epilogue.NONE),
        planned(outputs, inputs, ROWS, Layout.TN, Epilogue.NONE),
    ]


class Crossed(nn.Module):
    """An MLP, a cross layer, and an MLP to one logit."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = Mlp(13, (33, 20), activate_last=True)
        self.down, self.up = nn.Linear(20, 7, bias=False), CrossTail(7, 20)
        self.top = Mlp(20, (18, 1), activate_last=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bottom(x)
        y: torch.Tensor = self.top(self.up(self.down(x), x, x))
        return y


def networks() -> Iterator[tuple[str, float]]:
    """Outputs and every gradient of a network, plain in float64 and with planned kernels."""
    relu, bias, none = Epilogue.BIAS_RELU, Epilogue.BIAS, Epilogue.NONE
    kernels = [
        *layer(33, 13, relu), *layer(20, 33, relu), *layer(7, 20, none),
        *layer(20, 7, Epilogue.CROSS), *layer(18, 20, relu), *layer(1, 18, bias),
    ]  # fmt: skip
    for name, part, rows in (
        ("all planned", kernels, ROWS),
        ("half left to the vendor", kernels[::2], ROWS),
        ("another batch than planned", kernels, ROWS - 3),
    ):
        network = Crossed()
        exact = Crossed().double()
        exact.load_state_dict(network.state_dict())
        table = KernelTable(part, Dtype.FP32, "sm_90")
        use_kernels(network, table)
        x = torch.randn(rows, 13)
        x_planned, x_exact = x.clone().requires_grad_(), x.double().requires_grad_()
        found, wanted = network(x_planned), exact(x_exact)
        gradient = torch.randn(rows, 1)
        found.backward(gradient)
        wanted.backward(gradient.double())
        yield f"{name}: y", relative_error(found, wanted)
        yield f"{name}: dx", relative_error(x_planned.grad, x_exact.grad)
        pairs = zip(network.named_parameters(), exact.named_parameters(), strict=True)
        for (parameter, mine), (same, other) in pairs:
            assert parameter == same
            yield f"{name}: {parameter}", relative_error(mine.grad, other.grad)
        launches = [rows == ROWS and table.product(item.gemm) is not None for item in kernels]
        yield f"{name}: kernels used", float(sum(launches))


def main() -> None:
    assert INTERPRETED
    torch.manual_seed(0)
    print(json.dumps({**dict(products()), **dict(networks())}))


if __name__ == "__main__":
    main()
