"""Time and activation memory of the dense network on one rank, under its memory policy.

Products with their epilogues by the kernels that the policy allows, everything else by bytes moved.
A recomputed block runs forward again in the backward pass, and only its inputs are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from planner.cost.context import PoolContext
from planner.cost.dense import Block, DenseNetwork, dense_network, parameters, step_gemms
from planner.cost.dense_shards import FP32_BYTES, broadcast_seconds, updated_elements
from planner.cost.elementwise import (
    activation_bytes_per_element,
    elementwise_seconds,
    epilogue_seconds,
)
from planner.cost.gemm import gemms_seconds
from planner.kernels.select import LARGEST_SIZE, planned_seconds
from planner.specs.device import DeviceProfile
from planner.specs.kernels import Gemm
from planner.specs.plan import KernelPolicy
from planner.specs.units import Dtype


@lru_cache(maxsize=1024)
def product_seconds(
    device: DeviceProfile,
    precision: Dtype,
    kernels: KernelPolicy,
    network: DenseNetwork,
    batch: int,
) -> Mapping[Gemm, float]:
    """Seconds of every distinct product of ``network`` and its epilogue, priced together.

    Raises:
        UsageError: the device cannot compute in ``precision``.
    """
    gemms = tuple(step_gemms(network.blocks, batch))
    # Beyond the range of our kernels' sizes no batch fits a device; the search still asks.
    in_range = all(max(gemm.m, gemm.n, gemm.k) <= LARGEST_SIZE for gemm in gemms)
    if kernels == "preselected" and in_range:
        seconds = planned_seconds(device, precision, gemms).tolist()
    else:
        alone = gemms_seconds(device, gemms, precision)
        seconds = [
            product_s + epilogue_seconds(device, precision, gemm)
            for gemm, product_s in zip(gemms, alone, strict=True)
        ]
    return dict(zip(gemms, seconds, strict=True))


@lru_cache(maxsize=1024)
def _block_seconds(
    device: DeviceProfile,
    precision: Dtype,
    kernels: KernelPolicy,
    network: DenseNetwork,
    batch: int,
) -> Mapping[int, tuple[float, float]]:
    """Forward and backward pass of each block of ``network``, by ``id``, on a device of its own."""
    each = product_seconds(device, precision, kernels, network, batch)
    float_bytes = batch * activation_bytes_per_element(precision)

    def seconds(gemms: Sequence[Gemm], floats: float, operators: int) -> float:
        products_s = sum(each[gemm] for gemm in gemms)
        return products_s + elementwise_seconds(device, floats * float_bytes, operators)

    return {
        id(block): (
            seconds(block.forward(batch), block.forward_floats, block.forward_kernels),
            seconds(block.backward(batch), block.backward_floats, block.backward_kernels),
        )
        for block in network.blocks
    }


def forward_seconds(ctx: PoolContext, blocks: Sequence[Block]) -> float:
    """Forward pass of ``blocks``, which are of the model's network, on one rank."""
    each = _all_block_seconds(ctx)
    return sum(each[id(block)][0] for block in blocks) / ctx.compute_share


def backward_seconds(ctx: PoolContext, blocks: Sequence[Block]) -> float:
    """Backward pass of ``blocks`` on one rank, recomputation included."""
    each = _all_block_seconds(ctx)
    seconds = sum(each[id(block)][1] for block in blocks) / ctx.compute_share
    return seconds + forward_seconds(ctx, [b for b in blocks if b.name in ctx.policy.recompute])


def _all_block_seconds(ctx: PoolContext) -> Mapping[int, tuple[float, float]]:
    policy, network = ctx.policy, dense_network(ctx.model)
    return _block_seconds(
        ctx.device, policy.compute_precision, policy.kernels, network, ctx.local_batch
    )


def saved_activation_bytes(ctx: PoolContext) -> int:
    """Activations that live from forward to backward at most, under the recompute policy.

    A recomputed block keeps its inputs, and its own activations only while it is recomputed: then
    those of the blocks after it are gone. The most is held at one of the blocks' backward passes.
    """
    most = kept = 0.0
    for block in dense_network(ctx.model).blocks:
        most = max(most, kept + block.saved_floats)
        recomputed = block.name in ctx.policy.recompute
        kept += block.inputs_floats if recomputed else block.saved_floats
    per_element = activation_bytes_per_element(ctx.policy.compute_precision)
    return int(most * ctx.local_batch * per_element)


OPTIMIZER_PASSES = {"sgd": 3, "adagrad": 11, "adam": 18}
"""Reads and writes of an array of the parameters' size in one step, one multi-tensor operator at a
time. SGD: w -= g. Adagrad: s += g g; sqrt; + eps; w -= g / it. Adam: m, v likewise, and both bias
corrections."""
OPTIMIZER_KERNELS = {"sgd": 1, "adagrad": 4, "adam": 7}


def optimizer_seconds(ctx: PoolContext) -> float:
    """Dense optimizer over the fp32 weights, gradients and state of the busiest rank, and what has
    to reach the other ranks afterwards."""
    name = ctx.model.optimizer.dense.name
    moved = updated_elements(ctx) * FP32_BYTES * OPTIMIZER_PASSES[name]
    seconds = elementwise_seconds(ctx.device, moved, OPTIMIZER_KERNELS[name])
    return seconds / ctx.compute_share + broadcast_seconds(ctx)


LOSS_KERNELS = 8
"""Sigmoid cross entropy forward and backward, metrics' running sums."""
LOSS_FLOATS = 12


def loss_seconds(ctx: PoolContext) -> float:
    """Loss and its gradient: a few passes over one float per sample."""
    moved = LOSS_FLOATS * FP32_BYTES * ctx.local_batch
    return elementwise_seconds(ctx.device, moved, LOSS_KERNELS) / ctx.compute_share


def cast_seconds(ctx: PoolContext) -> float:
    """Autocast: weights to the compute precision (once a step), gradients back to fp32.

    Nothing in fp32 and tf32.
    """
    precision = ctx.policy.compute_precision
    if precision in (Dtype.FP32, Dtype.TF32):
        return 0.0
    network = dense_network(ctx.model)
    linears = sum(len(block.linears) for block in network.blocks)
    width = activation_bytes_per_element(precision) + FP32_BYTES
    moved = 2 * width * (parameters(network.blocks) + ctx.local_batch * network.pooled_width)
    return elementwise_seconds(ctx.device, moved, 2 * linears + 2) / ctx.compute_share
