"""Processes of the embedded cluster: found while they have their parents, ended for certain."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.1


@dataclass(frozen=True)
class Process:
    """A process id alone may be given to another process later; with its start time it is one."""

    pid: int
    parent: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        now = _read(self.pid)  # its parent may be another one by now
        return now is not None and now.start_ticks == self.start_ticks


def _read(pid: int) -> Process | None:
    """The process from /proc; None if it has ended."""
    try:
        # The command's name stands in parentheses and may hold anything, spaces too.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, parent, start_ticks = fields[0], int(fields[1]), int(fields[19])
    return None if state in "ZX" else Process(pid, parent, start_ticks)


def started_here(mark: str) -> list[Process]:
    """This process's children whose command line holds ``mark``, and all their descendants."""
    everyone = [
        found for entry in os.listdir("/proc") if entry.isdigit() and (found := _read(int(entry)))
    ]
    chosen = [
        process
        for process in everyone
        if process.parent == os.getpid() and mark in _command_line(process.pid)
    ]
    for process in chosen:  # grows while it is read
        chosen += [other for other in everyone if other.parent == process.pid]
    return chosen


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""


def end(processes: Iterable[Process], patience_s: float) -> None:
    """Wait until all have ended; kill those that have not after ``patience_s``."""
    deadline = time.monotonic() + patience_s
    left = [process for process in processes if process.alive]
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = [process for process in left if process.alive]
    for process in left:
        if process.alive:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
