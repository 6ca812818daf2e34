"""A Ray cluster of several nodes on this machine, whose nodes tests take away and bring back."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from runtime.embedded import OBJECT_STORE_BYTES
from runtime.pools import POOL_LABEL
from runtime.processes import end, started_here

FIRST = 100
"""Nodes are 127.0.0.100 and up."""


class Raylets:
    """A head that belongs to no pool, and one raylet per node of the pools."""

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._folder = folder
        self._started = 0
        self._nodes: dict[str, list[Any]] = {}
        self._start(num_cpus=0, labels={})

    @property
    def address(self) -> str:
        return self._cluster.address

    def add(self, pool: str) -> None:
        """Start one node of one worker."""
        node = self._start(num_cpus=1, labels={POOL_LABEL: pool})
        self._nodes.setdefault(pool, []).append(node)

    def remove(self, pool: str) -> None:
        """Kill the pool's last node with everything on it."""
        self._cluster.remove_node(self._nodes[pool].pop(), allow_graceful=False)

    def shutdown(self) -> None:
        processes = started_here(self._folder)
        self._cluster.shutdown()
        end(processes, 5.0)

    def _start(self, **options: Any) -> Any:
        self._started += 1
        return self._cluster.add_node(
            temp_dir=self._folder,
            node_ip_address=f"127.0.0.{FIRST + self._started}",
            num_gpus=0,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            dashboard_agent_listen_port=0,
            **options,
        )


@contextmanager
def raylets(nodes: dict[str, int]) -> Iterator[Raylets]:
    """So many nodes per pool; all processes are gone at the end."""
    folder = tempfile.mkdtemp(prefix="hwplan-test-", dir="/tmp")
    cluster = Raylets(folder)
    try:
        for pool, count in nodes.items():
            for _ in range(count):
                cluster.add(pool)
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
