"""The command line's contract: exit codes, stdout and stderr, option checks, what it imports."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli_run import ROOT, START, assert_fails, hwplan, in_new_process

from planner.specs.errors import UsageError
from planner.specs.load import DEVICES, MODELS, load_model, names_in
from planner.specs.units import Dtype

JOB = ("--cluster", "mixed", "--model", "dlrm")
COMMANDS = (
    "plan",
    "train",
    "compare",
    "baselines",
    "models",
    "devices",
    "show",
    "sweep",
    "size",
    "sensitivity",
    "import",
    "export",
)


def test_help_names_every_command_and_the_exit_codes() -> None:
    result = hwplan("--help")
    assert result.code == 0 and result.err == ""
    for command in COMMANDS:
        assert f"\n  {command} " in result.out
    assert "2 bad input or usage, 3 infeasible, 4 the run failed" in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_a_python_twin(command: str) -> None:
    result = hwplan(command, "--help")
    assert result.code == 0
    assert "In Python: " in " ".join(result.out.split())


def test_contract_options_exist() -> None:
    wanted = {
        "plan": "--cluster --model --global-batch --out --json --top-k --time-limit --mip-gap "
        "--constraints",
        "import": "--rows --pooling --dim --tasks --task --like --out --json",
        "export": "--as --pool --module --first-rank --device-type --out --json",
        "train": "--plan --cluster --model --data --steps --epochs --address --out "
        "--eval-fraction --seed --json",
        "compare": "--cluster --model --measure --json --global-batch --steps",
        "models": "--json",
        "devices": "--json",
        "show": "--json",
    }
    for command, options in wanted.items():
        text = hwplan(command, "--help").out
        for option in options.split():
            assert f"{option} " in text or f"{option}\n" in text, (command, option)


def test_no_command_shows_help_and_is_a_usage_error() -> None:
    result = in_new_process()
    assert result.returncode == 2
    assert "Commands:" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan",), ["--cluster"]),
        (("plan", "--cluster", "mixed"), ["--model"]),
        (("plan", *JOB, "--nonsense"), ["--nonsense"]),
        (("nonsense",), ["nonsense"]),
        (("plan", *JOB, "--global-batch", "many"), ["--global-batch", "integer"]),
        (("plan", *JOB, "--global-batch", "0"), ["--global-batch", "got 0", "To fix"]),
        (("plan", *JOB, "--global-batch", "-64"), ["--global-batch", "got -64", "To fix"]),
        (("plan", *JOB, "--top-k", "0"), ["--top-k", "got 0", "To fix"]),
        (("plan", *JOB, "--time-limit", "0"), ["--time-limit", "got 0", "To fix"]),
        (("plan", *JOB, "--time-limit", "nan"), ["--time-limit", "got nan", "To fix"]),
        (("plan", *JOB, "--time-limit", "inf"), ["--time-limit", "got inf", "To fix"]),
        (("plan", *JOB, "--mip-gap", "-0.1"), ["--mip-gap", "got -0.1", "To fix"]),
        (("plan", *JOB, "--mip-gap", "nan"), ["--mip-gap", "got nan", "To fix"]),
        (("plan", *JOB, "--mip-gap", "1"), ["--mip-gap", "got 1.0", "To fix"]),
        (("plan", *JOB, "--out", "/no/such/plan.json"), ["--out", "/no/such", "mkdir -p"]),
        (("plan", *JOB, "--out", "/"), ["--out", "folder", "To fix"]),
        (("plan", "--cluster", "mixed", "--model", "nope"), ["unknown model", "dlrm_kaggle"]),
        (("plan", "--cluster", "nope", "--model", "dlrm"), ["unknown cluster", "mixed"]),
        (("plan", "--cluster", "no/such.yaml", "--model", "dlrm"), ["no/such.yaml", "To fix"]),
        (("compare", *JOB, "--steps", "0"), ["--steps", "got 0", "To fix"]),
        (("compare", *JOB, "--global-batch", "-1"), ["--global-batch", "got -1", "To fix"]),
        (("show",), ["PLAN"]),
        (("show", "no-such-plan.json"), ["no-such-plan.json", "does not exist", "To fix"]),
        (("show", str(ROOT)), ["folder", "To fix"]),
        (("show", str(ROOT / "pyproject.toml")), ["pyproject.toml", "not valid JSON"]),
        (("models", "extra"), ["extra"]),
    ],
)
def test_bad_usage_is_code_2(arguments: tuple[str, ...], words: list[str]) -> None:
    assert_fails(hwplan(*arguments), 2, *words)


def test_bad_input_with_json_leaves_stdout_empty() -> None:
    assert_fails(hwplan("plan", *JOB, "--json", "--global-batch", "0"), 2, "error: ")
    assert_fails(hwplan("show", "nothing.json", "--json"), 2, "error: ")


def test_models_lists_every_file_with_its_use() -> None:
    result = hwplan("models", "--json")
    rows = {row["name"]: row for row in json.loads(result.out)["models"]}
    assert result.code == 0 and result.err == ""
    assert sorted(rows) == names_in(MODELS)
    assert rows["dlrm"]["tables"] == 26 and rows["dlrm"]["trainable"] is True
    assert rows["dlrm"]["embedding_bytes_fp32"] == 26135627264 * Dtype.FP32.bytes
    assert rows["wukong_criteo"]["trainable"] is False
    text = {line.split()[0]: line.split() for line in hwplan("models").out.splitlines()}
    assert text["dlrm"][-1] == "train" and text["wukong_criteo"][-1] == "plan"


def test_devices_lists_every_profile_with_the_origin_of_its_numbers() -> None:
    result = hwplan("devices", "--json")
    rows = {row["name"]: row for row in json.loads(result.out)["devices"]}
    assert result.code == 0 and result.err == ""
    assert sorted(rows) == names_in(DEVICES)
    assert rows["mi350x"]["emulated"] == ["tf32"] and rows["b200"]["emulated"] == []
    for row in rows.values():
        assert sum(row["provenance"].values()) > 30
    assert "769*" in hwplan("devices").out


def test_reports_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.cli.output.PLAIN_WIDTH", 80)
    for command in ("models", "devices"):
        lines = hwplan(command).out.splitlines()
        assert max(map(len, lines)) <= 80
        assert not any("…" in line for line in lines), "a column was cut"
        assert len(lines) < 24


def test_version() -> None:
    from importlib.metadata import version

    assert hwplan("--version").out == f"hwplan {version('hwplan')}\n"


IMPORTS = """
import sys
from runtime.cli.main import main
sys.argv[0] = "hwplan"
try:
    main()
