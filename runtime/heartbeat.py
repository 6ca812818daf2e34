"""Signs of life of every rank, in the job's store: who stood still when a collective timed out.

A thread of each worker writes the step that its rank has reached, once a second. A process that is
stopped or swapped out writes nothing; one that hangs in its own work writes the same step for ever,
one that waits for others too.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports torch, which who only reads beats need not wait for
    from runtime.store import JobStore

INTERVAL_S = 1.0


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a worker."""

    worker: int
    step: int
    age_s: float
    """Between this worker's last word and the last of any worker."""


class Heartbeat:
    """Writes this worker's beats until closed. ``step`` is set by whoever trains."""

    def __init__(self, store: JobStore, worker: int) -> None:
        self.step = 0
        self._key = f"beat/{worker}"
        # A client of its own: the trainer's may wait for minutes.
        self._store = store.again()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._store.tcp.set(self._key, json.dumps([self.step, time.time()]))
            except RuntimeError:  # the driver is gone, and with it whoever would read this
                return
            if self._closed.wait(INTERVAL_S):
                return

    def close(self) -> None:
        """Stop beating."""
        self._closed.set()
        self._thread.join()


def beats(store: JobStore, workers: int) -> list[Beat]:
    """The last beat of every worker that ever beat."""
    found = {}
    for worker in range(workers):
        key = f"beat/{worker}"
        if store.tcp.check([key]):
            found[worker] = json.loads(store.tcp.get(key))
    latest = max((at for _, at in found.values()), default=0.0)
    return [Beat(worker, step, latest - at) for worker, (step, at) in found.items()]
