"""Small random jobs, and devices so small and slow that everything about them matters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from planner.cost.context import PoolContext
from planner.cost.memory import base_memory_bytes
from planner.specs.cluster import BridgeSpec, ClusterSpec, LinkSpec, PoolSpec
from planner.specs.device import DeviceProfile
from planner.specs.load import load_device, standing_in
from planner.specs.model import (
    Architecture,
    ComputeKernel,
    DcnInteraction,
    DenseOptimizer,
    DotInteraction,
    ModelSpec,
    Optimizers,
    Precision,
    ShardingType,
    SparseOptimizer,
    TableConstraints,
    TableGroup,
    WukongLayer,
)
from planner.specs.units import GIB, Dtype
from tests.planner.whole_space import policies, policies_priced, starts

ROOMY_BYTES = 2**40
MOST_POLICIES = 200
"""Step graphs priced for one job."""
CPU_CONTEXT_BYTES = 2**21
"""So that pools have the least memory that a cluster file may give them."""
LATENCY = 0.01
"""Share of the real fixed times."""


@dataclass(frozen=True)
class Job:
    """On devices of ``PROFILES`` with so much memory."""

    cluster: ClusterSpec
    model: ModelSpec
    device_bytes: int

    @property
    def profiles(self) -> dict[str, DeviceProfile]:
        """For ``standing_in``."""
        return {
            name: _with_memory(profile, self.device_bytes) for name, profile in PROFILES.items()
        }


def little(
    name: str, of: str, *, memory: float = 1.0, links: float = 1.0, compute: float = 1.0
) -> DeviceProfile:
    """A shipped device with a few megabytes, slow enough for small batches to take time.

    Args:
        memory: bandwidth of device memory, in GB/s; links: of all others, in 100 MB/s; compute:
            in 10 GFLOP/s.
    """
    data: dict[str, Any] = load_device(of).model_dump()
    data["name"] = name

    def put(value: float, *path: str) -> None:
        target = data
        for key in path:
            target = target[key]
        target["value"] = value

    def shorten(part: dict[str, Any]) -> None:
        for key, item in part.items():
            if isinstance(item, dict) and "value" in item and key.endswith("_s"):
                item["value"] *= 1.0 if key.endswith("_per_s") else LATENCY
            elif isinstance(item, dict):
                shorten(item)

    shorten(data)

    if of != "cpu":
        put(memory * 1e9, "memory", "hbm_bytes_per_s")
        put(memory * 2e9, "memory", "l2_bytes_per_s")
        put(2.0**16, "memory", "l2_bytes")
        put(2.0**16, "memory", "last_level_cache_bytes")
        put(links * 1e8, "scale_up", "bytes_per_s")
        put(links * 2e7, "network", "bytes_per_s")
        put(links * 1e8, "host", "link_bytes_per_s")
        put(1e3, "network", "half_bytes")
        for dtype in data["compute"]["peak_flops_per_s"]:
            factor = 1 if dtype == Dtype.FP32 else 2
            put(compute * factor * 1e10, "compute", "peak_flops_per_s", dtype)
    put(CPU_CONTEXT_BYTES if of == "cpu" else 0.0, "memory", "context_bytes")
    put(0.0, "memory", "allocator_reserve")
    return DeviceProfile.model_validate(data)


def _with_memory(profile: DeviceProfile, device_bytes: int) -> DeviceProfile:
    memory = profile.memory
    capacity = memory.hbm_bytes.model_copy(update={"value": float(device_bytes)})
    return profile.model_copy(
        update={
            "name": f"{profile.name}_{device_bytes}",
            "memory": memory.model_copy(update={"hbm_bytes": capacity}),
        }
    )


PROFILES = {
    profile.name: profile
    for profile in (
        little("little_h100", "h100"),
        little("wide_h100", "h100", memory=30.0, links=0.3),
        little("linked_h100", "h100", links=30.0, compute=0.1),
        little("little_mi350x", "mi350x", compute=3.0),
        little("little_cpu", "cpu"),
    )
}
CPU = "little_cpu"
GPUS = tuple(name for name, profile in PROFILES.items() if not profile.is_cpu)


def networks(draw: st.DrawFn, width: int) -> dict[str, Any]:
    """Fields of a model that describe its dense network; tables are ``width`` columns wide."""
    arch = draw(st.sampled_from(list(Architecture)))
    hidden = draw(st.sampled_from([8, 64, 512]))
    fields: dict[str, Any] = {"arch": arch, "dense_features": 4, "top_mlp": (hidden, 1)}
    if arch is not Architecture.MLP_CONCAT:
        fields["bottom_mlp"] = (draw(st.sampled_from([8, 256])), width)
    if arch is Architecture.DLRM_DOT:
        fields["interaction"] = DotInteraction(type="dot")
    if arch is Architecture.DLRM_DCN:
        fields["interaction"] = DcnInteraction(type="dcn_v2", num_layers=2, low_rank=8)
    if arch is Architecture.WUKONG:
        layer = WukongLayer(lcb=2, fmb=2, compressed=2, fmb_mlp=(hidden,))
        fields["wukong_layers"] = (layer,) * draw(st.integers(1, 3))
    return fields


ALONE = ((Dtype.FP32,), (Dtype.BF16,))
BOTH = (Dtype.FP32, Dtype.BF16)
SHARDINGS = tuple(
    tuple(map(ShardingType, words.split()))
    for words in (
        "table_wise",
        "data_parallel",
        "column_wise",
        "table_wise row_wise",
        "table_wise data_parallel",
        "table_wise column_wise",
        "row_wise data_parallel",
        "table_row_wise table_wise",
        "grid_shard table_wise",
    )
)
KERNELS = (
    (ComputeKernel.FUSED, ComputeKernel.DENSE),
    (ComputeKernel.FUSED, ComputeKernel.FUSED_UVM, ComputeKernel.DENSE),
    (ComputeKernel.FUSED, ComputeKernel.FUSED_UVM_CACHING, ComputeKernel.DENSE),
    (ComputeKernel.FUSED_UVM_CACHING, ComputeKernel.DENSE),
    None,
)


def constraints(draw: st.DrawFn, most: int) -> TableConstraints:
    """At most so many sharding types; the dense kernel is that of data-parallel tables alone."""
    shardings = draw(st.sampled_from([one for one in SHARDINGS if len(one) <= most]))
    return TableConstraints(
        sharding_types=shardings, compute_kernels=draw(st.sampled_from(KERNELS))
    )


def affordable(draw: st.DrawFn, cluster: ClusterSpec, model: ModelSpec) -> Job:
    """A job with some of the memory that its first pool could use, if it can be enumerated."""
    job = Job(cluster, model, ROOMY_BYTES)
    with standing_in(job.profiles):
        assume(policies_priced(cluster, model) <= MOST_POLICIES)
        first = next(starts(cluster, model), None)
        if first is None:
            return job
        least_bytes, most_bytes = memory_range(next(iter(first.values())))
    share = draw(st.sampled_from([0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.1, 1.3, 3.0]))
    device_bytes = int(least_bytes * 1.01 + share * (most_bytes - least_bytes)) + 1
    pools = tuple(
        pool.model_copy(
            update={
                "host_memory_gib_per_node": (device_bytes + CPU_CONTEXT_BYTES)
                * pool.devices_per_node
                / GIB
            }
        )
        if pool.device == CPU
        else pool
        for pool in cluster.pools
    )
    return Job(cluster.model_copy(update={"pools": pools}), model, device_bytes)


def memory_range(start: PoolContext) -> tuple[int, int]:
    """What a rank keeps under the policy that takes least with its part of half-precision tables,
    and under the one that takes most with all of them."""
    bases = [
        sum(base_memory_bytes(replace(start, policy=policy)).values()) for policy in policies(start)
    ]
    rows = sum(table.parameters + table.num_embeddings for table in start.model.all_tables)
    return min(bases) + 2 * rows // start.ranks, max(bases) + 4 * rows


def models(draw: st.DrawFn, batch: int, *, tables: int, most: int) -> ModelSpec:
    """A model with at most so many tables, the options of which are few."""
    width = draw(st.sampled_from([4, 8]))
    chosen = tuple(
        TableGroup(
            name=f"t{index}",
            num_embeddings=draw(st.sampled_from([7, 2_000, 50_000, 200_000])),
            embedding_dim=width,
            pooling_factors=(draw(st.sampled_from([1.0, 20.0])),),
            zipf_exponent=draw(st.sampled_from([0.0, 1.2])),
            constraints=constraints(draw, most),
        )
        for index in range(draw(st.integers(1, tables)))
    )
    return ModelSpec(
        name="tiny",
        description="",
        source="made up",
        global_batch=batch,
        tables=chosen,
        optimizer=Optimizers(
            dense=DenseOptimizer(name=draw(st.sampled_from(["sgd", "adam"])), learning_rate=0.1),
            sparse=SparseOptimizer(name="rowwise_adagrad", learning_rate=0.1),
        ),
        precision=Precision(
            compute=draw(st.sampled_from([*ALONE, *ALONE, BOTH])),
            embeddings=draw(st.sampled_from([*ALONE, BOTH])),
            communication=draw(st.sampled_from([*ALONE, *ALONE, BOTH])),
        ),
        max_exchange_interval_steps=draw(st.sampled_from([1, 2])),
        **networks(draw, width),
    )


def pools(
    draw: st.DrawFn, name: str, device: str, *, nodes: int, devices: int, least: int, core: int
) -> PoolSpec:
    """At most so many nodes and devices, of which so many nodes must work."""
    return PoolSpec(
        name=name,
        device=device,
        nodes=draw(st.integers(1, 1 if device == CPU else nodes)),
        devices_per_node=draw(st.integers(1, devices)),
        min_nodes=least,
        reserved_memory=draw(st.sampled_from([0.0, 0.1])),
        host_memory_gib_per_node=draw(st.sampled_from([1.0, 2.0, 20.0])) / 1000,
        cpu_cores=(core,) if device == CPU else None,
    )


@st.composite
def single_pool(draw: st.DrawFn) -> Job:
    """Up to two nodes of three devices."""
    device = draw(st.sampled_from([*GPUS, *GPUS, CPU]))
    pool = pools(draw, "p", device, nodes=2, devices=3, least=0, core=0)
    batch = pool.devices * draw(st.sampled_from([1, 4, 64, 256]))
    few = pool.devices < 4
    model = models(draw, batch, tables=3 if few else 2, most=2 if few else 1)
    return affordable(draw, ClusterSpec(name="one", pools=(pool,)), model)


@st.composite
def two_pools(draw: st.DrawFn) -> Job:
    """Two pools of up to two devices, perhaps linked; both must work, or neither."""
    first = draw(st.sampled_from([*GPUS, CPU]))
    alike, least = draw(st.booleans()), draw(st.integers(0, 1))
    second = first if alike else draw(st.sampled_from([*GPUS, CPU]))
    one = pools(draw, "a", first, nodes=1, devices=2, least=least, core=0)
    other = pools(draw, "b", second, nodes=1, devices=2, least=least, core=1)
    if alike:
        other = one.model_copy(update={"name": "b", "cpu_cores": (1,) if one.cpu_cores else None})
    links = (LinkSpec(pools=("a", "b"), gbps_per_device=draw(st.sampled_from([0.1, 8.0]))),)
    cluster = ClusterSpec(
        name="two",
        pools=(one, other),
        bridge=BridgeSpec(gbps=draw(st.sampled_from([0.5, 50.0])), latency_us=10.0),
        links=links if alike and draw(st.booleans()) else (),
    )
    batch = draw(st.integers(2, 6)) * draw(st.sampled_from([1, 2]))
    return affordable(draw, cluster, models(draw, batch, tables=2, most=2))
