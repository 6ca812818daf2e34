"""What bounds an operation: the resource that, a tenth faster, shortens it most.

Resources are constants of the device profile, the cluster file's NIC and bridge. Nothing is assumed
about which formula uses which: the pool is priced again with the resource changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from pydantic import BaseModel

from planner.cost.context import PoolContext
from planner.specs.cluster import JoinedPool, PoolSpec
from planner.specs.device import Constant, DeviceProfile
from planner.specs.units import gbps_to_bytes_per_s

TENTH = 0.1
"""By how much a resource is made faster."""


@dataclass(frozen=True)
class Resource:
    """Something that may be faster.

    ``faster(ctx, factor)``: the pool where it is, by a factor.
    """

    name: str
    faster: Callable[[PoolContext, float], PoolContext]
    of_job: bool = False
    """Shared by all pools (the bridge): changed in all of them at once."""


def scaled(profile: DeviceProfile, factors: dict[str, float], name: str) -> DeviceProfile:
    """A profile with the constants whose dotted paths match a pattern multiplied.

    Args:
        factors: by ``fnmatch`` pattern.
        name: of the new profile: results are cached by it.
    """

    def changed(node: object, path: str) -> object:
        if isinstance(node, Constant):
            for pattern, factor in factors.items():
                if fnmatch(path, pattern):
                    return node.model_copy(update={"value": node.value * factor})
            return node
        if isinstance(node, dict):
            return {key: changed(value, f"{path}.{key}") for key, value in node.items()}
        if isinstance(node, BaseModel):
            update = {}
            for field in type(node).model_fields:
                before = getattr(node, field)
                after = changed(before, f"{path}.{field}" if path else field)
                if after is not before:
                    update[field] = after
            return node.model_copy(update=update) if update else node
        return node

    result = changed(profile, "")
    assert isinstance(result, DeviceProfile)
    return result.model_copy(update={"name": name})


def _rates(name: str, *patterns: str) -> Resource:
    """Constants that are rates: faster means larger."""

    def faster(ctx: PoolContext, factor: float) -> PoolContext:
        label = f"{ctx.device.name}, {name} x {factor:g}"
        return replace(ctx, device=scaled(ctx.device, dict.fromkeys(patterns, factor), label))

    return Resource(name, faster)


def _times(name: str, *patterns: str) -> Resource:
    """Constants that are times: faster means smaller."""
    rates = _rates(name, *patterns)
    return Resource(name, lambda ctx, factor: rates.faster(ctx, 1 / factor))


def _nic(ctx: PoolContext, factor: float) -> PoolContext:
    """NICs, and the links between joined pools, which they lead to."""
    own = gbps_to_bytes_per_s(1.0)
    default = ctx.device.network.bytes_per_s.value / own

    def faster(pool: PoolSpec) -> PoolSpec:
        update: dict[str, object] = {
            "nic_gbps_per_device": (pool.nic_gbps_per_device or default) * factor
        }

        if isinstance(pool, JoinedPool):
            update["members"] = tuple(faster(member) for member in pool.members)
            update["link_gbps_per_device"] = pool.link_gbps_per_device * factor
        return pool.model_copy(update=update)

    return replace(ctx, pool=faster(ctx.pool))


def _bridge(ctx: PoolContext, factor: float) -> PoolContext:
    if ctx.bridge is None:
        return ctx
    return replace(ctx, bridge=ctx.bridge.model_copy(update={"gbps": ctx.bridge.gbps * factor}))


def _bridge_latency(ctx: PoolContext, factor: float) -> PoolContext:
    if ctx.bridge is None:
        return ctx
    latency_us = ctx.bridge.latency_us / factor
    return replace(ctx, bridge=ctx.bridge.model_copy(update={"latency_us": latency_us}))


HOST = _times("host launches", "framework.*")
RESOURCES = (
    HOST,
    _rates("matrix units", "compute.peak_flops_per_s.*", "compute.vector_flops_per_s"),
    _rates("memory bandwidth", "memory.hbm_bytes_per_s"),
    _rates("clock and caches", "compute.clock_hz", "memory.l2_bytes_per_s"),
    _times(
        "kernel launches",
        "gemm.launch_s", "gemm.fill_s", "triton.launch_s", "triton.fill_s",
        "elementwise.launch_s", "embedding.call_s", "embedding.table_s",
        "embedding.backward_call_s",
    ),
    _rates("scale-up links", "scale_up.bytes_per_s"),
    Resource("NIC", _nic),
    _times("collectives' latency", "scale_up.collectives.*latency_s", "network.latency_s"),
    _rates("host link", "host.link_bytes_per_s"),
    Resource("bridge", _bridge, of_job=True),
    Resource("bridge latency", _bridge_latency, of_job=True),
)  # fmt: skip
