"""The dense network's parameters, gradients and optimizer state among the ranks of a pool.

``data_parallel``: all of them on every rank. R ranks, n parameters (arrays):

* ``sharded_optimizer`` (torch's ZeroRedundancyOptimizer): arrays are dealt whole, the largest
  first, to the rank with the fewest elements so far; a rank holds the state of its own and updates
  them, and then every array is broadcast. As many bytes reach a rank as in an all-gather, in n
  collectives::

      t = update of the largest part + n * latency + (R-1)/R * bytes / bandwidth

* ``fully_sharded`` (torch's ``fully_shard`` on each block, parameters released after the forward
  pass): every array is cut along its first dimension, padded to a multiple of R. A block is
  gathered before its forward and again before its backward pass; gradients are reduce-scattered.
  The gather of a block starts when the block before it starts to compute, so a pass with gathers
  g_k and computations c_k lasts, from the end of its first gather on::

      t = max(c_1, g_2) + .. + max(c_(n-1), g_n) + c_n
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from planner.cost.collectives import collective_seconds, fabric
from planner.cost.context import PoolContext
from planner.cost.dense import Block, DenseNetwork, Linear, dense_network, parameters

FP32_BYTES = 4
GATHERED_COPIES = 2
"""Blocks that are whole at a time, by the largest: one in use, and the buffer of the next; likewise
gradients: a block's own, and the buffer that they are scattered from (both in the source of
``torch.distributed.fsdp``)."""
GATHER_OPERATORS = 3
"""Of one gather: copy in, all-gather, copy out (there too)."""
SCATTER_OPERATORS = 3
"""Of one reduce-scatter: chunks joined, reduce-scatter, division."""


def arrays(linear: Linear) -> tuple[tuple[int, int], ...]:
    """(rows, elements) of a layer's weight and of its bias."""
    weight = (linear.outputs, linear.weights)
    bias = linear.parameters - linear.weights
    return (weight, (linear.outputs, bias)) if bias else (weight,)


def _arrays(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    return [item for block in blocks for linear in block.linears for item in arrays(linear)]


@lru_cache(maxsize=256)
def largest_part(network: DenseNetwork, ranks: int) -> int:
    """Elements of the rank with the most where whole arrays are dealt."""
    parts = [0] * ranks
    for elements in sorted((elements for _, elements in _arrays(network.blocks)), reverse=True):
        parts[parts.index(min(parts))] += elements
    return max(parts)


def cut_elements(blocks: Sequence[Block], ranks: int) -> int:
    """Elements of a rank where every array is cut along its first dimension, padding included."""
    return sum(math.ceil(rows / ranks) * (size // rows) for rows, size in _arrays(blocks))


def held_elements(ctx: PoolContext) -> int:
    """Parameters that a rank keeps throughout a step, and gradients."""
    blocks = dense_network(ctx.model).blocks
    if ctx.policy.dense_parallelism == "fully_sharded":
        return cut_elements(blocks, ctx.ranks)
    return parameters(blocks)


def updated_elements(ctx: PoolContext) -> int:
    """Parameters that the busiest rank updates and keeps the optimizer state of."""
    if ctx.policy.dense_parallelism == "sharded_optimizer":
        return largest_part(dense_network(ctx.model), ctx.ranks)
    return held_elements(ctx)


def gathered_bytes(ctx: PoolContext) -> int:
    """Whole blocks, and their whole gradients, beside what the rank keeps."""
    if ctx.policy.dense_parallelism != "fully_sharded":
        return 0
    blocks = dense_network(ctx.model).blocks
    largest = max((parameters([block]) for block in blocks), default=0)
    return 2 * GATHERED_COPIES * FP32_BYTES * largest


def broadcast_seconds(ctx: PoolContext) -> float:
    """The updated parameters, from each rank to all others; nothing unless they are dealt."""
    if ctx.policy.dense_parallelism != "sharded_optimizer" or ctx.ranks == 1:
        return 0.0
    blocks = dense_network(ctx.model).blocks
    paths = fabric(ctx, "all_gather")
    whole_bytes = FP32_BYTES * parameters(blocks)
    return len(_arrays(blocks)) * paths.fixed_s + paths.scatter_seconds(whole_bytes)


def _whole_bytes(ctx: PoolContext, block: Block) -> int:
    return FP32_BYTES * ctx.ranks * cut_elements([block], ctx.ranks)


def gather_seconds(ctx: PoolContext, block: Block) -> float:
    """All-gather of one block's parameters."""
    whole_bytes = _whole_bytes(ctx, block)
    return collective_seconds(ctx, "all_gather", whole_bytes) if whole_bytes else 0.0


def scatter_seconds(ctx: PoolContext, blocks: Sequence[Block]) -> float:
    """Reduce-scatters of the gradients of ``blocks``."""
    sizes = [_whole_bytes(ctx, block) for block in blocks]
    return sum(collective_seconds(ctx, "reduce_scatter", size) for size in sizes if size)


def pass_seconds(gathers_s: Sequence[float], compute_s: Sequence[float]) -> float:
    """A pass over blocks, from the end of the first gather on."""
    gathered_meanwhile_s = (*gathers_s[1:], 0.0)
    return sum(map(max, compute_s, gathered_meanwhile_s))


def sharding_operators(ctx: PoolContext) -> int:
    """Operators that the host launches for it in one step."""
    blocks = dense_network(ctx.model).blocks
    if ctx.policy.dense_parallelism == "sharded_optimizer":
        return len(_arrays(blocks))
    if ctx.policy.dense_parallelism == "fully_sharded":
        gathered = sum(bool(block.linears) for block in blocks)
        return gathered * (2 * GATHER_OPERATORS + SCATTER_OPERATORS)
    return 0
