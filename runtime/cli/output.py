"""How commands write: results to stdout, everything else to stderr."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from planner.specs.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

READER_GONE = 141
"""Exit code of a command whose reader closed the pipe (128 + SIGPIPE, as the shell counts)."""

PLAIN_WIDTH = 100
"""Columns where stdout is no terminal."""


def write(text: str) -> None:
    """Text to stdout, flushed. A reader that went away (``| head``) ends the command quietly.

    Raises:
        typer.Exit: the pipe is closed.
        UsageError: stdout cannot be written.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout again when it exits; that must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(READER_GONE) from None
        raise UsageError(
            f"the results cannot be written: {error.strerror}",
            field="standard output",
            fix="send it to a file or pipe that can be written",
        ) from None


def write_json(data: Any) -> None:
    """One JSON object on stdout."""
    write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_report(render: Callable[[Console], None]) -> None:
    """A report on stdout: colours on a terminal, plain text elsewhere."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        force_terminal=terminal,
        width=shutil.get_terminal_size().columns if terminal else PLAIN_WIDTH,
        highlight=False,
        emoji=False,
    )
    render(console)
    write("\n".join(line.rstrip() for line in buffer.getvalue().split("\n")))


@contextmanager
def working(what: str) -> Iterator[None]:
    """Says on stderr that something takes a while; a spinner if that is a terminal."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(f"{what} …"):
            yield
    else:
        print(f"{what} …", file=sys.stderr, flush=True)
        yield


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Says on stderr how far something is: a bar on a terminal, else a line every tenth."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task(what, total=None)
            yield lambda done, total: bars.update(task, completed=done, total=total)
        return

    def plainly(done: int, total: int) -> None:
        tenth = max(1, total // 10)
        if done % tenth == 0 or done == total:
            print(f"{what}: {done}/{total}", file=sys.stderr, flush=True)

    yield plainly
