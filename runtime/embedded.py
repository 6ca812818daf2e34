"""The embedded Ray cluster: one raylet per pool node on this machine, gone when the job ends."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from planner.specs.cluster import ClusterSpec
from planner.specs.errors import RunError, UsageError
from planner.specs.load import load_device
from runtime.pools import ACCELERATOR_LABEL, POOL_LABEL
from runtime.processes import end, started_here

OBJECT_STORE_BYTES = 80 * 1024**2  # Ray's minimum is 75 MiB; training data never goes through it
FIRST_NODE = 10
"""Nodes are 127.0.0.10 and up: Ray replaces 127.0.0.1 by the machine's outside address."""
CONNECT_TIMEOUT_S = 5.0
END_PATIENCE_S = 5.0
FRAME_HEADER_BYTES = 9
HTTP2_SETTINGS = b"\x04"
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + HTTP2_SETTINGS + b"\0" * 5
"""Ray's head speaks gRPC, hence HTTP/2, whose servers answer this with a SETTINGS frame."""
TERMINATED = 143
"""Exit code after SIGTERM (128 + 15, as the shell counts)."""
CONNECT_HELP = (
    "check the address (HOST:PORT of the head, 6379 unless ray start was told otherwise), or leave "
    "--address out to run on this machine"
)


def check_machine(cluster: ClusterSpec) -> None:
    """Whether this machine can really be this cluster.

    Raises:
        UsageError: names the pool, what it needs, and what is here.
    """
    here = os.sched_getaffinity(0)
    wanted: dict[str, int] = {}
    for index, pool in enumerate(cluster.pools):
        if pool.cpu_cores is None:
            accelerator = load_device(pool.device).ray_accelerator_type or pool.device
            wanted[accelerator] = wanted.get(accelerator, 0) + pool.devices
        elif not here.issuperset(pool.cpu_cores):
            raise UsageError(
                f"pool {pool.name} is pinned to cores that this machine does not offer "
                f"({_listed(here)})",
                field=f"pools.{index}.cpu_cores",
                value=list(pool.cpu_cores),
                fix="change cpu_cores in the cluster file, or give --address of a Ray cluster "
                "whose nodes have them",
            )
    if not wanted:
        return
    kind, count = _gpus_here()
    for accelerator, devices in wanted.items():
        if accelerator != kind or devices > count:
            found = f"{count} {kind}" if count else "no GPU"
            raise UsageError(
                f"cluster {cluster.name} needs {devices} {accelerator}, this machine has {found}",
                fix="give --address of a Ray cluster that has them "
                "(or plan for cluster_configs/local.yaml to train on this machine)",
            )


def _listed(cores: set[int]) -> str:
    return "cores " + ", ".join(str(core) for core in sorted(cores))


def _gpus_here() -> tuple[str | None, int]:
    """Ray's name of the GPU type of this machine, and how many there are."""
    from ray._private.accelerators import (
        AMDGPUAcceleratorManager,
        NvidiaGPUAcceleratorManager,
    )

    for manager in (NvidiaGPUAcceleratorManager, AMDGPUAcceleratorManager):
        count = manager.get_current_node_num_accelerators()
        if count:
            return manager.get_current_node_accelerator_type(), count
    return None, 0


@contextmanager
def ray_session(cluster: ClusterSpec, address: str | None) -> Iterator[None]:
    """Connect to the Ray cluster at ``address``, or to an embedded one; disconnected at the end.

    Raises:
        UsageError: nobody listens at ``address``, or this machine cannot be this cluster.
        RunError: Ray does not start here.
    """
    if address is None:
        check_machine(cluster)
        with _terminable(), _embedded(cluster) as own_address, _connected(own_address):
            yield
    else:
        check_listening(address)
        with _terminable(), _connected(address):
            yield


