"""Elementwise operators: t = t_launch + bytes / (efficiency x HBM bandwidth)."""

from __future__ import annotations

from planner.specs.device import DeviceProfile


def elementwise_seconds(device: DeviceProfile, bytes_moved: float, kernels: int = 1) -> float:
    """Seconds of ``kernels`` operators that read and write ``bytes_moved`` bytes together."""
    bandwidth = device.memory.hbm_bytes_per_s.value * device.elementwise.hbm_efficiency.value
    return kernels * device.elementwise.launch_s.value + bytes_moved / bandwidth
