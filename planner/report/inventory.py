"""Built-in models and device types as rows of plain data, and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from rich.console import Console

from planner.report.text import columns, size
from planner.specs.device import Constant
from planner.specs.load import DEVICES, MODELS, load_device, load_model, names_in
from planner.specs.units import Dtype

FP32_BYTES = Dtype.FP32.bytes


def model_rows() -> list[dict[str, Any]]:
    """One row per built-in model, sorted by name."""
    rows = []
    for name in names_in(MODELS):
        model = load_model(name)
        rows.append(
            {
                "name": model.name,
                "description": model.description,
                "arch": str(model.arch),
                "trainable": model.trainable,
                "tables": len(model.all_tables),
                "embedding_parameters": model.embedding_parameters,
                "embedding_bytes_fp32": model.embedding_parameters * FP32_BYTES,
                "lookups_per_sample": sum(table.pooling for table in model.all_tables),
                "global_batch": model.global_batch,
                "source": model.source,
            }
        )
    return rows


def render_models(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the rows of ``model_rows``."""
    table = columns(
        "model", "arch", "tables", "fp32 size", "lookups", "batch", "use",
        right=("tables", "fp32 size", "lookups", "batch"),
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["name"],
            row["arch"],
            f"{row['tables']:,}",
            size(row["embedding_bytes_fp32"]),
            f"{row['lookups_per_sample']:,.0f}",
            f"{row['global_batch']:,}",
            "train" if row["trainable"] else "plan",
        )
    console.print(table)
    console.print("lookups: ids per sample. use: train (plan and train), plan (plan only).")
    console.print("A model of your own: --model FILE.yaml")


def device_rows() -> list[dict[str, Any]]:
    """One row per shipped device profile, sorted by name."""
    rows = []
    for name in names_in(DEVICES):
        device = load_device(name)
        peaks = device.compute.peak_flops_per_s
        rows.append(
            {
                "name": device.name,
                "description": device.description,
                "vendor": device.vendor,
                "arch": device.arch,
                "memory_bytes": device.memory.hbm_bytes.value,
                "memory_bytes_per_s": device.memory.hbm_bytes_per_s.value,
                "peak_flops_per_s": {str(dtype): peak.value for dtype, peak in peaks.items()},
                "emulated": [str(dtype) for dtype in device.compute.emulated],
                "scale_up_topology": str(device.scale_up.topology),
                "scale_up_bytes_per_s": device.scale_up.bytes_per_s.value,
                "network_bytes_per_s": device.network.bytes_per_s.value,
                "provenance": dict(
                    sorted(Counter(str(item.provenance) for item in constants_of(device)).items())
                ),
            }
        )
    return rows


def constants_of(spec: BaseModel) -> Iterator[Constant]:
    """Every ``Constant`` inside a spec, depth first."""
    for field in type(spec).model_fields:
        value = getattr(spec, field)
        for item in value.values() if isinstance(value, dict) else (value,):
            if isinstance(item, Constant):
                yield item
            elif isinstance(item, BaseModel):
                yield from constants_of(item)


ORIGINS = {
    "fitted": ("measured", "measured-fit"),
    "stated": ("datasheet", "published"),
    "guessed": ("scaled", "assumed"),
}
"""Column heading: the provenances that it counts."""


def render_devices(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the rows of ``device_rows``."""
    numbers = ("memory", "TB/s", "bf16", "tf32", "GB/s", *ORIGINS)
    table = columns(
        "device", "memory", "TB/s", "bf16", "tf32", "fabric", "GB/s", *ORIGINS, right=numbers
    )
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['memory_bytes'] / 1e9:,.0f} GB",
            f"{row['memory_bytes_per_s'] / 1e12:.2f}",
            _peak(row, "bf16"),
            _peak(row, "tf32"),
            row["scale_up_topology"],
            f"{row['scale_up_bytes_per_s'] / 1e9:,.0f}",
            *(str(sum(row["provenance"].get(name, 0) for name in ORIGINS[key])) for key in ORIGINS),
        )
    console.print(table)
    console.print("bf16, tf32: dense peak TFLOP/s (* emulated). GB/s: scale-up, each way.")
    console.print(
        "Constants of the profile: fitted (measured), stated (datasheet, published), "
        "guessed (scaled, assumed)."
    )
    console.print("A device of your own: give the path of a profile as device: in a cluster file.")


def _peak(row: dict[str, Any], dtype: str) -> str:
    peak = row["peak_flops_per_s"].get(dtype)
    if peak is None:
        return "-"
    tera = peak / 1e12
    return (f"{tera:,.0f}" if tera >= 10 else f"{tera:.2g}") + (
        "*" if dtype in row["emulated"] else ""
    )
