"""Compile a pool's kernels before the first step, where no kernel store was given."""

from __future__ import annotations

from planner.specs.plan import PoolPlan
from trainers.kernels.build import KernelKey
from trainers.kernels.launch import compile_here


def prepare(pool: PoolPlan, arch: str, rank: int) -> int:
    """Compile the first choice of each product into Triton's cache, or load it from there.

    Each rank begins with a share of its own, so the ranks of a node, which have one cache, compile
    in parallel and then load what the others compiled. (Threads would not do: Triton's compiler
    holds Python's lock.)

    Args:
        rank: in the pool.

    Returns:
        Kernels that are ready.
    """
    dtype = pool.policy.compute_precision
    keys = {
        KernelKey.of(arch, dtype, item.gemm, tile): None
        for item in pool.own_kernels
        if (tile := item.candidates[0].tile) is not None
    }
    first = rank % pool.ranks * len(keys) // pool.ranks
    ordered = [*keys][first:] + [*keys][:first]
    return sum(compile_here(key) is not None for key in ordered)
