"""Run the command line inside the test process, or in a fresh one."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from runtime.cli.main import main

ROOT = Path(__file__).parents[2]
START = [sys.executable, "-c", "from runtime.cli.main import main; main()"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def hwplan(*arguments: str) -> Result:
    """Exit code, stdout and stderr of one command."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    argv = patch.object(sys, "argv", ["hwplan", *arguments])
    with argv, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code))
    return Result(code, out.getvalue(), err.getvalue())


def in_new_process(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own (import checks, pipes, signals)."""
    return subprocess.run(
        [*START, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, **options
    )  # type: ignore[call-overload, no-any-return]


def assert_fails(result: Result, code: int, *words: str) -> None:
    """A one-screen error on stderr, nothing on stdout, the right exit code."""
    assert result.code == code, result
    assert result.out == ""
    assert "Traceback" not in result.err
    assert 0 < len(result.err.splitlines()) <= 24
    for word in words:
        assert word in result.err, result.err
