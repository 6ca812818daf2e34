"""Fit the GEMM constants of a device on measured tables; hold out whole (N, K) pairs.

    python -m benchmarks.fit_gemm h200 h100 b200 mi355x [--seeds 0 1 2]

The published tables (bf16, y = x W^T) give the constants of tiles and memory. Of a device with a
sweep of its own (``benchmarks/data``), the vendor's rows give those of the other dtypes and layouts
and of odd sizes; there a layer (its two widths) is held out as a whole. Each seed splits anew, fits
on the training half and is judged on the other. Prints the constants and errors of the first seed,
which the profiles carry for seed 0, and the errors over all seeds; those of the sweep also by
dtype, layout and measured time.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.fitting import DATA, mean_relative_error, pattern_search
from planner.cost.gemm import library_seconds, machine
from planner.specs.device import DeviceProfile
from planner.specs.kernels import Gemm, Layout
from planner.specs.load import load_device
from planner.specs.units import Dtype

Array = NDArray[np.float64]

NVIDIA_TABLE = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm"}
AMD_TABLE = {"mi350x": "gfx950", "mi355x": "gfx950"}
SWEPT = Path(__file__).parent / "data"
SWEEPS = {"h200": {SWEPT / "h200_gemm_models.csv.gz": 0.0, SWEPT / "h200_gemm.csv.gz": 100e-6}}
"""Of each device, files and the shortest time that is taken from them: the older sweep was timed
before the clock had risen, and its short launches took up to 10 us too long."""
TILE_NAMES = (
    "compute_efficiency", "hbm_efficiency", "l2_over_hbm", "store_over_hbm", "reduce_over_hbm",
    "launch_s", "fill_s", "step_s", "reduce_s", "wave_overlap",
)  # fmt: skip
STARTS = (
    (0.87, 0.84, 6.0, 1.0, 4.0, 2.3e-6, 0.25e-6, 100e-9, 2.9e-6, 0.9),
    (0.62, 0.80, 2.2, 0.6, 0.5, 2.6e-6, 0.15e-6, 20e-9, 1.9e-6, 0.5),
)
"""Kernels that load tiles by bulk copies, and those that do not."""
OTHER_NAMES = (
    "narrow_load_s", "narrow_compute", "transposed_load_s", "vector_operands",
    "tf32_fill_s", "tf32_step_s",
)  # fmt: skip
OTHER_START = (160e-12, 2.0, 54e-12, 23.0, 0.8e-6, 250e-9)
TRAINING_ROWS = 700
SWEEP_TRAINING_ROWS = 1500
HELD_OUT_ROWS = 4000
CHUNK = 250
SIZE_CLASSES = {"below_10us": (0.0, 10e-6), "to_30us": (10e-6, 30e-6), "above": (30e-6, np.inf)}
"""Of measured seconds."""


class Row(NamedTuple):
    """One measured product."""

    gemm: Gemm
    dtype: Dtype
    seconds: float

    @property
    def layer(self) -> tuple[int, int]:
        """The two sizes that do not carry the batch."""
        gemm = self.gemm
        return (gemm.m, gemm.n) if gemm.layout is Layout.TN else (gemm.n, gemm.k)


def measured_rows(device: str) -> list[Row]:
    """The published bf16 GEMMs of ``device``; of several kernels for a shape, the fastest."""
    folder = DATA / "gemm"
    if device in NVIDIA_TABLE:
        with gzip.open(folder / "nvidia_bf16_linear_measured.csv.gz", "rt") as stream:
            found = [
                (row["m"], row["n"], row["k"], row["latency_us"])
                for row in csv.DictReader(stream)
                if row["system"] == NVIDIA_TABLE[device]
            ]
    else:
        with (folder / "amd_bf16_gemm_measured.csv").open() as stream:
            found = [
                (row["M"], row["N"], row["K"], row["us"])
                for row in csv.DictReader(stream)
                if row["gfx"] == AMD_TABLE[device]
            ]
    fastest: dict[Gemm, float] = {}
    for m, n, k, microseconds in found:
        gemm, seconds = Gemm(int(m), int(n), int(k)), float(microseconds) * 1e-6
        if seconds > 0:
            fastest[gemm] = min(fastest.get(gemm, np.inf), seconds)
    return [Row(gemm, Dtype.BF16, seconds) for gemm, seconds in fastest.items()]


def swept_rows(device: str) -> list[Row]:
    """The vendor's rows of our sweeps on ``device``; none where there is no sweep."""
    rows = []
    for path, least_s in SWEEPS.get(device, {}).items():
        with gzip.open(path, "rt") as stream:
            found = [
                Row(
                    Gemm(int(row["m"]), int(row["n"]), int(row["k"]), layout=Layout(row["layout"])),
                    Dtype(row["dtype"]),
                    float(row["us"]) * 1e-6,
                )
                for row in csv.DictReader(stream)
                if row["backend"] == "vendor"
            ]
        rows += [row for row in found if row.seconds >= least_s]
    return rows


def balanced(rows: Sequence[Row], seed: int) -> list[Row]:
    """In random order, but every layer's first rows before any layer's second."""
    seen: dict[tuple[int, int], int] = {}
    turn = {}
    for index in np.random.default_rng(seed).permutation(len(rows)).tolist():
        layer = rows[index].layer
        turn[index] = seen[layer] = seen.get(layer, 0) + 1
    return [rows[index] for index in sorted(turn, key=lambda index: turn[index])]


