"""What a cluster or a plan takes: devices, dollars per hour, watts."""

from __future__ import annotations

from enum import StrEnum

from planner.specs.cluster import PoolSpec
from planner.specs.errors import UsageError
from planner.specs.load import load_device
from planner.specs.plan import Plan


class Objective(StrEnum):
    """What should be small."""

    DEVICES = "devices"
    DOLLARS = "dollars"
    WATTS = "watts"


def as_objective(name: str) -> Objective:
    """The objective of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in set(Objective):
        raise UsageError(
            "unknown objective",
            field="--objective",
            value=name,
            fix=f"use one of {', '.join(Objective)}",
        )
    return Objective(name)


def watts_per_device(pool: PoolSpec) -> float:
    """Power of one device: the cluster file's, else the device profile's."""
    if pool.watts_per_device is not None:
        return pool.watts_per_device
    return load_device(pool.device).watts.value


def plan_devices(plan: Plan) -> int:
    """Devices at work."""
    return plan.world_size


def plan_watts(plan: Plan) -> float:
    """Watts of the devices at work."""
    return sum(part.devices * watts_per_device(part) for part in plan.parts)


def plan_dollars_per_hour(plan: Plan) -> float | None:
    """Dollars per hour of the devices at work; None if one of them has no price."""
    total = 0.0
    for part in plan.parts:
        if part.dollars_per_device_hour is None:
            return None
        total += part.devices * part.dollars_per_device_hour
    return total


def node_cost(pool: PoolSpec, objective: Objective) -> float:
    """What one more node of a pool takes.

    Raises:
        UsageError: dollars, and the cluster file has no price.
    """
    if objective is Objective.DEVICES:
        return float(pool.devices_per_node)
    if objective is Objective.WATTS:
        return pool.devices_per_node * watts_per_device(pool)
    if pool.dollars_per_device_hour is None:
        raise UsageError(
            f"pool {pool.name} has no price",
            field="dollars_per_device_hour",
            fix=f"add dollars_per_device_hour to pool {pool.name} in the cluster file, or use "
            "--objective devices or watts",
        )
    return pool.devices_per_node * pool.dollars_per_device_hour
