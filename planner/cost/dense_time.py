"""Time and activation memory of the dense network on one rank, under its memory policy.

Products by the GEMM model, everything else by bytes moved. ``full`` recompute runs the MLPs'
forward again in the backward pass and keeps only their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.context import PoolContext
from planner.cost.dense import Block, dense_network, parameters
from planner.cost.elementwise import elementwise_seconds
from planner.cost.gemm import Shape, gemms_seconds
from planner.specs.units import Dtype

FP32_BYTES = 4


def activation_bytes_per_element(precision: Dtype) -> int:
    """Bytes of one activation: autocast keeps them in the compute precision, fp8 in 16 bits."""
    return max(precision.bytes, 2)


def forward_seconds(ctx: PoolContext, blocks: Sequence[Block]) -> float:
    """Forward pass of ``blocks`` on one rank."""
    return _seconds(
        ctx,
        [product.forward(ctx.local_batch) for block in blocks for product in block.products],
        sum(block.forward_floats for block in blocks),
        sum(block.forward_kernels for block in blocks),
    )


def backward_seconds(ctx: PoolContext, blocks: Sequence[Block]) -> float:
    """Backward pass of ``blocks`` on one rank, recomputation included."""
    seconds = _seconds(
        ctx,
        [
            shape
            for block in blocks
            for product in block.products
            for shape in product.backward(ctx.local_batch)
        ],
        sum(block.backward_floats for block in blocks),
        sum(block.backward_kernels for block in blocks),
    )
    if ctx.policy.recompute == "full":
        seconds += forward_seconds(ctx, [block for block in blocks if block.recomputable])
    return seconds


def _seconds(ctx: PoolContext, shapes: list[Shape], floats: float, kernels: int) -> float:
    precision = ctx.policy.compute_precision
    moved = floats * ctx.local_batch * activation_bytes_per_element(precision)
    total = sum(gemms_seconds(ctx.device, shapes, precision))
    total += elementwise_seconds(ctx.device, moved, kernels)
    return total / ctx.compute_share


def saved_activation_bytes(ctx: PoolContext) -> int:
    """Activations that live from forward to backward, under the recompute policy.

    ``full`` keeps each MLP's input, and while one MLP is recomputed its own activations too.
    """
    network = dense_network(ctx.model)
    per_element = activation_bytes_per_element(ctx.policy.compute_precision)
    if ctx.policy.recompute == "none":
        floats = sum(block.saved_floats for block in network.blocks)
        return int(floats * ctx.local_batch * per_element)
    recomputed = [block for block in network.blocks if block.recomputable]
    kept = sum(block.saved_floats for block in network.blocks if not block.recomputable)
    kept += sum(block.linears[0].inputs for block in recomputed)
    kept += max((block.saved_floats for block in recomputed), default=0.0)
    return int(kept * ctx.local_batch * per_element)


OPTIMIZER_PASSES = {"sgd": 3, "adagrad": 11, "adam": 18}
"""Reads and writes of an array of the parameters' size in one step, one multi-tensor operator at a
time. SGD: w -= g. Adagrad: s += g g; sqrt; + eps; w -= g / it. Adam: m, v likewise, and both bias
corrections."""
OPTIMIZER_KERNELS = {"sgd": 1, "adagrad": 4, "adam": 7}


def optimizer_seconds(ctx: PoolContext) -> float:
    """Dense optimizer over fp32 weights, gradients and state."""
    name = ctx.model.optimizer.dense.name
    count = parameters(dense_network(ctx.model).blocks)
    moved = count * FP32_BYTES * OPTIMIZER_PASSES[name]
    seconds = elementwise_seconds(ctx.device, moved, OPTIMIZER_KERNELS[name])
    return seconds / ctx.compute_share


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
