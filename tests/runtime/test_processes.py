"""Ending the processes that a shutdown left behind."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid

from runtime.processes import end, started_here

PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("ready", flush=True)
time.sleep(60)
"""


def test_children_and_grandchildren_are_found_and_ended_others_left_alone():
    mark = uuid.uuid4().hex
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child = subprocess.Popen(
        [sys.executable, "-c", PARENT, mark], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    found = started_here(mark)
    assert len(found) == 2 and found[0].pid == child.pid
    child.kill()  # its own child lives on, with another parent
    child.wait()
    assert [process.alive for process in found] == [False, True]
    end(found, patience_s=0.0)
    deadline = time.monotonic() + 5
    while any(process.alive for process in found) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(process.alive for process in found)
    assert other.poll() is None
    other.kill()
    other.wait()


def test_patience_is_not_used_up_when_all_have_ended():
    mark = uuid.uuid4().hex
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)", mark])
    begin = time.monotonic()
    end(started_here(mark), patience_s=30.0)
    assert time.monotonic() - begin < 10
    child.wait()
