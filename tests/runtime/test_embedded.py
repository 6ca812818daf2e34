"""What is checked before any Ray process starts. No Ray here."""

from __future__ import annotations

import os
import socket
import time

import pytest

from planner.specs.errors import UsageError
from planner.specs.load import load_cluster
from runtime.embedded import check_machine, ray_session
from tests.runtime.plans import cluster_of

CLUSTER = cluster_of({"only": (1, [min(os.sched_getaffinity(0))])})


def test_this_machine_is_a_cluster_of_its_own_cores():
    check_machine(CLUSTER)


def test_cores_that_do_not_exist_are_named():
    with pytest.raises(UsageError) as caught:
        check_machine(cluster_of({"a": (1, [0]), "b": (1, [100_000])}))
    assert "pools.1.cpu_cores" in str(caught.value)
    assert "[100000]" in str(caught.value)
    assert "--address" in str(caught.value)


def test_gpus_that_are_not_here_are_named():
    with pytest.raises(UsageError, match=r"needs 32 AMD-Instinct-MI350X-OAM.*--address"):
        _one_line(check_machine, load_cluster("mixed"))


def _one_line(function, *arguments):
    try:
        function(*arguments)
    except UsageError as error:
        raise UsageError(" ".join(str(error).split())) from None


@pytest.mark.parametrize("address", ["nonsense", "host:port", "127.0.0.1:99999", ":6379"])
def test_an_address_that_is_none(address):
    with pytest.raises(UsageError, match="--address"), ray_session(CLUSTER, address):
        pass


def test_ray_client_addresses_are_refused_with_the_way_out():
    with pytest.raises(UsageError, match="ray job submit"), ray_session(CLUSTER, "ray://h:10001"):
        pass


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    begin = time.monotonic()
    with (
        pytest.raises(UsageError, match="no Ray cluster answers there"),
        ray_session(CLUSTER, f"127.0.0.1:{port}"),
    ):
        pass
    assert time.monotonic() - begin < 20
