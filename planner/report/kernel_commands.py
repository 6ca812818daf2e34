"""What ``hwplan kernels`` prints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from planner.report.plan_kernels import tile_words
from planner.report.text import columns, indented, microseconds, percent, section
from planner.specs.device import Constant, DeviceProfile
from planner.specs.kernels import Backend, Gemm, RankedKernel, TileConfig
from planner.specs.units import Dtype

WORST_SHOWN = 8


def selection_json(
    device: DeviceProfile, dtype: Dtype, gemm: Gemm, ranked: tuple[RankedKernel, ...]
) -> dict[str, Any]:
    """The selection as plain data."""
    return {
        "device": device.name,
        "dtype": dtype.value,
        **{key: getattr(value, "value", value) for key, value in gemm._asdict().items()},
        "margin": None if device.triton is None else device.triton.margin.value,
        "candidates": [kernel.model_dump(mode="json") for kernel in ranked],
    }


def render_selection(
    device: DeviceProfile,
    dtype: Dtype,
    gemm: Gemm,
    ranked: tuple[RankedKernel, ...],
    console: Console,
) -> None:
    """The ranked kernels of one product, and why the first one runs."""
    first = ranked[0]
    console.print(
        f"[bold]{gemm.layout} {gemm.m:,} x {gemm.n:,} x {gemm.k:,} in {dtype} on "
        f"{escape(device.name)}: {_words(first)}, {microseconds(first.predicted_us)} us[/bold]"
    )
    table = columns("", "backend", "kernel", "us", right=("us",))
    for kernel in ranked:
        chosen = "->" if kernel is first else ""
        words = "" if kernel.tile is None else tile_words(kernel.tile) + _amd_words(kernel.tile)
        table.add_row(chosen, kernel.backend, words, microseconds(kernel.predicted_us))
    console.print()
    indented(console, table)
    console.print()
    indented(console, escape(_why(device, dtype, gemm, first)))


def _words(kernel: RankedKernel) -> str:
    return "the vendor's library" if kernel.tile is None else tile_words(kernel.tile)


def _amd_words(tile: TileConfig) -> str:
    if not tile.matrix_instr_nonkdim:
        return ""
    return (
        f", matrix instruction {tile.matrix_instr_nonkdim}, waves {tile.waves_per_eu}, "
        f"kpack {tile.kpack}"
    )


def _basis(constant: Constant) -> str:
    """Where a model's constants come from, and its error."""
    error = "" if constant.error is None else f", mean error {percent(constant.error)}"
    return f"{constant.provenance}{error}"


def _why(device: DeviceProfile, dtype: Dtype, gemm: Gemm, first: RankedKernel) -> str:
    vendor = f"vendor model: {_basis(device.gemm.compute_efficiency)}"
    if device.triton is None:
        return f"{device.name} has no Triton kernels ({vendor})."
    margin = device.triton.margin
    rule = f"Triton runs where it is predicted to win by more than {percent(margin.value)}"
    won = "it does here" if first.backend is Backend.TRITON else "it does not here"
    wanted = f"{gemm.layout}_{32 if dtype.bytes == 4 else 16}"
    loop = next(loop for name, loop in device.triton.loops.items() if name == wanted)
    return f"{rule}: {won}. Triton model: {_basis(loop.shared_efficiency)}; {vendor}."


def render_store(facts: dict[str, Any], folder: Path, console: Console) -> None:
    """A kernel store: what each pool got, what was dropped and why."""
    kernels, dropped = facts["kernels"], facts["dropped"]
    total = len(kernels) + len(dropped)
    console.print(
        f"[bold]{len(kernels)} of {total} kernels compiled in {facts['seconds']:,.1f} s[/bold]"
    )
    numbers = ("products", "compiled", "dropped", "most registers", "most LDS bytes")
    table = columns("pool", "arch", *numbers, right=numbers)
    for pool in facts["pools"]:
        table.add_row(
            escape(pool["pool"]),
            pool["arch"],
            f"{pool['products']}",
            f"{pool['compiled']}",
            f"{pool['dropped']}",
            f"{pool['most_registers']}",
            f"{pool['most_lds_bytes']:,}",
        )
    console.print()
    indented(console, table)
    for pool in facts["pools"]:
        if pool["next_instead"] or pool["vendor_instead"]:
            console.print()
            indented(
                console,
                f"{escape(pool['pool'])}: the first choice of "
                f"{pool['next_instead'] + pool['vendor_instead']} products was dropped: "
                f"{pool['next_instead']} run the next one, "
                f"{pool['vendor_instead']} the vendor's library",
            )
    if dropped:
        section(console, "Dropped")
        for reason, count in Counter(_drop_words(item) for item in dropped).most_common():
            indented(console, escape(f"{count} x {reason}" if count > 1 else reason))
    console.print()
    console.print(
        f"Saved to {escape(str(folder))}: run it with hwplan train --plan … --kernels "
        f"{escape(str(folder))}",
        soft_wrap=True,
    )


def _drop_words(item: dict[str, Any]) -> str:
    name = item["name"]
    tile = tile_words(TileConfig.model_validate(name["tile"]))
    return f"{name['arch']} {name['layout']} {name['dtype']} {tile}: {item['reason']}"


def render_bench(report: dict[str, Any], console: Console) -> None:
    """The selector's regret on a GPU, and the products where it is worst."""
    summary, measured = report["summary"], report["measured"]
    console.print(
        f"[bold]{len(measured)} of {report['asked']} products on {escape(report['gpu'])} "
        f"(profile {escape(report['device'])})[/bold]"
    )
    if not report["exhaustive"]:
        console.print("Only the first tiles of the selector were measured: best is best of those.")
    if report["unusable"]:
        console.print(f"Products without a selected tile that runs here: {report['unusable']}")
    table = columns("speed of", "against", "geo. mean", "least", "products",
                    right=("geo. mean", "least", "products"))  # fmt: skip
    rows = (
        ("selected", "selected tile", "best tile"),
        ("top", f"best of {report['top_k']} tiles", "best tile"),
        ("picked", "what a plan runs", "better of best tile and vendor"),
        ("against_vendor", "what a plan runs", "vendor's library"),
        ("weight_gradients", "weight gradients given to Triton", "vendor's library"),
    )
    for key, what, against in rows:
        ratio = summary[key]
        if ratio is not None:
            mean, least = (f"{ratio[name]:.3f}" for name in ("geometric_mean", "least"))
            table.add_row(what, against, mean, least, f"{ratio['products']}")
    console.print()
    indented(console, table)
    console.print()
    indented(
        console,
        f"mean error of predicted times: vendor's library {percent(summary['vendor_error'])}, "
        f"selected tiles {percent(summary['selected_error'])}",
    )
    section(console, "Worst selections")
    table = columns("product", "selected", "us", "best", "best us", "vendor us", "plan",
                    right=("us", "best us", "vendor us"))  # fmt: skip
    for item in sorted(measured, key=lambda item: item["best_us"] / item["selected_us"])[
        :WORST_SHOWN
    ]:
        table.add_row(
            f"{item['dtype']} {item['layout']} {item['m']} x {item['n']} x {item['k']}",
            tile_words(TileConfig.model_validate(item["selected"])),
            microseconds(item["selected_us"]),
            tile_words(TileConfig.model_validate(item["best"])),
            microseconds(item["best_us"]),
            microseconds(item["vendor_us"]),
            item["picked"],
        )
    indented(console, table)
