"""The kernels of a plan: who runs the products, and where a kernel of our own gains most."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from planner.report.text import columns, indented, microseconds, milliseconds, section
from planner.specs.kernels import Backend, PlannedGemm, TileConfig
from planner.specs.plan import PoolPlan

MOST_GAINING = 5
US_PER_MS = 1e3


def render_kernels(name: str, pool: PoolPlan, console: Console) -> None:
    """Print the kernels of one pool in its compute precision; nothing if it runs the vendor's."""
    if not pool.kernels:
        return
    items = [item for item in pool.kernels if item.dtype is pool.policy.compute_precision]
    chosen_ms, vendor_ms = (
        sum(item.count * time_us(item) for item in items) / US_PER_MS
        for time_us in (_chosen_us, _vendor_us)
    )
    section(
        console,
        f"Kernels of {name}: {milliseconds(chosen_ms)} ms in matrix products, "
        f"{milliseconds(vendor_ms)} ms with the vendor's library alone",
    )
    own = sum(item.candidates[0].backend is Backend.TRITON for item in items)
    indented(
        console,
        f"{len(items)} distinct products in {pool.policy.compute_precision}: "
        f"{own} by Triton, {len(items) - own} by the vendor's library",
    )
    gaining = sorted(
        (item for item in items if item.candidates[0].backend is Backend.TRITON),
        key=_gained_us,
        reverse=True,
    )
    if not gaining:
        return
    numbers = ("times", "us", "vendor us")
    table = columns("gains most", "m x n x k", "times", "kernel", "us", "vendor us", right=numbers)
    for item in gaining[:MOST_GAINING]:
        table.add_row(
            _what(item),
            f"{item.m:,} x {item.n:,} x {item.k:,}",
            f"{item.count}",
            escape(tile_words(item.candidates[0].tile)),
            microseconds(_chosen_us(item)),
            microseconds(_vendor_us(item)),
        )
    console.print()
    indented(console, table)


def tile_words(tile: TileConfig | None) -> str:
    """``128x64x64 split 8, 4 warps, 3 stages``; None is the vendor's library."""
    if tile is None:
        return "vendor"
    split = f" split {tile.split_k}" if tile.split_k > 1 else ""
    return (
        f"{tile.block_m}x{tile.block_n}x{tile.block_k}{split}, {tile.num_warps} warps, "
        f"{tile.num_stages} stages"
    )


def _what(item: PlannedGemm) -> str:
    """Layout, with what the kernel takes in."""
    epilogue = item.epilogue.replace("_", "+")
    return f"{item.layout}" if epilogue == "none" else f"{item.layout} {epilogue}"


def _chosen_us(item: PlannedGemm) -> float:
    return item.candidates[0].predicted_us


def _vendor_us(item: PlannedGemm) -> float:
    return next(
        candidate.predicted_us
        for candidate in item.candidates
        if candidate.backend is Backend.VENDOR
    )


def _gained_us(item: PlannedGemm) -> float:
    """In one step."""
    return item.count * (_vendor_us(item) - _chosen_us(item))
