"""One training step of a pool as a graph of operations, issued as the trainer issues them.

The next batch's ids are distributed while this batch computes (``TrainPipelineSparseDist``); the
pooled rows' exchange overlaps the bottom MLP's forward, their gradients' exchange its backward;
dense gradients are reduced while backward goes on. The host launches all of it, so a step is never
shorter than its launches. On CPU workers one core does everything: a single stream.

Fully sharded, a part of the network waits for the gather of its first block (``gather_*``); those
of its other blocks (``gather_*_rest``) overlap its computation. With prefetch depth 1 the look-up
waits for its own batch's ids. With 3 the next batch's missed rows are fetched from the end of the
forward pass on (``PrefetchTrainPipelineSparseDist``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from planner.cost.collectives import Collective, collective_seconds
from planner.cost.context import PoolContext
from planner.cost.dense import Block, dense_network, operators, parameters
from planner.cost.dense_shards import (
    FP32_BYTES,
    gather_seconds,
    pass_seconds,
    scatter_seconds,
    sharding_operators,
)
from planner.cost.dense_time import (
    LOSS_KERNELS,
    OPTIMIZER_KERNELS,
    backward_seconds,
    cast_seconds,
    forward_seconds,
    loss_seconds,
    optimizer_seconds,
)
from planner.cost.elementwise import elementwise_seconds
from planner.cost.exchange import bridge_seconds, embedding_exchange_seconds
from planner.cost.memory import FETCHED_AHEAD
from planner.cost.step import Operation, StepGraph
from planner.specs.model import ModelSpec

EMBEDDING_OPERATORS = 24
"""Operators of id and pooled-row exchanges, look-up and fused update, whatever the tables."""


ONE_BUCKET_BYTES = 1 << 20
"""DDP's first bucket: dense gradients that fit into it leave together, when backward ends."""


@lru_cache(maxsize=64)
def bucket_bytes(model: ModelSpec) -> tuple[int, int]:
    """fp32 gradients that are ready after the top's backward, and after the bottom's."""
    network = dense_network(model)
    top, bottom = (FP32_BYTES * parameters(part) for part in (network.top, network.bottom))
    if network.bottom and top + bottom <= ONE_BUCKET_BYTES:
        return 0, top + bottom
    return top, bottom


@lru_cache(maxsize=64)
def host_operators(model: ModelSpec) -> int:
    """Operators that the host launches in one step of a data-parallel network."""
    optimizer = OPTIMIZER_KERNELS[model.optimizer.dense.name]
    blocks = dense_network(model).blocks
    return operators(blocks) + LOSS_KERNELS + optimizer + EMBEDDING_OPERATORS


def host_seconds(ctx: PoolContext) -> float:
    """Framework time of one step on the host: fixed, per operator, and on CPU workers per id of
    the batch that is read or made, and for sharding where a pool has several ranks."""
    framework = ctx.device.framework
    launched = host_operators(ctx.model) + sharding_operators(ctx)
    seconds = framework.step_s.value + launched * framework.op_s.value
    if framework.id_s is not None:
        ids = ctx.local_batch * sum(table.pooling for table in ctx.model.all_tables)
        seconds += ids * framework.id_s.value
    if framework.sharded_s is not None and ctx.sharding_group.ranks > 1:
        seconds += framework.sharded_s.value
    return seconds / ctx.compute_share


def sharding_copy_seconds(ctx: PoolContext) -> tuple[float, float]:
    """Copies of the pooled rows around their exchange, forward and backward, where the core that
    computes makes them: a CPU pool with several ranks to a copy of the tables.

    Forward: the peers' columns joined, then put in the model's order (a read and a write each).
    Backward: put back in order, cut by peer and joined for sending, divided by the ranks.
    """
    if not ctx.device.is_cpu or ctx.sharding_group.ranks == 1:
        return 0.0, 0.0
    pooled = FP32_BYTES * ctx.local_batch * ctx.model.pooled_width
    forward_s, backward_s = (
        elementwise_seconds(ctx.device, 2 * copies * pooled, copies) / ctx.compute_share
        for copies in (2, 4)
    )
    return forward_s, backward_s