finally:
    heavy = {"torch", "ray", "torchrec", "pandas", "numpy"} & set(sys.modules)
    print(" ".join(sorted(heavy)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments", [("--help",), *((command, "--help") for command in COMMANDS), ("models",)]
)
def test_help_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    result = subprocess.run(
        [START[0], "-c", IMPORTS, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0
    assert result.stderr.splitlines()[-1] == ""


def test_a_reader_that_leaves_early_causes_no_noise() -> None:
    process = subprocess.run(
        f"{START[0]} -c 'from runtime.cli.main import main; main()' models --json | true; "
        "exit ${PIPESTATUS[0]}",
        shell=True,
        executable="/bin/bash",
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.stderr == ""
    assert process.returncode in (0, 141), "0 if the reader was still there"


def test_a_closed_pipe_ends_quietly_with_the_shells_code() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        process = subprocess.run(
            [*START, "models", "--json"],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (process.returncode, process.stderr) == (141, "")


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
def test_results_that_cannot_be_written_are_an_error(redirection: str) -> None:
    command = " ".join([*map(shlex.quote, START), "models --json", redirection])
    result = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "standard output" in result.stderr and "To fix" in result.stderr


def test_a_closed_stderr_does_no_harm() -> None:
    command = " ".join([*map(shlex.quote, START), "models --json 2>&-"])
    result = subprocess.run(
        command, shell=True, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert result.returncode == 0 and json.loads(result.stdout)


def test_ascii_terminals_get_no_error() -> None:
    result = in_new_process("models", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0 and "dlrm" in result.stdout


def test_ctrl_c_is_code_130(tmp_path: Path) -> None:
    """The model file is a named pipe that nobody writes to, so the command waits in reading it."""
    pipe = tmp_path / "model.yaml"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [*START, "plan", "--cluster", "mixed", "--model", str(pipe)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    writer = None
    while writer is None and process.poll() is None and time.monotonic() < deadline:
        try:
            writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # the command has not opened it for reading yet
            time.sleep(0.05)
    # Between opening and reading a signal would be noted, and heeded only after the read.
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert writer is not None, err
    os.close(writer)
    assert process.returncode == 130
    assert out == "" and "Traceback" not in err


def test_option_defaults_are_the_planners() -> None:
    import inspect

    from planner.search import SearchOptions
    from runtime.cli.plan import plan

    defaults = {k: v.default for k, v in inspect.signature(plan).parameters.items()}
    options = SearchOptions()
    assert defaults["top_k"] == options.top_k
    assert defaults["time_limit"] == options.time_limit_s
    assert defaults["mip_gap"] == options.mip_gap
    assert load_model("dlrm").global_batch == 65536


def test_training_a_plan_only_model_is_refused_before_it_is_planned() -> None:
    # Planned first, it would be refused for its size.
    result = in_new_process("train", "--cluster", "local", "--model", "wukong_criteo")
    assert result.returncode == 2 and not result.stdout
    assert "can be planned but not trained" in result.stderr and "To fix" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--data", "criteo:/nowhere/day_0"), "/nowhere/day_0: this data file does not exist"),
        (("--address", "127.0.0.1:1"), "no Ray cluster answers there"),
        (("--address", "here"), "not HOST:PORT"),
        (("--out", "/dev/null"), "/dev/null is a file"),
    ],
)
def test_train_checks_its_options_before_it_plans(options: tuple[str, str], said: str) -> None:
    # Planned first, this model would be refused for its size.
    result = in_new_process("train", "--cluster", "local", "--model", "dlrm", *options)
    assert result.returncode == 2 and said in result.stderr and "planning" not in result.stderr


def test_compare_checks_the_address_before_it_plans() -> None:
    job = ("--cluster", "local", "--model", "dlrm", "--measure", "--address", "127.0.0.1:1")
    result = in_new_process("compare", *job)
    assert result.returncode == 2 and "no Ray cluster answers there" in result.stderr
    assert "planning" not in result.stderr


def test_models_are_listed_as_train_refuses_them() -> None:
    from planner.report.inventory import model_rows
    from runtime.train import check_trainable

    for row in model_rows():
        try:
            check_trainable(load_model(row["name"]))
            refused = False
        except UsageError:
            refused = True
        assert row["trainable"] is not refused, row["name"]
    assert not load_model("deepfm_criteo").trainable
