"""``hwplan baselines``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cli_golden import GAP, TOY
from cli_run import ROOT, assert_fails, hwplan

from planner.baselines.registry import BASELINES


def test_table_has_every_planner_and_json_the_same_numbers() -> None:
    text = hwplan("baselines", *TOY, *GAP, "--without-torchrec")
    assert text.code == 0
    for title in ("two: 3 ranks", "amd, one of 2 replica groups: 1 ranks", "nvidia: 1 ranks"):
        assert title in text.out
    for name in ("hwplan (ILP)", "HugeCTR-style greedy", "size-balanced", "row-wise"):
        assert text.out.count(name) == 3
    assert "TorchRec's" not in text.out
    result = hwplan("baselines", *TOY, *GAP, "--without-torchrec", "--json")
    found = json.loads(result.out)["leagues"]
    assert [league["name"] for league in found] == ["two", "amd", "nvidia"]
    planners = {standing["planner"] for standing in found[0]["standings"]}
    assert planners == {"ilp", *BASELINES}


def test_torchrecs_own_planner_where_it_is_installed() -> None:
    pytest.importorskip("torchrec")
    result = hwplan("baselines", *TOY, *GAP, "--json")
    job, *pools = json.loads(result.out)["leagues"]
    assert all(standing["other"] is None for standing in job["standings"])
    for pool in pools:
        rated = {one["planner"]: one["other"] for one in pool["standings"]}
        assert rated["torchrec"]["step_ms"] <= rated["table_wise"]["step_ms"]
    assert "by its own cost model" in hwplan("baselines", *TOY, *GAP).out


BLOCKED = """
import sys
sys.modules["torchrec"] = None
from runtime.cli.main import main
sys.argv = ["hwplan", *sys.argv[1:]]
main()
"""


def test_without_torchrec_a_line_says_so_and_asking_for_it_is_an_error() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", BLOCKED, "baselines", *TOY, *GAP, *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=120,
        )

    auto = run()
    assert auto.returncode == 0 and "TorchRec's own planner is left out: " in auto.stdout
    asked = run("--with-torchrec")
    assert asked.returncode == 2 and asked.stdout == ""
    assert "torchrec cannot be imported" in asked.stderr and "To fix" in asked.stderr


def test_help_and_bad_usage() -> None:
    result = hwplan("baselines", "--help")
    assert result.code == 0 and "In Python: " in " ".join(result.out.split())
    assert_fails(hwplan("baselines", *TOY, "--global-batch", "0"), 2, "--global-batch", "To fix")
    assert_fails(hwplan("baselines", "--cluster", "mixed"), 2, "--model")


def test_without_torchrec_torch_is_not_imported() -> None:
    code = (
        "import sys\n"
        "from runtime.cli.main import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'torch', 'torchrec', 'ray'} & sys.modules.keys()\n"
    )
    command = [sys.executable, "-c", code, "baselines", *TOY, *GAP, "--without-torchrec"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
