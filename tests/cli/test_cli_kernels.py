"""``hwplan kernels``: select without a GPU, compile without a GPU, bench only with one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_run import ROOT, assert_fails, hwplan

from planner.kernels.select import select_kernels
from planner.specs.kernels import Gemm, Layout
from planner.specs.load import load_device
from planner.specs.units import Dtype

SELECT = ("kernels", "select", "--device", "h200", "--m", "512", "--n", "13", "--k", "65536")


def test_select_prints_what_the_selector_ranks() -> None:
    result = hwplan(*SELECT, "--layout", "tn", "--top-k", "3", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    device = load_device("h200")
    ranked = select_kernels(device, Dtype.BF16, [Gemm(512, 13, 65536, layout=Layout.TN)], 3)[0]
    assert found["candidates"] == [kernel.model_dump(mode="json") for kernel in ranked]
    assert (found["m"], found["layout"], found["dtype"]) == (512, "tn", "bf16")


def test_select_marks_what_runs_and_says_why() -> None:
    result = hwplan(*SELECT, "--layout", "tn")
    assert result.code == 0
    assert result.out.count("->") == 1 and "vendor" in result.out
    assert "more than" in result.out and "mean error" in result.out
    on_cpu = hwplan("kernels", "select", "--device", "cpu", "--m", "8", "--n", "8", "--k", "8",
                    "--dtype", "fp32")  # fmt: skip
    assert on_cpu.code == 0 and "no Triton kernels" in on_cpu.out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--m", "0"), ["m", "got 0", "1 to"]),
        (("--k", "-5"), ["k", "got -5"]),
        (("--top-k", "0"), ["top", "1 or more"]),
        (("--device", "h300"), ["unknown device", "h200"]),
        (("--dtype", "fp8", "--device", "a100"), ["a100", "fp8", "bf16"]),
    ],
)
def test_what_cannot_be_selected(change: tuple[str, ...], words: list[str]) -> None:
    assert_fails(hwplan(*SELECT, *change), 2, "To fix", *words)


def test_select_imports_neither_torch_nor_triton() -> None:
    code = (
        "import sys\nfrom runtime.cli.main import app\n"
        f"app({list(SELECT)!r}, standalone_mode=False)\n"
        "assert not {'torch', 'triton', 'ray'} & sys.modules.keys()"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_bench_without_a_gpu_says_so() -> None:
    result = hwplan("kernels", "bench")
    assert_fails(result, 2, "no GPU", "To fix")


def test_a_plan_without_kernels_has_nothing_to_compile(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    planned = hwplan("plan", "--cluster", "local", "--model", "dlrm_criteo_small",
                     "--out", str(plan))  # fmt: skip
    assert planned.code == 0, planned.err
    result = hwplan("kernels", "compile", "--plan", str(plan), "--out", str(tmp_path / "k"))
    assert_fails(result, 2, "nothing to compile", "triton")
    trained = hwplan("train", "--plan", str(plan), "--kernels", str(tmp_path / "k"))
    assert_fails(trained, 2, "manifest.json", "To fix")
    unsaved = hwplan("train", "--cluster", "local", "--model", "dlrm_criteo_small",
                     "--kernels", str(tmp_path / "k"))  # fmt: skip
    assert_fails(unsaved, 2, "--kernels", "--plan")