def check_listening(address: str) -> None:
    """Ray itself retries a dead address for minutes and then aborts the process.

    Raises:
        UsageError: not an address, or nobody listens there.
    """
    if address == "auto":
        return
    if address.startswith("ray://"):
        raise UsageError(
            "Ray Client addresses (ray://) cannot run a training job",
            field="--address",
            value=address,
            fix="run hwplan on a node of the cluster with --address auto, or use ray job submit",
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(
            "not HOST:PORT and not auto", field="--address", value=address, fix=CONNECT_HELP
        )
    problem = ""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S) as server:
            server.sendall(HTTP2_HELLO)
            answer = server.recv(FRAME_HEADER_BYTES, socket.MSG_WAITALL)
            if answer[3:4] != HTTP2_SETTINGS:
                problem = "something else listens on that port"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise UsageError(
            f"no Ray cluster answers there: {problem}",
            field="--address",
            value=address,
            fix=CONNECT_HELP,
        )


@contextmanager
def _connected(address: str) -> Iterator[None]:
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise UsageError(
            f"cannot join the Ray cluster: {str(error).splitlines()[0]}",
            field="--address",
            value=address,
            fix=CONNECT_HELP,
        ) from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)  # ray.init put its own, which aborts, over it
    try:
        yield
    finally:
        with _undisturbed():
            ray.shutdown()


@contextmanager
def _embedded(cluster: ClusterSpec) -> Iterator[str]:
    """Address of one raylet per pool node, each on its own loopback address (Ray Train tells
    nodes apart by address); the first one is the head too."""
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)
    folder = tempfile.mkdtemp(prefix="hwplan-ray-", dir="/tmp")  # sockets need a short path
    common: dict[str, Any] = {
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "dashboard_agent_listen_port": 0,
    }
    ray_cluster = Cluster()
    try:
        with _ray_address_file_kept():
            try:
                for arguments in _node_arguments(cluster):
                    ray_cluster.add_node(temp_dir=folder, **arguments, **common)
            except (OSError, RuntimeError, TimeoutError, ValueError) as error:
                raise RunError(
                    f"Ray does not start on this machine: {str(error).splitlines()[0]}",
                    fix="free memory and disk space in /tmp (Ray needs about 1 GiB here), "
                    "or give --address of a running Ray cluster",
                ) from None
        yield ray_cluster.address
    finally:
        with _undisturbed():
            # Ray ends its daemons; workers and agents end themselves when they notice.
            processes = started_here(folder)
            ray_cluster.shutdown()  # type: ignore[no-untyped-call]
            end(processes, END_PATIENCE_S)
            shutil.rmtree(folder, ignore_errors=True)


def _node_arguments(cluster: ClusterSpec) -> Iterator[dict[str, Any]]:
    """Arguments of one raylet per pool node. GPUs are dealt out in order."""
    node_number, next_gpu = 0, 0
    for pool in cluster.pools:
        for _ in range(pool.nodes):
            labels, gpus, environment = {POOL_LABEL: pool.name}, 0, {}
            if pool.cpu_cores is None:
                gpus = pool.devices_per_node
                visible = range(next_gpu, next_gpu + gpus)
                environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, visible))}
                next_gpu += gpus
                labels[ACCELERATOR_LABEL] = (
                    load_device(pool.device).ray_accelerator_type or pool.device
                )
            yield {
                "node_ip_address": f"127.0.0.{FIRST_NODE + node_number}",
                "num_cpus": pool.devices_per_node,
                "num_gpus": gpus,
                "labels": labels,
                "env_vars": environment,
            }
            node_number += 1


@contextmanager
def _ray_address_file_kept() -> Iterator[None]:
    """``ray_cluster.add_node`` points everybody's ``auto`` at itself; point it back."""
    from ray._common.utils import get_ray_address_file

    file = Path(get_ray_address_file(None))
    # Ray makes this folder only with its default temp_dir: a fresh machine has none.
    file.parent.mkdir(parents=True, exist_ok=True)
    before = file.read_text() if file.exists() else None
    try:
        yield
    finally:
        if before is not None:
            file.write_text(before)
        else:
            file.unlink(missing_ok=True)


_terminated = threading.Event()


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Of all exceptions that a signal handler raises, ray.get passes on only this one."""
    _terminated.set()
    raise KeyboardInterrupt


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that no Ray process is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt:
        if _terminated.is_set():
            sys.exit(TERMINATED)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not interrupt the shutdown, which would leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            with suppress(TypeError):  # None: it was not installed from Python
                signal.signal(number, handler)
