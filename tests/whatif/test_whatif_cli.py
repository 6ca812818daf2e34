"""The three commands: options, exit codes, files, and that reports fit and say what they must."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from whatif_jobs import TINY, TWO, cpu_cluster, cpu_pool

from planner.specs.cluster import ClusterSpec
from runtime.cli.main import main


def hwplan(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    argv = patch.object(sys, "argv", ["hwplan", *arguments])
    with argv, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code))
    return code, out.getvalue(), err.getvalue()


def saved(folder: Path, cluster: ClusterSpec) -> str:
    path = folder / f"{cluster.name}.yaml"
    path.write_text(yaml.safe_dump(cluster.model_dump(mode="json", exclude_none=True)), "utf-8")
    return str(path)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("job")
    model = folder / "tiny.yaml"
    model.write_text(yaml.safe_dump(TINY.model_dump(mode="json", exclude_none=True)), "utf-8")
    return "--cluster", saved(folder, TWO), "--model", str(model), "--mip-gap", "0"


@pytest.mark.parametrize("command", ["sweep", "size", "sensitivity"])
def test_help_names_the_python_twin(command: str) -> None:
    code, out, _ = hwplan(command, "--help")
    assert code == 0 and f"In Python: planner.whatif.{command}.{command}(" in " ".join(out.split())


def test_sweep(job: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    axes = ("--vary", "nodes:single=0..2", "--vary", "nodes:double=0,1")
    code, out, err = hwplan("sweep", *job, *axes, "--out", str(file))
    assert code == 0, err
    assert "6 points, " in out and "samples/s, devices, dollars/hour, watts" in out
    assert "nodes:single=0, nodes:double=0: no nodes" in out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100 and "…" not in out
    (both,) = (line for line in lines if line.split()[:3] == ["*", "1", "1"])
    assert "2.00" in both and "single 1, double 1" in both
    facts = json.loads(file.read_text())
    assert len(facts["rows"]) == 6 and facts["axes"]["nodes:double"] == [0, 1]
    code, out, _ = hwplan("sweep", *job, *axes, "--json")
    assert code == 0 and json.loads(out) == facts


def test_size(job: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "size.json"
    target = ("--target-samples-per-s", "6e4")
    code, out, err = hwplan("size", *job, *target, "--objective", "dollars", "--out", str(file))
    assert code == 0, err
    assert out.startswith("tiny at 60.00 k samples/s on toy: 1 $/h")
    assert "nothing cheaper reaches it" in out
    facts = json.loads(file.read_text())
    assert facts["nodes"] == {"single": 2} and facts["cost"] == 1.0
    code, out, _ = hwplan("size", *job, *target, "--max-nodes", "1", "--json")
    assert code == 0 and json.loads(out)["nodes"] == {"double": 1}
    code, out, _ = hwplan("size", *job, *target, "--vary", "global_batch=1920,7680", "--json")
    assert code == 0 and json.loads(out)["global_batch"] in (1920, 7680)


def test_sensitivity(job: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "sensitivity.json"
    only = ("--only", "gemm.compute_efficiency", "--most", "1")
    code, out, err = hwplan("sensitivity", *job, *only, "--out", str(file))
    assert code == 0, err
    assert "1 constant with an error, 1 of them planned again" in " ".join(out.split())
    assert "cpu gemm.compute_efficiency" in out
    facts = json.loads(file.read_text())
    assert [shift["direction"] for shift in facts["shifts"]].count("up") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("sweep",), 2, ["--vary"]),
        (("sweep", "--vary", "nodes:none=1"), 2, ["--vary nodes:none=1", "To fix"]),
        (("sweep", "--vary", "nodes:single=1..3", "--max-points", "2"), 2, ["3 points"]),
        (("sweep", "--vary", "nodes:single=1", "--out", "/no/such/x"), 2, ["--out"]),
        (("size",), 2, ["--target-samples-per-s"]),
        (("size", "--target-samples-per-s", "0"), 2, ["got 0.0"]),
        (("size", "--target-samples-per-s", "1", "--objective", "joy"), 2, ["'joy'", "watts"]),
        (("size", "--target-samples-per-s", "1", "--max-nodes", "x=1"), 2, ["no pool 'x'"]),
        (
            ("size", "--target-samples-per-s=1", "--vary=global_batch=8", "--global-batch=8"),
            2,
            ["given twice"],
        ),
        (("size", "--target-samples-per-s", "1e12"), 3, ["no cluster within --max-nodes"]),
        (("sensitivity", "--most", "0"), 2, ["--most"]),
        (("sensitivity", "--assumed-error", "-1"), 2, ["--assumed-error"]),
    ],
)
def test_errors(
    job: tuple[str, ...], arguments: tuple[str, ...], code: int, words: list[str]
) -> None:
    command, *rest = arguments
    found, out, err = hwplan(command, *job, *rest)
    assert (found, out) == (code, ""), err
    assert "Traceback" not in err and all(word in err for word in words), err


def test_dollars_without_prices(job: tuple[str, ...], tmp_path: Path) -> None:
    cluster = saved(tmp_path, cpu_cluster(cpu_pool("single", 1, 1)))
    arguments = ("--cluster", cluster, *job[2:], "--target-samples-per-s", "1")
    code, out, err = hwplan("size", *arguments, "--objective", "dollars")
    assert (code, out) == (2, "") and "dollars_per_device_hour" in err
