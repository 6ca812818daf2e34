"""Elementwise operators: t = t_launch + bytes / (efficiency x HBM bandwidth)."""

from __future__ import annotations

from typing import NamedTuple

from planner.specs.device import DeviceProfile
from planner.specs.kernels import Epilogue, Gemm
from planner.specs.units import Dtype


class Pass(NamedTuple):
    """Elementwise operators over matrices as large as C."""

    matrices: int = 0
    """Read and written, all operators together."""
    operators: int = 0


EPILOGUE_PASSES = {
    Epilogue.NONE: Pass(),
    Epilogue.BIAS: Pass(),
    Epilogue.BIAS_RELU: Pass(matrices=2, operators=1),
    Epilogue.BIAS_SIGMOID: Pass(matrices=2, operators=1),
    Epilogue.CROSS: Pass(matrices=4, operators=1),
}
"""What follows a product of the vendor's library, which can only add a bias. Cross: three operands
read and one result written."""


def activation_bytes_per_element(precision: Dtype) -> int:
    """Bytes of one activation: autocast keeps them in the compute precision, fp8 in 16 bits."""
    return max(precision.bytes, 2)


def elementwise_seconds(device: DeviceProfile, bytes_moved: float, kernels: int = 1) -> float:
    """Seconds of ``kernels`` operators that read and write ``bytes_moved`` bytes together."""
    bandwidth = device.memory.hbm_bytes_per_s.value * device.elementwise.hbm_efficiency.value
    return kernels * device.elementwise.launch_s.value + bytes_moved / bandwidth


def epilogue_seconds(device: DeviceProfile, precision: Dtype, gemm: Gemm) -> float:
    """Seconds of ``gemm``'s epilogue where it runs as operators of its own."""
    matrices, operators = EPILOGUE_PASSES[gemm.epilogue]
    matrix_bytes = gemm.batch * gemm.m * gemm.n * activation_bytes_per_element(precision)
    return elementwise_seconds(device, matrices * matrix_bytes, operators)
