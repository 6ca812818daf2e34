"""Planning through the command line: the JSON contract, every built-in model, infeasible jobs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_run import ROOT, START, assert_fails, hwplan
from spec_samples import MODEL, changed

from planner.specs.load import MODELS, load_cluster, load_model, names_in
from planner.specs.plan import load_plan

GIB = 1024**3


def check_plan(data: dict[str, Any], cluster: str, model: str) -> None:
    """What scripts rely on, and what must be true of any plan."""
    assert data["schema_version"] == 2 and len(data["fingerprint"]) == 64
    predicted = data["predicted"]
    assert predicted["step_ms"] > 0 and predicted["lower_bound_ms"] <= predicted["step_ms"] * 1.0001
    assert predicted["samples_per_s"] == pytest.approx(
        data["global_batch"] / predicted["step_ms"] * 1e3, rel=1e-6
    )
    assert predicted["gap"] == pytest.approx(
        predicted["step_ms"] / predicted["lower_bound_ms"] - 1, abs=1e-6
    )
    assert data["solver"]["status"] in ("optimal", "exhausted", "time_limit", "heuristic")
    tables = {table.name for table in load_model(model).all_tables}
    pools = {pool.name: pool for pool in load_cluster(cluster).pools}
    samples = 0
    for name, pool in data["pools"].items():
        assert pool["ranks"] == pool["nodes"] * pools[name].devices_per_node
        assert pool["nodes"] <= pools[name].nodes
        samples += pool["ranks"] * pool["local_batch"]
        assert set(pool["placements"]) == tables
        assert len(pool["memory_bytes"]) == pool["ranks"]
        for rank in pool["memory_bytes"]:
            assert rank["total"] <= rank["capacity"]
            others = ("total", "capacity", "host", "host_capacity")
            parts = sum(size for category, size in rank.items() if category not in others)
            assert parts == rank["total"]
        assert pool["device"] and pool["policy"]["compute_precision"]
    assert samples == data["global_batch"], "the global batch belongs to the model"
    assert sum(row["chosen"] for row in data["considered"]) == 1


@pytest.mark.parametrize("model", names_in(MODELS))
def test_every_built_in_model_plans_on_mixed_or_says_why_not(model: str) -> None:
    result = hwplan(
        "plan", "--cluster", "mixed", "--model", model, "--json", "--time-limit", "5",
        "--mip-gap", "0.05",
    )  # fmt: skip
    assert result.code in (0, 3), result.err
    if result.code == 0:
        check_plan(json.loads(result.out), "mixed", model)
    else:
        assert_fails(result, 3, "To fix: ", "GiB")


IMPORTS = """
import sys
from runtime.cli.main import main
sys.argv[0] = "hwplan"
try:
    main()
finally:
    heavy = {"torch", "ray", "torchrec", "fbgemm_gpu", "triton", "pandas"} & set(sys.modules)
    print("heavy:", " ".join(sorted(heavy)), file=sys.stderr)
"""


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_planning_imports_neither_torch_nor_ray(command: str, toy: tuple[str, str]) -> None:
    cluster, model = toy
    result = subprocess.run(
        [START[0], "-c", IMPORTS, command, "--cluster", cluster, "--model", model, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-1] == "heavy: "
    assert isinstance(json.loads(result.stdout), dict)


@pytest.fixture
def toy(tmp_path: Path) -> tuple[str, str]:
    """A cluster of three devices and a model of three tables, as files."""
    from spec_samples import CLUSTER

    cluster, model = tmp_path / "cluster.yaml", tmp_path / "model.yaml"
    cluster.write_text(yaml.safe_dump(CLUSTER))
    model.write_text(yaml.safe_dump(MODEL))
    return str(cluster), str(model)


def test_plan_is_saved_shown_and_equal_each_time(toy: tuple[str, str], tmp_path: Path) -> None:
    job = ("--cluster", toy[0], "--model", toy[1])
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    result = hwplan("plan", *job, "--out", str(first), "--json")
    assert result.code == 0 and "Traceback" not in result.err
    report = hwplan("plan", *job, "--out", str(second))
    assert report.code == 0 and f"Saved to {second}" in report.out
    assert first.read_bytes() == second.read_bytes()
    assert json.loads(result.out) == json.loads(first.read_text())
    shown = hwplan("show", str(first))
    assert shown.code == 0
    assert shown.out.strip() == report.out.split("\nSaved to")[0].strip()
    assert json.loads(hwplan("show", str(first), "--json").out) == json.loads(first.read_text())
    check_plan(json.loads(result.out), toy[0], toy[1])
    assert load_plan(first).global_batch == MODEL["global_batch"]


def test_an_edited_plan_is_refused(toy: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert hwplan("plan", "--cluster", toy[0], "--model", toy[1], "--out", str(path)).code == 0
    text = path.read_text()
    path.write_text(text.replace('"recompute":[]', '"recompute":["top"]', 1))
    assert_fails(hwplan("show", str(path)), 2, "plan.json", "digest", "To fix: ")
    path.write_text(text[:-40])
    assert_fails(hwplan("show", str(path)), 2, "plan.json", "truncated", "To fix: ")


def test_options_reach_the_solver_and_the_plan(toy: tuple[str, str]) -> None:
    result = hwplan(
        "plan", "--cluster", toy[0], "--model", toy[1], "--json", "--global-batch", "48",
        "--top-k", "2", "--time-limit", "7", "--mip-gap", "0.02",
    )  # fmt: skip
    data = json.loads(result.out)
    assert data["global_batch"] == 48
    assert len(data["considered"]) <= 2
    assert (data["solver"]["time_limit_s"], data["solver"]["mip_gap"]) == (7, 0.02)


def test_a_batch_that_no_split_reaches_is_explained(tmp_path: Path) -> None:
    job = ("--cluster", "b200_1x8", "--model", "dlrm_kaggle")
    result = hwplan("plan", *job, "--global-batch", "7")
    assert result.code in (2, 3)
    assert_fails(result, result.code, "7", "8", "To fix: ")


def test_a_table_larger_than_the_pool_is_infeasible(toy: tuple[str, str], tmp_path: Path) -> None:
    model = tmp_path / "huge.yaml"
    model.write_text(yaml.safe_dump(changed(MODEL, "tables.0.num_embeddings", 10**13)))
    out = tmp_path / "plan.json"
    result = hwplan("plan", "--cluster", toy[0], "--model", str(model), "--out", str(out), "--json")
    assert_fails(result, 3, "To fix: ")
    assert not out.exists()


def test_compare_has_matched_free_and_waterfall(toy: tuple[str, str]) -> None:
    result = hwplan("compare", "--cluster", toy[0], "--model", toy[1], "--json")
    data = json.loads(result.out)
    for terms in ("matched", "free"):
        planned = data[terms]["planned"]["samples_per_s"]
        naive = data[terms]["naive"]["samples_per_s"]
        assert data[terms]["speedup"] == pytest.approx(planned / naive, rel=1e-6)
    assert data["matched"]["speedup"] >= 0.999, "the planner may always answer the naive plan"
    assert (
        data["free"]["planned"]["samples_per_s"]
        >= 0.99 * (data["matched"]["planned"]["samples_per_s"])
    )
    assert data["waterfall"]
    assert "measured" not in data["matched"] or data["matched"]["measured"] is None
    text = hwplan("compare", "--cluster", toy[0], "--model", toy[1]).out
    assert f"{data['matched']['speedup']:.2f}x" in text
