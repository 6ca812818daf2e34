"""The Triton kernels: in the interpreter against float64 here, on the GPU where there is one."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planner.specs.kernels import Epilogue, Gemm, Layout, TileConfig
from planner.specs.units import Dtype
from tests.trainers.epilogues import finish

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    found = subprocess.run(
        [sys.executable, "-m", "tests.trainers.interpreted_kernels"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    errors: dict[str, float] = json.loads(found.stdout)
    return errors


def test_every_layout_split_epilogue_and_odd_size_is_exact(interpreted: dict[str, float]) -> None:
    products = {name: error for name, error in interpreted.items() if " split " in name}
    assert len(products) == 3 * 5 * 2 + (2 * (5 + 1) * 2 - 2)
    assert {name: error for name, error in products.items() if not error < 2e-6} == {}


@pytest.mark.parametrize(
    ("case", "kernels"),
    [("all planned", 18), ("half left to the vendor", 9), ("another batch than planned", 0)],
)
def test_a_network_on_planned_kernels_has_the_same_output_and_gradients(
    interpreted: dict[str, float], case: str, kernels: int
) -> None:
    errors = {name: error for name, error in interpreted.items() if name.startswith(f"{case}: ")}
    assert errors.pop(f"{case}: kernels used") == kernels
    assert len(errors) == 2 + 4 + 1 + 2 + 4
    assert {name: error for name, error in errors.items() if not error < 5e-6} == {}


UNIT_ROUNDOFF = {Dtype.FP32: 4e-6, Dtype.TF32: 3e-3, Dtype.BF16: 8e-3, Dtype.FP16: 1e-3}
"""Of the stored result and of tf32's operands; sums are in fp32."""
GPU_SIZES = [(512, 13, 8192), (8192, 1, 256), (2048, 479, 1024), (37, 512, 1)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
@pytest.mark.parametrize("layout", Layout)
def test_on_the_gpu(dtype: Dtype, layout: Layout) -> None:
    torch.manual_seed(0)
    # Every size with and without a split; the epilogues take turns.
    cases = itertools.product(GPU_SIZES, (1, 7))
    for (size, split_k), epilogue in zip(cases, itertools.cycle(Epilogue), strict=False):
        error = gpu_error(size, split_k, epilogue, dtype, layout)
        assert error < UNIT_ROUNDOFF[dtype], (size, split_k, epilogue)


def gpu_error(
    size: tuple[int, int, int], split_k: int, epilogue: Epilogue, dtype: Dtype, layout: Layout
) -> float:
    """Largest error against float64, relative to the largest value."""
    from trainers.kernels.build import KernelKey, output_dtype
    from trainers.kernels.launch import TORCH_DTYPE, device_arch, multiply

    m, n, k = size
    kind, output = TORCH_DTYPE[dtype], output_dtype(dtype, layout)
    a = torch.randn((k, m) if layout is Layout.TN else (m, k), device="cuda") / k**0.5
    b = torch.randn((n, k) if layout is Layout.NT else (k, n), device="cuda")
    a, b, bias = a.to(kind), b.to(kind), torch.randn(n, device="cuda")
    x0, xl = (torch.randn(m, n, device="cuda").to(TORCH_DTYPE[output]) for _ in range(2))
    tile = TileConfig(
        block_m=64, block_n=32, block_k=32, num_warps=4, num_stages=3, split_k=split_k
    )
    problem = Gemm(m, n, k, 1, layout, epilogue)
    key = KernelKey.of(device_arch(0), dtype, problem, tile, output)
    found, _ = multiply(key, a, b, bias=bias, x0=x0, xl=xl)
    left = (a.t() if layout is Layout.TN else a).double()
    right = (b.t() if layout is Layout.NT else b).double()
    wanted = finish(left @ right, epilogue, bias, x0, xl)
    return float((found.double() - wanted).abs().max() / wanted.abs().max())
