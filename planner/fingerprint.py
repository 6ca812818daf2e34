"""What a plan rests on: fingerprints of its inputs, provenance of its constants."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from pydantic import BaseModel

from planner.cost.context import PoolContext
from planner.cost.dense_shards import FP32_BYTES
from planner.specs.base import sha256
from planner.specs.cluster import ClusterSpec
from planner.specs.device import Constant, DeviceProfile, Provenance
from planner.specs.load import load_device
from planner.specs.model import ModelSpec
from planner.specs.plan import SCHEMA_VERSION

Part = Literal["cluster", "model", "profiles", "code"]

PRICES = {"dollars_per_device_hour", "watts_per_device"}
"""Fields of a pool that no plan depends on: a plan stays valid when they change."""


def hwplan_version() -> str:
    """Version of the installed package; ``0+source`` when run from an uninstalled tree."""
    try:
        return version("hwplan")
    except PackageNotFoundError:
        return "0+source"


def fingerprint_parts(cluster: ClusterSpec, model: ModelSpec) -> dict[Part, str]:
    """SHA-256 of each input; of the profiles only those that the cluster uses."""
    devices = sorted({pool.device for pool in cluster.pools} | {cluster.reference_device})
    return {
        "cluster": sha256(cluster.model_dump(mode="json", exclude={"pools": {"__all__": PRICES}})),
        "model": sha256(model.model_dump(mode="json")),
        "profiles": sha256({name: load_device(name).model_dump(mode="json") for name in devices}),
        "code": sha256({"hwplan": hwplan_version(), "schema": SCHEMA_VERSION}),
    }


def constants_used(ctx: PoolContext) -> Iterator[Constant]:
    """Constants of the device profile that the prediction for this pool rests on."""
    device = ctx.device
    skipped: set[int] = {id(device.watts)}
    if ctx.policy.kernels == "vendor":
        skipped |= {id(constant) for constant in _constants(device.triton)}
    elif device.triton is not None:
        bits = "32" if ctx.policy.compute_precision.bytes == FP32_BYTES else "16"
        for name, loop in device.triton.loops.items():
            if not name.endswith(bits):
                skipped |= {id(constant) for constant in _constants(loop)}
    for dtype, peak in device.compute.peak_flops_per_s.items():
        if dtype != ctx.policy.compute_precision:
            skipped.add(id(peak))
    if ctx.pool.nodes == 1:
        skipped |= {id(constant) for constant in _constants(device.network)}
    if ctx.ranks == 1:
        skipped |= {id(constant) for constant in _constants(device.scale_up)}
    for constant in _constants(device):
        if id(constant) not in skipped:
            yield constant


def _constants(spec: object) -> Iterator[Constant]:
    if isinstance(spec, Constant):
        yield spec
    elif isinstance(spec, BaseModel):
        for name in type(spec).model_fields:
            yield from _constants(getattr(spec, name))
    elif isinstance(spec, dict):
        for value in spec.values():
            yield from _constants(value)


def provenance_counts(contexts: Mapping[str, PoolContext]) -> dict[str, int]:
    """Constants used by their provenance; a device type in two pools counts once."""
    counts = Counter(str(constant.provenance) for constant in _all_used(contexts))
    return {str(kind): counts[str(kind)] for kind in Provenance if counts[str(kind)]}


def error_band(contexts: Mapping[str, PoolContext]) -> float:
    """Root of the mean squared relative errors of the constants used whose error is known."""
    errors = [c.error for c in _all_used(contexts) if c.error is not None]
    return math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else 0.0


def _all_used(contexts: Mapping[str, PoolContext]) -> list[Constant]:
    """Constants used in any pool, each constant of a device profile once."""
    found: dict[int, Constant] = {}
    for ctx in contexts.values():
        for constant in constants_used(ctx):
            found.setdefault(id(constant), constant)
    return list(found.values())


def device_profiles(cluster: ClusterSpec) -> dict[str, DeviceProfile]:
    """Profile of each pool's device."""
    return {pool.name: load_device(pool.device) for pool in cluster.pools}
