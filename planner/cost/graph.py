"""One training step of a pool as a graph of operations, issued as the trainer issues them.

The next batch's ids are distributed while this batch computes (``TrainPipelineSparseDist``); the
pooled rows' exchange overlaps the bottom MLP's forward, their gradients' exchange its backward;
dense gradients are reduced while backward goes on. The host launches all of it, so a step is never
shorter than its launches. On CPU workers one core does everything: a single stream.
"""

from __future__ import annotations

from dataclasses import replace

from planner.cost.collectives import collective_seconds
from planner.cost.context import PoolContext
from planner.cost.dense import dense_network, operators, parameters
from planner.cost.dense_time import (
    FP32_BYTES,
    LOSS_KERNELS,
    OPTIMIZER_KERNELS,
    backward_seconds,
    cast_seconds,
    forward_seconds,
    loss_seconds,
    optimizer_seconds,
)
from planner.cost.exchange import block_bridge_seconds, embedding_bridge_seconds
from planner.cost.step import Operation, StepGraph

EMBEDDING_OPERATORS = 24
"""Operators of id and pooled-row exchanges, look-up and fused update, whatever the tables."""


def host_seconds(ctx: PoolContext) -> float:
    """Framework time of one step on the host."""
    framework = ctx.device.framework
    blocks = dense_network(ctx.model).blocks
    optimizer = OPTIMIZER_KERNELS[ctx.model.optimizer.dense.name]
    count = operators(blocks) + LOSS_KERNELS + optimizer + EMBEDDING_OPERATORS
    return (framework.step_s.value + count * framework.op_s.value) / ctx.compute_share


def pool_step_graph(ctx: PoolContext) -> StepGraph:
    """Operations of one step of ``ctx``'s pool.

    ``ctx.model.global_batch`` sizes the embedding exchange between pools.

    Raises:
        UsageError: the device cannot compute in the policy's precision.
    """
    network = dense_network(ctx.model)
    embedding, share = ctx.device.embedding, ctx.compute_share
    exchange_latency_s = collective_seconds(ctx, "all_to_all", 0.0)
    operations = [
        Operation("host", "host", seconds=host_seconds(ctx)),
        Operation(
            "input_exchange",
            "communication",
            # Lengths first, then ids.
            seconds=2 * exchange_latency_s,
            loads=("input_send_s", "input_receive_s"),
        ),
        Operation(
            "embedding_forward",
            "compute",
            seconds=embedding.call_s.value / share,
            loads=("lookup_forward_s",),
        ),
        Operation(
            "output_exchange",
            "communication",
            after=("embedding_forward",),
            seconds=exchange_latency_s,
            loads=("output_send_s", "output_receive_s"),
        ),
        Operation("bottom_forward", "compute", seconds=forward_seconds(ctx, network.bottom)),
        Operation(
            "top_forward",
            "compute",
            after=("output_exchange", "bottom_forward"),
            seconds=forward_seconds(ctx, network.top),
        ),
        Operation("precision_casts", "compute", seconds=cast_seconds(ctx)),
        Operation("loss", "compute", seconds=loss_seconds(ctx)),
        Operation("top_backward", "compute", seconds=backward_seconds(ctx, network.top)),
        Operation(
            "gradient_exchange",
            "communication",
            after=("top_backward",),
            seconds=exchange_latency_s,
            loads=("gradient_send_s", "gradient_receive_s"),
        ),
        Operation(
            "dense_all_reduce_top",
            "communication",
            after=("top_backward",),
            seconds=collective_seconds(ctx, "all_reduce", FP32_BYTES * parameters(network.top)),
        ),
        Operation("bottom_backward", "compute", seconds=backward_seconds(ctx, network.bottom)),
        Operation(
            "dense_all_reduce_bottom",
            "communication",
            after=("bottom_backward",),
            seconds=collective_seconds(ctx, "all_reduce", FP32_BYTES * parameters(network.bottom))
            if network.bottom
            else 0.0,
        ),
        Operation(
            "embedding_backward",
            "compute",
            after=("gradient_exchange",),
            seconds=embedding.backward_call_s.value / share,
            loads=("lookup_backward_s",),
        ),
        Operation(
            "table_all_reduce",
            "communication",
            after=("embedding_backward",),
            seconds=0.0,
            loads=("table_all_reduce_s",),
        ),
        *_bridge_operations(ctx),
        Operation(
            "dense_optimizer",
            "compute",
            after=(
                "dense_all_reduce_bottom",
                "table_all_reduce",
                *(("bridge:dense",) if ctx.pools_in_job > 1 else ()),
            ),
            seconds=optimizer_seconds(ctx),
        ),
    ]
    if ctx.device.is_cpu:
        operations = [_on_one_core(operation) for operation in operations]
    return StepGraph(tuple(operations))


def _bridge_operations(ctx: PoolContext) -> tuple[Operation, ...]:
    """Exchange between pools: dense gradients as they become ready, embeddings at the end."""
    if ctx.pools_in_job == 1:
        return ()
    network = dense_network(ctx.model)
    return (
        Operation(
            "bridge:dense_top",
            "bridge",
            after=("dense_all_reduce_top",),
            seconds=block_bridge_seconds(ctx, network.top),
        ),
        Operation(
            "bridge:dense",
            "bridge",
            after=("dense_all_reduce_bottom",),
            seconds=block_bridge_seconds(ctx, network.bottom),
        ),
        Operation(
            "bridge:embedding",
            "bridge",
            after=("embedding_backward",),
            seconds=embedding_bridge_seconds(ctx),
        ),
    )


def _on_one_core(operation: Operation) -> Operation:
    """A CPU worker's core runs everything in turn; it serves the bridge once backward is done."""
    if operation.stream == "bridge":
        return replace(operation, after=("embedding_backward", *operation.after))
    return replace(operation, stream="compute")
