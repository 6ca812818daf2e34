"""Which kernel runs each product: the vendor library or a Triton tile, by predicted time.

A Triton kernel is chosen only where it is predicted to win by more than the model's error::

    triton_s * (1 + margin) < vendor_s + epilogue pass

so that a wrong prediction costs little. The rule of the plan is also that of the step model:
``planned_seconds`` = min(vendor_s + epilogue pass, triton_s * (1 + margin)).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.cost.elementwise import epilogue_seconds
from planner.cost.gemm import gemms_seconds
from planner.cost.triton_gemm import LoopWork, Products, kernel_seconds, loop_work
from planner.cost.triton_machine import triton_machine
from planner.kernels.candidates import TileFamily, tile_candidates
from planner.specs.device import DeviceProfile
from planner.specs.errors import UsageError
from planner.specs.kernels import Backend, Gemm, Layout, RankedKernel, TileConfig
from planner.specs.units import Dtype

Array = NDArray[np.float64]

CHUNK = 64
"""Products priced together: their arrays stay in the cache."""
LARGEST_SIZE = 2**31 - 1
"""Sizes are 32-bit arguments of the kernels."""
LONGEST_SUM = 2**18
"""Weight gradients over more rows (those of Wukong's fields) take up to half as long again as the
model says, measured on an H200: they are left to the vendor's library."""


def select_kernels(
    device: DeviceProfile, dtype: Dtype, gemms: Sequence[Gemm], top_k: int = 4
) -> tuple[tuple[RankedKernel, ...], ...]:
    """The ``top_k`` candidates of each product, the one that runs first.

    The vendor library is always among them, if only as the last. ``predicted_us`` is the
    candidate's own time with its epilogue, without the margin.

    Raises:
        UsageError: ``top_k`` or a size is not positive, a size is beyond the kernels' range, or the
            device cannot multiply in ``dtype``.
    """
    _check(gemms, top_k)
    vendor_s = _vendor_seconds(device, dtype, gemms)
    ranked: list[tuple[RankedKernel, ...]] = [
        (_kernel(None, time_s),) for time_s in vendor_s.tolist()
    ]
    for indices, tiles, times_s in _triton_seconds(device, dtype, gemms):
        best = _best(times_s, top_k)
        best_s = np.take_along_axis(times_s, best, axis=1)
        # Triton tiles count with their margin.
        faster = (best_s * (1 + _margin(device)) < vendor_s[indices, np.newaxis]).sum(axis=1)
        for index, columns, tiles_s, place in zip(
            indices, best.tolist(), best_s.tolist(), faster.tolist(), strict=True
        ):
            ranked[index] = _merged(
                ranked[index][0], [tiles[c] for c in columns], tiles_s, place, top_k
            )
    return tuple(ranked)


def planned_seconds(device: DeviceProfile, dtype: Dtype, gemms: Sequence[Gemm]) -> Array:
    """Seconds of each product as the step model counts them, shape (products,).

    Raises:
        UsageError: as ``select_kernels``.
    """
    _check(gemms, 1)
    planned_s = _vendor_seconds(device, dtype, gemms)
    for indices, _, times_s in _triton_seconds(device, dtype, gemms):
        guarded_s = times_s.min(axis=1) * (1 + _margin(device))
        planned_s[indices] = np.minimum(planned_s[indices], guarded_s)
    return planned_s


def _check(gemms: Sequence[Gemm], top_k: int) -> None:
    if top_k < 1:
        raise UsageError(
            "there is nothing to choose from", field="top_k", value=top_k, fix="ask for 1 or more"
        )
    for gemm in gemms:
        for field in ("m", "n", "k", "batch"):
            size = getattr(gemm, field)
            if not 1 <= size <= LARGEST_SIZE:
                raise UsageError(
                    "no matrix product has this size",
                    field=field,
                    value=size,
                    fix=f"give a size from 1 to {LARGEST_SIZE}",
                )


def _margin(device: DeviceProfile) -> float:
    return 0.0 if device.triton is None else device.triton.margin.value


def _vendor_seconds(device: DeviceProfile, dtype: Dtype, gemms: Sequence[Gemm]) -> Array:
    """The vendor library's product and, for an epilogue that it lacks, one pass over C."""
    product_s = np.array(gemms_seconds(device, gemms, dtype), dtype=np.float64)
    pass_s = np.array([epilogue_seconds(device, dtype, gemm) for gemm in gemms], dtype=np.float64)
    return np.asarray(product_s + pass_s)


@lru_cache(maxsize=64)
def _family(device: DeviceProfile, dtype: Dtype, layout: Layout) -> TileFamily:
    return TileFamily.of(tile_candidates(device, dtype, layout))


def _triton_seconds(
    device: DeviceProfile, dtype: Dtype, gemms: Sequence[Gemm]
) -> Iterator[tuple[list[int], tuple[TileConfig, ...], Array]]:
    """Chunks of products of one layout: their indices, the tiles, seconds (products, tiles)."""
    if device.triton is None:
        return
    machine = triton_machine(device, dtype)
    for layout in Layout:
        if dtype is Dtype.FP8 and layout is not Layout.NT:
            continue
        of_layout = [
            index
            for index, gemm in enumerate(gemms)
            if gemm.layout is layout
            and gemm.batch == 1
            and (layout is not Layout.TN or gemm.k <= LONGEST_SUM)
        ]
        if not of_layout:
            continue
        family = _family(device, dtype, layout)
        for start in range(0, len(of_layout), CHUNK):
            indices = of_layout[start : start + CHUNK]
            products = Products.of([gemms[index] for index in indices], dtype.bytes)
            loops = loop_work(machine, products, family.loops)
            work = LoopWork(*(seconds.take(family.loop, axis=1) for seconds in loops))
            yield indices, family.tiles, kernel_seconds(machine, products, family.columns, work)


def _best(times_s: Array, count: int) -> NDArray[np.intp]:
    """Columns of the ``count`` least of each row, in order."""
    count = min(count, times_s.shape[1])
    least = np.argpartition(times_s, count - 1, axis=1)[:, :count]
    # Ties in the order of the columns, whatever order the partition leaves.
    least.sort(axis=1)
    order = np.take_along_axis(times_s, least, axis=1).argsort(axis=1, kind="stable")
    return np.take_along_axis(least, order, axis=1)


def _kernel(tile: TileConfig | None, time_s: float) -> RankedKernel:
    backend = Backend.VENDOR if tile is None else Backend.TRITON
    return RankedKernel(backend=backend, tile=tile, predicted_us=time_s * 1e6)


def _merged(
    vendor: RankedKernel,
    tiles: Sequence[TileConfig],
    times_s: Sequence[float],
    faster: int,
    top_k: int,
) -> tuple[RankedKernel, ...]:
    """``top_k`` kernels: the vendor library after the ``faster`` tiles, but at the latest last."""
    if top_k == 1:
        return (_kernel(tiles[0], times_s[0]),) if faster else (vendor,)
    place = min(faster, top_k - 1)
    kernels = [_kernel(*one) for one in zip(tiles[: top_k - 1], times_s, strict=False)]
    return (*kernels[:place], vendor, *kernels[place:])
