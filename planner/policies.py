"""The memory policies that one pool may work under.

Compute precision, dense parallelism and prefetch depth make a *kind* of policy, and each kind comes
with every choice of blocks to recompute. Most of this space only saves memory:

* recomputing a block adds time to the backward pass and nothing else;
* with prefetch depth 1 the look-up waits for its ids;
* depth 3 is faster only for tables cached in device memory, and those are slower than the same
  tables held there, so where memory is no obstacle it does nothing (unless a table's constraints
  ask for the cache);
* a sharded optimizer whose broadcasts take longer than what it saves.

``quick`` kinds may be the fastest where memory is no obstacle; ``thrifty`` ones are never faster
than the quick one that they belong to, so that they matter only where memory is short.

Blocks to recompute: of equal blocks in the same part of the network only how many counts, unless
the blocks are gathered one by one. Up to ``MOST_CHOICES`` choices all are considered, beyond that
the blocks in the order of activations saved per FLOP, from the first to each. A choice is dropped
where another one is no slower in any operation and takes no more memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod

from planner.cost.context import PoolContext
from planner.cost.dense import Block, dense_network
from planner.cost.dense_time import optimizer_seconds, saved_activation_bytes
from planner.cost.graph import pool_step_graph
from planner.cost.memory import FETCHED_AHEAD
from planner.cost.tbe import device_memory_is_faster
from planner.specs.device import DeviceProfile
from planner.specs.errors import InfeasibleError
from planner.specs.model import ComputeKernel, ModelSpec
from planner.specs.plan import DenseParallelism, KernelPolicy, MemoryPolicy
from planner.specs.units import Dtype

MOST_CHOICES = 64
"""Choices of blocks to recompute up to which all are considered: six different blocks, say."""
IDS_AHEAD = 2
"""Prefetch depth at which the next batch's ids are exchanged while this one computes."""


def compute_precisions(device: DeviceProfile, model: ModelSpec) -> tuple[Dtype, ...]:
    """Precisions that the model allows and the device has.

    Raises:
        InfeasibleError: there is none.
    """
    allowed = tuple(d for d in model.precision.compute if d in device.compute.peak_flops_per_s)
    if not allowed:
        raise InfeasibleError(
            f"{device.name} cannot compute in any precision that the model allows",
            field="precision.compute",
            value=[str(dtype) for dtype in model.precision.compute],
            fix=f"allow one of {', '.join(device.compute.peak_flops_per_s)}",
        )
    return allowed


def narrowest(dtypes: tuple[Dtype, ...]) -> Dtype:
    """The precision with the fewest bytes; of equals the one the recipe names first."""
    return min(dtypes, key=lambda dtype: dtype.bytes)


def parallelisms(ranks: int, pools_in_job: int) -> tuple[DenseParallelism, ...]:
    """Ways to spread the dense network over a pool. Pools exchange whole gradients, so only a pool
    alone may cut them."""
    if ranks == 1:
        return ("data_parallel",)
    if pools_in_job > 1:
        return ("data_parallel", "sharded_optimizer")
    return ("data_parallel", "sharded_optimizer", "fully_sharded")


def plain_policy(
    device: DeviceProfile, model: ModelSpec, precision: Dtype, kernels: KernelPolicy
) -> MemoryPolicy:
    """Nothing cut, nothing recomputed; on CPUs, where the trainer runs plain steps, no batch ahead.

    Communication takes the narrowest precision allowed: fewer bytes never take longer.
    """
    return MemoryPolicy(
        compute_precision=precision,
        communication_precision=narrowest(model.precision.communication),
        prefetch_depth=1 if device.is_cpu else IDS_AHEAD,
        kernels=kernels,
    )


def caches_anyway(device: DeviceProfile, model: ModelSpec) -> bool:
    """Whether a table may be cached where memory is no obstacle: its constraints allow the software
    cache, but not all rows on the device, or those would not be faster."""
    asked = [table.constraints.compute_kernels for table in model.all_tables]
    if not device_memory_is_faster(device):
        return may_cache(model)
    return any(
        kernels is not None
        and ComputeKernel.FUSED_UVM_CACHING in kernels
        and ComputeKernel.FUSED not in kernels
        for kernels in asked
    )


def may_cache(model: ModelSpec) -> bool:
    """Whether some table may be cached in device memory."""
    asked = [table.constraints.compute_kernels for table in model.all_tables]
    return any(kernels is None or ComputeKernel.FUSED_UVM_CACHING in kernels for kernels in asked)