def split(rows: Sequence[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Half of the layers for training, the others held out; each ``balanced``."""
    layers = sorted({row.layer for row in rows})
    chosen = np.random.default_rng(seed).permutation(len(layers))[: len(layers) // 2]
    training = {layers[index] for index in chosen}
    ordered = balanced(rows, seed)
    return (
        [row for row in ordered if row.layer in training],
        [row for row in ordered if row.layer not in training],
    )


def with_constants(
    device: DeviceProfile, names: Sequence[str], values: Sequence[float]
) -> DeviceProfile:
    """``device`` with these GEMM constants."""
    changed = {
        name: getattr(device.gemm, name).model_copy(update={"value": float(value)})
        for name, value in zip(names, values, strict=True)
    }
    return device.model_copy(update={"gemm": device.gemm.model_copy(update=changed)})


def predict(device: DeviceProfile, rows: Sequence[Row]) -> Array:
    """Seconds of each row."""
    predicted = np.empty(len(rows))
    for dtype in dict.fromkeys(row.dtype for row in rows):
        of_dtype = [index for index, row in enumerate(rows) if row.dtype is dtype]
        for start in range(0, len(of_dtype), CHUNK):
            chunk = of_dtype[start : start + CHUNK]
            gemms = [rows[index].gemm for index in chunk]
            predicted[chunk] = library_seconds(machine(device, dtype), gemms)
    return predicted


def measured(rows: Sequence[Row]) -> Array:
    """Seconds of each row."""
    return np.array([row.seconds for row in rows])


def fit(
    device: DeviceProfile,
    names: Sequence[str],
    starts: Sequence[Sequence[float]],
    rows: Sequence[Row],
) -> DeviceProfile:
    """``device`` with the constants of least mean |log(predicted / measured)|, from the best of
    ``starts``."""
    logarithms = np.log(measured(rows))

    def loss(constants: Array) -> float:
        values = dict(zip(names, constants.tolist(), strict=True))
        if values.get("wave_overlap", 0.0) > 1:
            return np.inf
        predicted = predict(with_constants(device, names, constants.tolist()), rows)
        return float(np.mean(np.abs(np.log(predicted) - logarithms)))

    rough = [pattern_search(loss, np.array(start), 1.5, 1.1, tolerance=1e-3) for start in starts]
    best = min(rough, key=loss)
    best = pattern_search(loss, best, 1.1, 1.01, random_directions=6, tolerance=1e-4)
    return with_constants(device, names, best.tolist())


def fit_all(device: DeviceProfile, table: Sequence[Row], sweep: Sequence[Row]) -> DeviceProfile:
    """``device`` with all constants fitted."""
    fitted = fit(device, TILE_NAMES, STARTS, table[:TRAINING_ROWS])
    if not sweep:
        return fitted
    return fit(fitted, OTHER_NAMES, (OTHER_START,), sweep[:SWEEP_TRAINING_ROWS])


def rank_correlation(a: Array, b: Array) -> float:
    """Spearman's."""
    ranks_a, ranks_b = np.argsort(np.argsort(a)), np.argsort(np.argsort(b))
    return float(np.corrcoef(ranks_a, ranks_b)[0, 1])


def errors(device: DeviceProfile, rows: Sequence[Row]) -> dict[str, float]:
    """MAPE, rank correlation and median bias on ``rows``."""
    predicted, found = predict(device, rows), measured(rows)
    return {
        "mape": mean_relative_error(predicted, found),
        "spearman": rank_correlation(predicted, found),
        "median_bias": float(np.median(predicted / found)) - 1,
    }


def sweep_errors(device: DeviceProfile, rows: Sequence[Row]) -> dict[str, float]:
    """Errors on the sweep, and the MAPE of each dtype and layout, in all and by size class."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        of_layout = f"sweep_{row.dtype}_{row.gemm.layout}"
        groups.setdefault(of_layout, []).append(row)
        for name, (least_s, end_s) in SIZE_CLASSES.items():
            if least_s <= row.seconds < end_s:
                groups.setdefault(f"{of_layout}_{name}", []).append(row)
    whole = {f"sweep_{key}": value for key, value in errors(device, rows).items()}
    return whole | {name: errors(device, group)["mape"] for name, group in sorted(groups.items())}


def report(name: str, seeds: Sequence[int]) -> dict[str, float]:
    """Constants and held-out errors of the first seed; mean and worst error over all of them."""
    device, table, sweep = load_device(name), measured_rows(name), swept_rows(name)
    constants: dict[str, float] = {}
    found: dict[str, list[float]] = {}
    for seed in seeds:
        training, held_out = split(table, seed)
        sweep_training, sweep_held_out = split(sweep, seed)
        fitted = fit_all(device, training, sweep_training)
        figures = errors(fitted, held_out[:HELD_OUT_ROWS])
        if sweep:
            figures |= sweep_errors(fitted, sweep_held_out)
        for key, value in figures.items():
            found.setdefault(key, []).append(value)
        if not constants:
            names = (*TILE_NAMES, *OTHER_NAMES)
            constants = {name: getattr(fitted.gemm, name).value for name in names}
    return {
        **constants,
        **{key: values[0] for key, values in found.items()},
        **{f"{key} (mean)": float(np.mean(values)) for key, values in found.items()},
        "mape (worst)": max(found["mape"]),
        "spearman (worst)": min(found["spearman"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("devices", nargs="+", choices=[*NVIDIA_TABLE, *AMD_TABLE])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.devices:
        results[name] = report(name, arguments.seeds)
        print(f"{name}:")
        for key, value in results[name].items():
            print(f"  {key}: {value:.4g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
