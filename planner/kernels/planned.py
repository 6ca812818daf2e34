"""The kernels of one pool's training step, as the plan lists them."""

from __future__ import annotations

from collections.abc import Iterable

from planner.cost.context import PoolContext
from planner.cost.dense import dense_network, step_gemms
from planner.kernels.select import select_kernels
from planner.specs.kernels import PlannedGemm
from planner.specs.units import Dtype

TOP_K = 4
"""Candidates kept for each product."""


def planned_kernels(
    ctx: PoolContext, precisions: Iterable[Dtype], top_k: int = TOP_K
) -> tuple[PlannedGemm, ...]:
    """Every distinct product of the pool's step in each precision, with its ranked kernels.

    Empty where the pool runs the vendor's kernels throughout.

    Raises:
        UsageError: the device cannot multiply in one of ``precisions``.
    """
    if ctx.policy.kernels == "vendor":
        return ()
    blocks = dense_network(ctx.model).blocks
    counts = step_gemms(blocks, ctx.local_batch, ctx.policy.recompute)
    gemms = tuple(counts)
    return tuple(
        PlannedGemm(
            layout=gemm.layout,
            m=gemm.m,
            n=gemm.n,
            k=gemm.k,
            batch=gemm.batch,
            epilogue=gemm.epilogue,
            dtype=precision,
            count=counts[gemm],
            candidates=candidates,
        )
        for precision in precisions
        for gemm, candidates in zip(
            gemms, select_kernels(ctx.device, precision, gemms, top_k), strict=True
        )
    )