def quick_policies(ctx: PoolContext) -> list[MemoryPolicy]:
    """Kinds that may be the fastest where memory is no obstacle, none recomputed.

    Args:
        ctx: of the pool, under any batch and policy.
    """
    found = []
    for precision in compute_precisions(ctx.device, ctx.model):
        plain = plain_policy(ctx.device, ctx.model, precision, ctx.policy.kernels)
        for parallelism in parallelisms(ctx.ranks, ctx.pools_in_job):
            if parallelism not in _only_thrifty(ctx):
                found.append(plain.model_copy(update={"dense_parallelism": parallelism}))
    if not ctx.device.is_cpu and caches_anyway(ctx.device, ctx.model):
        found += [one.model_copy(update={"prefetch_depth": FETCHED_AHEAD}) for one in found]
    return found


def _only_thrifty(ctx: PoolContext) -> tuple[DenseParallelism, ...]:
    """Ways to spread the dense network that are never faster than data-parallel."""

    def seconds(parallelism: DenseParallelism) -> float:
        policy = ctx.policy.model_copy(update={"dense_parallelism": parallelism})
        return optimizer_seconds(replace(ctx, policy=policy))

    slower = seconds("sharded_optimizer") >= seconds("data_parallel")
    return ("sharded_optimizer",) if slower else ()


def kinds_beside(ctx: PoolContext, quick: MemoryPolicy) -> Iterator[MemoryPolicy]:
    """A quick kind itself, and those that are never faster than it where memory is no obstacle."""
    depths = [quick.prefetch_depth]
    if quick.prefetch_depth == IDS_AHEAD:
        depths.append(1)
        if may_cache(ctx.model) and not caches_anyway(ctx.device, ctx.model):
            depths.append(FETCHED_AHEAD)
    ways = [quick.dense_parallelism]
    if quick.dense_parallelism == "data_parallel":
        every = parallelisms(ctx.ranks, ctx.pools_in_job)
        ways += [way for way in _only_thrifty(ctx) if way in every]
    for way, depth in product(ways, depths):
        yield quick.model_copy(update={"dense_parallelism": way, "prefetch_depth": depth})


def recompute_choices(ctx: PoolContext) -> list[tuple[str, ...]]:
    """Blocks to recompute, none first: those not dominated in time and bytes.

    Args:
        ctx: under the kind of policy.
    """
    order = {block.name: index for index, block in enumerate(dense_network(ctx.model).blocks)}
    one_by_one = ctx.policy.dense_parallelism == "fully_sharded"
    choices = {
        tuple(sorted(names, key=order.__getitem__)) for names in _name_sets(ctx.model, one_by_one)
    }

    def costs(names: tuple[str, ...]) -> tuple[float, ...]:
        policy = ctx.policy.model_copy(update={"recompute": names})
        recomputing = replace(ctx, policy=policy)
        seconds = (operation.seconds for operation in pool_step_graph(recomputing).operations)
        return (*seconds, saved_activation_bytes(recomputing))

    kept: list[tuple[tuple[str, ...], tuple[float, ...]]] = []
    for names, cost in sorted(
        ((names, costs(names)) for names in choices), key=lambda one: (one[1], one[0])
    ):
        beaten = any(all(a <= b for a, b in zip(other, cost, strict=True)) for _, other in kept)
        if not beaten:
            kept.append((names, cost))
    return [names for names, _ in kept]


@lru_cache(maxsize=64)
def _name_sets(model: ModelSpec, one_by_one: bool) -> tuple[tuple[str, ...], ...]:
    """Choices whatever the batch, so that bounds hold for larger ones.

    Args:
        one_by_one: a block's place in the network matters: its backward pass hides the gather of
            the block before.
    """
    network = dense_network(model)
    blocks = [block for block in network.blocks if block.recomputable]
    alike: dict[tuple[bool, Block], list[Block]] = {}
    for block in blocks:
        part = any(block is one for one in network.bottom)
        alike.setdefault((part, replace(block, name="")), []).append(block)
    groups = list(alike.values())
    if one_by_one and 2 ** len(blocks) <= MOST_CHOICES:
        groups = [[block] for block in blocks]
    if prod(len(group) + 1 for group in groups) <= MOST_CHOICES:
        # The first of equal blocks: their activations are held longest.
        return tuple(
            tuple(
                block.name
                for group, count in zip(groups, counts, strict=True)
                for block in group[:count]
            )
            for counts in product(*(range(len(group) + 1) for group in groups))
        )
    best_first = sorted(blocks, key=_floats_per_flop, reverse=True)
    return tuple(
        tuple(block.name for block in best_first[:count]) for count in range(len(blocks) + 1)
    )


def _floats_per_flop(block: Block) -> float:
    """Activations saved by recomputing a block, over its work."""
    products = sum(gemm.batch * gemm.m * gemm.n * gemm.k for gemm in block.forward(1))
    return (block.saved_floats - block.inputs_floats) / (2 * products)
