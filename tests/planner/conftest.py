from __future__ import annotations

import pytest

from planner.specs.cluster import BridgeSpec, ClusterSpec, PoolSpec
from planner.specs.load import load_model
from planner.specs.model import ModelSpec


@pytest.fixture(scope="session")
def two_vendors() -> ClusterSpec:
    """Two small pools of different vendors and sizes behind a fast bridge."""
    return ClusterSpec(
        name="two_vendors",
        pools=(
            PoolSpec(name="amd", device="mi350x", nodes=2, devices_per_node=4),
            PoolSpec(name="nvidia", device="h100", nodes=1, devices_per_node=4),
        ),
        bridge=BridgeSpec(gbps=3200.0, latency_us=5.0, rails=4),
    )


@pytest.fixture(scope="session")
def cpu_pools() -> ClusterSpec:
    """One worker on a core of its own; three that share another core."""
    return ClusterSpec(
        name="cpu_pools",
        pools=(
            PoolSpec(
                name="fast",
                device="cpu",
                nodes=1,
                devices_per_node=1,
                cpu_cores=(0,),
                host_memory_gib_per_node=2.0,
            ),
            PoolSpec(
                name="slow",
                device="cpu",
                nodes=1,
                devices_per_node=3,
                cpu_cores=(1,),
                host_memory_gib_per_node=4.0,
            ),
        ),
        bridge=BridgeSpec(gbps=20.0, latency_us=50.0),
        reference_device="cpu",
    )


@pytest.fixture(scope="session")
def dlrm() -> ModelSpec:
    return load_model("dlrm")


@pytest.fixture(scope="session")
def small() -> ModelSpec:
    return load_model("dlrm_criteo_small")
