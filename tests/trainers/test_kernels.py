"""The Triton kernels: in the interpreter against float64 here, on the GPU where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planner.specs.kernels import Epilogue, Gemm, Layout, TileConfig
from planner.specs.units import Dtype

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


UNIT_ROUNDOFF = {Dtype.FP32: 2e-6, Dtype.TF32: 2e-3, Dtype.BF16: 8e-3, Dtype.FP16: 1e-3}
"""Of the stored result and of tf32's operands; sums are in fp32."""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("split_k", [1, 7])
@pytest.mark.parametrize("size", [(512, 13, 8192), (8192, 1, 256), (2048, 479, 1024), (37, 512, 1)])
def test_on_the_gpu(dtype: Dtype, layout: Layout, split_k: int, size: tuple[int, int, int]) -> None:
    from trainers.kernels.build import KernelKey, output_dtype
    from trainers.kernels.launch import TORCH_DTYPE, device_arch, multiply

    m, n, k = size
    torch.manual_seed(0)
    kind = TORCH_DTYPE[dtype]
    a = torch.randn((k, m) if layout is Layout.TN else (m, k), device="cuda").to(kind)
    b = torch.randn((n, k) if layout is Layout.NT else (k, n), device="cuda").to(kind)
    bias = torch.randn(n, device="cuda")
    exact = (a.t() if layout is Layout.TN else a).double() @ (
        b.t() if layout is Layout.NT else b
    ).double()
    for epilogue in Epilogue:
        output = output_dtype(dtype, layout)
        x0, xl = (torch.randn(m, n, device="cuda").to(TORCH_DTYPE[output]) for _ in range(2))
        tile = TileConfig(
            block_m=64, block_n=32, block_k=32, num_warps=4, num_stages=3, split_k=split_k
        )
        problem = Gemm(m, n, k, 1, layout, epilogue)
        key = KernelKey.of(device_arch(0), dtype, problem, tile, output)
        found, _ = multiply(key, a, b, bias=bias, x0=x0, xl=xl)
        wanted = {
            Epilogue.NONE: lambda: exact,
            Epilogue.BIAS: lambda: exact + bias,
            Epilogue.BIAS_RELU: lambda: (exact + bias).relu(),
            Epilogue.BIAS_SIGMOID: lambda: (exact + bias).sigmoid(),
            Epilogue.CROSS: lambda x0=x0, xl=xl: x0 * (exact + bias) + xl,
        }[epilogue]()
        error = (found.double() - wanted).abs().max() / wanted.abs().max()
        assert error < UNIT_ROUNDOFF[dtype], epilogue
