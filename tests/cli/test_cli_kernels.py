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
from planner.specs.kernels import Backend, Gemm, Layout, PlannedGemm, RankedKernel, TileConfig
from planner.specs.load import load_device
from planner.specs.plan import load_plan, save_plan
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
    reason = " ".join(result.out.split())
    assert "more than" in reason and "Triton model: measured-fit, mean error" in reason
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dtypes", "bf16,int4"), ["--dtypes", "bf16,int4", "tf32"]),
        (("--plan", "plan.json", "--shapes", "shapes.csv"), ["--plan, --shapes", "leave one"]),
        (("--out", "no/such/folder/report.json"), ["--out", "mkdir -p no/such/folder"]),
    ],
)
def test_bench_options_that_contradict(options: tuple[str, ...], words: list[str]) -> None:
    assert_fails(hwplan("kernels", "bench", *options), 2, "To fix", *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_bench_without_a_gpu_says_so() -> None:
    result = hwplan("kernels", "bench")
    assert_fails(result, 2, "no GPU", "To fix")


@pytest.fixture(scope="module")
def small_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for one H200 with one product of its own."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "cluster.yaml").write_text(
        "name: one\npools: [{name: only, device: h200, nodes: 1, devices_per_node: 1}]\n"
    )
    path = folder / "plan.json"
    made = hwplan("plan", "--cluster", str(folder / "cluster.yaml"), "--model",
                  "dlrm_criteo_small", "--out", str(path))  # fmt: skip
    assert made.code == 0, made.err
    plan = load_plan(path)
    tile = TileConfig(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=2)
    pool = plan.pools["only"]
    item = PlannedGemm(
        layout=Layout.NT, m=64, n=32, k=16, dtype=pool.policy.compute_precision, count=1,
        candidates=(
            RankedKernel(backend=Backend.TRITON, tile=tile, predicted_us=1.0),
            RankedKernel(backend=Backend.VENDOR, predicted_us=9.0),
        ),
    )  # fmt: skip
    pools = {"only": pool.model_copy(update={"kernels": (item,)})}
    save_plan(plan.model_copy(update={"pools": pools}), path)
    return path


def test_compile_says_what_each_pool_got(small_plan: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    store = tmp_path / "kernels"
    command = ("kernels", "compile", "--plan", str(small_plan), "--out", str(store))
    shown = hwplan(*command)
    assert shown.code == 0, shown.err
    assert "1 of 1 kernels compiled in" in shown.out and "compiling kernels: 1/1" in shown.err
    manifest = json.loads((store / "manifest.json").read_text())
    again = hwplan(*command, "--json")
    assert again.code == 0, again.err
    facts = json.loads(again.out)
    assert facts.pop("seconds") > 0
    (pool,) = facts.pop("pools")
    assert facts == manifest == json.loads((store / "manifest.json").read_text())
    assert (pool["pool"], pool["arch"]) == ("only", "sm_90")
    assert (pool["products"], pool["compiled"], pool["dropped"]) == (1, 1, 0)
    assert pool["most_registers"] == manifest["kernels"][0]["main"]["registers"]


def test_compile_errors(small_plan: Path, tmp_path: Path) -> None:
    command = ("kernels", "compile", "--plan", str(small_plan), "--out")
    (tmp_path / "mine").mkdir()
    assert_fails(hwplan(*command, str(tmp_path / "mine")), 2, "no kernel store", "To fix")
    other = hwplan(*command, str(tmp_path / "new"), "--pool", "amd")
    assert_fails(other, 2, "--pool", "'amd'", "only")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


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