def pool_step_graph(ctx: PoolContext) -> StepGraph:
    """Operations of one step of ``ctx``'s pool.

    ``ctx.model.global_batch`` sizes the embedding exchange between pools.

    Raises:
        UsageError: the device cannot compute in the policy's precision.
    """
    network = dense_network(ctx.model)
    embedding, share = ctx.device.embedding, ctx.compute_share
    top_reduce_s, bottom_reduce_s = gradient_seconds(ctx)
    ids_first = ("input_exchange",) if ctx.policy.prefetch_depth == 1 else ()
    to_model_s, from_model_s = sharding_copy_seconds(ctx)
    exchange_latency_s = collective_seconds(ctx.sharding_group, "all_to_all", 0.0)
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
            after=ids_first,
            seconds=embedding.call_s.value / share,
            loads=("lookup_forward_s",),
        ),
        Operation(
            "output_exchange",
            "communication",
            after=("embedding_forward",),
            seconds=exchange_latency_s + to_model_s,
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
            seconds=exchange_latency_s + from_model_s,
            loads=("gradient_send_s", "gradient_receive_s"),
        ),
        Operation(
            "dense_all_reduce_top",
            "communication",
            after=("top_backward",),
            seconds=top_reduce_s,
        ),
        Operation("bottom_backward", "compute", seconds=backward_seconds(ctx, network.bottom)),
        Operation(
            "dense_all_reduce_bottom",
            "communication",
            after=("bottom_backward",),
            seconds=bottom_reduce_s,
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
        *_exchange_operations(ctx),
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
    if ctx.policy.dense_parallelism == "fully_sharded":
        operations = _with_gathers(ctx, operations)
    if ctx.policy.prefetch_depth == FETCHED_AHEAD:
        fetch = Operation(
            "cache_prefetch",
            "copy",
            after=("input_exchange", "top_forward"),
            loads=("cache_fetch_s",),
        )
        operations.append(fetch)
    if ctx.device.is_cpu:
        operations = [_on_one_core(operation) for operation in operations]
    return StepGraph(tuple(operations))


def gradient_seconds(ctx: PoolContext) -> tuple[float, float]:
    """Dense gradients of the top and of the bottom, summed over the pool; where parameters are cut,
    each rank gets its part of the sum."""
    network = dense_network(ctx.model)
    if ctx.policy.dense_parallelism == "fully_sharded":
        return scatter_seconds(ctx, network.top), scatter_seconds(ctx, network.bottom)
    reduction: Collective = "pool_sum" if ctx.pools_in_job > 1 else "all_reduce"
    top_bytes, bottom_bytes = bucket_bytes(ctx.model)
    return (
        collective_seconds(ctx, reduction, top_bytes) if top_bytes else 0.0,
        collective_seconds(ctx, reduction, bottom_bytes) if bottom_bytes else 0.0,
    )


Compute = Callable[[PoolContext, Sequence[Block]], float]


def _with_gathers(ctx: PoolContext, operations: list[Operation]) -> list[Operation]:
    """A step in which every block of the network is gathered before each of its passes.

    Forward gathers are issued first; those of the backward pass begin when the forward pass is over
    and its blocks have been released.
    """
    network = dense_network(ctx.model)
    passes: dict[str, tuple[tuple[Block, ...], Compute]] = {
        "bottom_forward": (network.bottom, forward_seconds),
        "top_forward": (network.top, forward_seconds),
        "top_backward": (network.top[::-1], backward_seconds),
        "bottom_backward": (network.bottom[::-1], backward_seconds),
    }
    gathers: dict[str, list[Operation]] = {}
    seconds: dict[str, float] = {}
    for name, (blocks, compute) in passes.items():
        units = _gathered_together(blocks)
        gathers_s = [sum(gather_seconds(ctx, block) for block in unit) for unit in units]
        released = () if name.endswith("forward") else ("loss",)
        gathers[name] = [
            Operation(f"gather_{name}", "communication", released, sum(gathers_s[:1])),
            Operation(f"gather_{name}_rest", "communication", (), sum(gathers_s[1:])),
        ]
        seconds[name] = pass_seconds(gathers_s, [compute(ctx, unit) for unit in units])
    result = [*gathers["bottom_forward"], *gathers["top_forward"]]
    for one in operations:
        if one.name == "top_backward":
            result += [*gathers["top_backward"], *gathers["bottom_backward"]]
        if one.name in passes:
            after = (*one.after, f"gather_{one.name}")
            one = replace(one, after=after, seconds=seconds[one.name])
        result.append(one)
    return result


def _gathered_together(blocks: Sequence[Block]) -> list[list[Block]]:
    """A block with parameters, and those without any that run between it and the next; the first
    ones with the first."""
    units: list[list[Block]] = []
    without: list[Block] = []
    for block in blocks:
        if not block.linears:
            (units[-1] if units else without).append(block)
        else:
            units.append([*without, block])
            without = []
    return units


def _exchange_operations(ctx: PoolContext) -> tuple[Operation, ...]:
    """Exchange between pools: dense gradients as they become ready, embeddings at the end. Replica
    groups of a single pool combine their tables over its own collectives."""
    if ctx.pools_in_job == 1:
        copies = Operation(
            "replica_exchange",
            "communication",
            after=("embedding_backward",),
            seconds=embedding_exchange_seconds(ctx),
        )
        return (copies,) if ctx.copies_tables else ()
    top_bytes, bottom_bytes = bucket_bytes(ctx.model)
    return (
        Operation(
            "bridge:dense_top",
            "bridge",
            after=("dense_all_reduce_top",),
            seconds=bridge_seconds(ctx, top_bytes),
        ),
        Operation(
            "bridge:dense",
            "bridge",
            after=("dense_all_reduce_bottom",),
            seconds=bridge_seconds(ctx, bottom_bytes),
        ),
        Operation(
            "bridge:embedding",
            "bridge",
            after=("embedding_backward",),
            seconds=embedding_exchange_seconds(ctx),
        ),
    )


def _on_one_core(operation: Operation) -> Operation:
    """A CPU worker's core runs everything in turn; it serves the bridge once backward is done."""
    if operation.stream == "bridge":
        return replace(operation, after=("embedding_backward", *operation.after))
    return replace(operation, stream="compute")
