"""Microseconds of kernels on the GPU at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from planner.specs.kernels import Gemm, Layout, TileConfig
from planner.specs.units import Dtype
from trainers.kernels.build import KernelKey, compiled
from trainers.kernels.cache import compile_to_cache
from trainers.kernels.launch import TORCH_DTYPE, Product, device_arch

GRAPH_US = 400.0
"""Launches of about so long go into one graph, at most ``MOST_LAUNCHES``."""
MOST_LAUNCHES = 20
MEASURED_US = 5000.0
"""Replays go on for so long, at least ``FEWEST_REPLAYS``: after a pause the clock needs some
milliseconds to rise."""
FEWEST_REPLAYS = 3
VENDOR_MEASURED_US = 20_000.0
"""It comes first, after a pause, and everything is compared with it."""


def least_us(launch: Callable[[], object], measured_us: float = MEASURED_US) -> float:
    """One launch: the least of several replays of a CUDA graph of several launches."""
    launch()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launch()
    end.record()
    torch.cuda.synchronize()
    once_us = max(start.elapsed_time(end) * 1e3, 2.0)
    launches = max(1, min(MOST_LAUNCHES, int(GRAPH_US / once_us)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            launch()
    best, spent_us, replays = math.inf, 0.0, 0
    while replays < FEWEST_REPLAYS or spent_us < measured_us:
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        graph_us = start.elapsed_time(end) * 1e3
        best, spent_us, replays = min(best, graph_us / launches), spent_us + graph_us, replays + 1
    return best


def operands(dtype: Dtype, gemm: Gemm) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B as the layout stores them, on the GPU."""
    kind = TORCH_DTYPE[dtype]
    a_shape = (gemm.k, gemm.m) if gemm.layout is Layout.TN else (gemm.m, gemm.k)
    b_shape = (gemm.n, gemm.k) if gemm.layout is Layout.NT else (gemm.k, gemm.n)
    a, b = (torch.randn(shape, device="cuda").to(kind) for shape in (a_shape, b_shape))
    return a, b


def vendor(
    dtype: Dtype, gemm: Gemm, a: torch.Tensor, b: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """torch.matmul on the operands as stored."""
    torch.backends.cuda.matmul.allow_tf32 = dtype is Dtype.TF32
    left = a.t() if gemm.layout is Layout.TN else a
    right = b.t() if gemm.layout is Layout.NT else b
    return partial(torch.matmul, left, right)


class Gpu:
    """Times kernels of one product at a time."""

    def __init__(self) -> None:
        self._arch = device_arch(0)
        self._uncompilable: set[KernelKey] = set()

    def key(self, dtype: Dtype, gemm: Gemm, tile: TileConfig) -> KernelKey:
        """What is compiled for ``tile``."""
        return KernelKey.of(self._arch, dtype, gemm, tile)

    def compile(self, wanted: Iterable[tuple[Dtype, Gemm, TileConfig]]) -> None:
        """Into Triton's cache, on all cores."""
        self._uncompilable |= compile_to_cache([self.key(*one) for one in wanted]).keys()

    def tiles_us(
        self, dtype: Dtype, gemm: Gemm, tiles: Sequence[TileConfig]
    ) -> tuple[float, dict[TileConfig, float]]:
        """Of the vendor's library, and of the tiles that run on this GPU."""
        a, b = operands(dtype, gemm)
        vendor_us = least_us(vendor(dtype, gemm, a, b), VENDOR_MEASURED_US)
        found = {}
        for tile in tiles:
            key = self.key(dtype, gemm, tile)
            if key in self._uncompilable:
                continue
            try:
                product = Product(key, gemm.m, gemm.n, gemm.k, compiled(key))
            except OutOfResources:
                continue
            found[tile] = least_us(partial(product, a, b))
        return vendor_us, found
