"""The job's key-value store: the driver holds it, workers meet there and report through it.

A TCP store in the driver needs no extra process, costs nothing while nobody writes, and outlives
any worker, so that the first error of a job is never lost with its process.
"""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

STORE_TIMEOUT = timedelta(minutes=5)
_COUNT = "events"
_STOP = "stop"


class JobStore:
    """Events of all ranks, in the order in which they were written."""

    def __init__(self, store: TCPStore) -> None:
        self.tcp = store
        self._read = 0

    @classmethod
    def host(cls, address: str) -> JobStore:
        """Serve a store on a free port of ``address`` (an address of this machine, and only it)."""
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=STORE_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        return cls(store)

    @classmethod
    def join(cls, address: str, port: int) -> JobStore:
        """Connect a worker."""
        return cls(TCPStore(address, port, is_master=False, timeout=STORE_TIMEOUT))

    def again(self) -> JobStore:
        """Another connection to the same store, for another thread."""
        return JobStore.join(self.tcp.host, self.port)

    @property
    def port(self) -> int:
        """Port that the store listens on."""
        return int(self.tcp.port)

    def put(self, event: dict[str, Any]) -> None:
        """Append an event (plain JSON data)."""
        index = self.tcp.add(_COUNT, 1) - 1
        self.tcp.set(f"event/{index}", json.dumps(event))

    def ask_to_stop(self) -> None:
        """Tell the workers to save and stop."""
        self.tcp.set(_STOP, "")

    def asked_to_stop(self) -> bool:
        """Whether the driver wants them to."""
        return bool(self.tcp.check([_STOP]))

    def new_events(self) -> list[dict[str, Any]]:
        """Events appended since the last call."""
        count = self.tcp.add(_COUNT, 0)
        events = []
        for index in range(self._read, count):
            events.append(json.loads(self.tcp.get(f"event/{index}")))
            # Read once; deleting keeps the store of a week-long job small.
            self.tcp.delete_key(f"event/{index}")
        self._read = count
        return events
