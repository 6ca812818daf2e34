"""The device as the model of the Triton kernels sees it (``planner.cost.triton_gemm``)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.kernels.resources import Architecture, architecture
from planner.specs.device import DeviceProfile
from planner.specs.errors import UsageError
from planner.specs.kernels import Layout
from planner.specs.units import Dtype

Array = NDArray[np.float64]

SHARED_BYTES_PER_CLOCK = 128
LAYOUT_ROW = {Layout.NT: 0, Layout.NN: 1, Layout.TN: 2}


class Loop(NamedTuple):
    """Constants of the main loop of one layout."""

    shared_bytes_per_s: Array
    """Of one unit."""
    step_s: Array
    latency_s: Array
    latency_s_per_byte: Array


class TritonMachine(NamedTuple):
    """What the formula needs of a device for one dtype; efficiencies are applied already."""

    arch: Architecture
    loops: NDArray[np.float64]
    """Rows nt, nn, tn; columns as ``Loop``."""
    units: float
    lds_bytes: float
    cache_bytes: float
    element_bytes: int
    flops_per_s: float
    """Of one unit, operands from shared memory."""
    register_flops_per_s: float
    """Of one unit, operands from registers."""
    unit_l2_bytes_per_s: float
    l2_bytes_per_s: float
    hbm_bytes_per_s: float
    store_bytes_per_s: float
    unit_store_bytes_per_s: float
    unit_reduce_bytes_per_s: float
    launch_s: float
    fill_s: float
    finish_s: float
    hbm_latency_s: float
    reduce_s: float
    issue_s: float
    """Of one warp's load instruction; the next three likewise."""
    copy_s: float
    transpose_s: float
    scalar_s: float
    register_load_s: float


def triton_machine(device: DeviceProfile, dtype: Dtype) -> TritonMachine:
    """The device as the model of the Triton kernels sees it.

    Raises:
        UsageError: no Triton kernels on it (a CPU, no section ``triton``, unknown architecture), or
            it cannot multiply in ``dtype``.
    """
    constants = device.triton
    if constants is None:
        raise UsageError(
            f"{device.name} has no Triton kernels",
            field="triton",
            fix="add a section triton to the device profile, or use the vendor library",
        )
    peak = device.compute.peak_flops_per_s.get(dtype)
    if peak is None:
        raise UsageError(
            f"{device.name} cannot multiply matrices in this precision",
            field="compute_precision",
            value=str(dtype),
            fix=f"use one of {', '.join(device.compute.peak_flops_per_s)}",
        )
    arch = architecture(device)
    unit_flops_per_s = peak.value / device.compute.units.value
    clock_hz = device.compute.clock_hz.value
    hbm = device.memory.hbm_bytes_per_s.value
    register_efficiency = constants.register_efficiency
    if dtype is Dtype.FP32:
        # No matrix instruction: multiply-adds of the vector units, which read registers.
        arch = arch._replace(reads_shared=False)
        register_efficiency = constants.vector_efficiency
    bits = 32 if dtype.bytes == 4 else 16
    loops = [constants.loops[f"{layout}_{bits}"] for layout in LAYOUT_ROW]  # type: ignore[index]
    shared = SHARED_BYTES_PER_CLOCK * clock_hz
    return TritonMachine(
        arch=arch,
        loops=np.array(
            [
                (
                    shared * loop.shared_efficiency.value,
                    loop.step_s.value,
                    loop.latency_s.value,
                    loop.latency_s_per_byte.value,
                )
                for loop in loops
            ]
        ),
        units=device.compute.units.value,
        lds_bytes=device.compute.lds_bytes.value,
        cache_bytes=device.memory.last_level_cache_bytes.value,
        element_bytes=dtype.bytes,
        flops_per_s=unit_flops_per_s * constants.matrix_efficiency.value,
        register_flops_per_s=unit_flops_per_s * register_efficiency.value,
        unit_l2_bytes_per_s=clock_hz * constants.unit_l2_bytes_per_clock.value,
        # No slower than the memory behind it: the time must not fall as operands outgrow it.
        l2_bytes_per_s=hbm * max(constants.l2_over_hbm.value, constants.hbm_efficiency.value),
        hbm_bytes_per_s=hbm * constants.hbm_efficiency.value,
        store_bytes_per_s=hbm * constants.store_over_hbm.value,
        unit_store_bytes_per_s=clock_hz * constants.unit_store_bytes_per_clock.value,
        unit_reduce_bytes_per_s=clock_hz * constants.unit_reduce_bytes_per_clock.value,
        launch_s=constants.launch_s.value,
        fill_s=constants.fill_s.value,
        finish_s=constants.finish_s.value,
        hbm_latency_s=constants.hbm_latency_s.value,
        reduce_s=constants.reduce_s.value,
        issue_s=constants.issue_s.value,
        copy_s=constants.copy_s.value,
        transpose_s=constants.transpose_s.value,
        scalar_s=constants.scalar_s.value,
        register_load_s=constants.register_load_s.value,
    )
