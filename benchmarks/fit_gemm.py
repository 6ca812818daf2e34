"""Fit the GEMM constants of a device on measured tables; hold out whole (N, K) pairs.

    python -m benchmarks.fit_gemm h200 b200 h100 mi355x

Prints the constants as profile lines and the error on rows whose (N, K) the fit never saw.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.fitting import DATA, mean_relative_error, pattern_search
from planner.cost.gemm import Machine, candidate_seconds
from planner.specs.device import DeviceProfile
from planner.specs.load import load_device
from planner.specs.units import Dtype

NAMES = (
    "compute_efficiency",
    "hbm_efficiency",
    "launch_s",
    "prefetch_s",
    "l2_over_hbm",
    "reduce_s",
)
START = np.array([0.9, 0.8, 2.5e-6, 0.2e-6, 4.0, 2.5e-6])
NVIDIA_TABLE = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm"}
AMD_TABLE = {"mi350x": "gfx950", "mi355x": "gfx950"}
TRAINING_ROWS = 1500
HELD_OUT_ROWS = 6000

Rows = NDArray[np.float64]
"""Columns m, n, k, seconds."""


def measured_rows(device: str) -> Rows:
    """The measured bf16 GEMMs of ``device``; of several kernels for a shape, the fastest."""
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
    fastest: dict[tuple[float, ...], float] = {}
    for row in found:
        *shape, microseconds = map(float, row)
        if microseconds > 0:
            key = tuple(shape)
            fastest[key] = min(fastest.get(key, np.inf), microseconds)
    return np.array([(*shape, us * 1e-6) for shape, us in fastest.items()])


def split(rows: Rows, seed: int = 0) -> tuple[Rows, Rows]:
    """Half of the (N, K) pairs for training, the others held out."""
    random = np.random.default_rng(seed)
    pairs, of_row = np.unique(rows[:, 1:3], axis=0, return_inverse=True)
    training_pairs = random.permutation(len(pairs))[: len(pairs) // 2]
    in_training = np.isin(of_row, training_pairs)

    def sample(part: Rows, count: int) -> Rows:
        return part[random.permutation(len(part))[:count]]

    return sample(rows[in_training], TRAINING_ROWS), sample(rows[~in_training], HELD_OUT_ROWS)


def predict(device: DeviceProfile, constants: NDArray[np.float64], rows: Rows) -> Rows:
    """Seconds of each row with ``constants`` (order of ``NAMES``)."""
    compute, hbm, launch_s, prefetch_s, l2_over_hbm, reduce_s = constants
    bandwidth = device.memory.hbm_bytes_per_s.value * hbm
    machine = Machine(
        units=device.compute.units.value,
        flops_per_s=device.compute.peak_flops_per_s[Dtype.BF16].value * compute,
        hbm_bytes_per_s=bandwidth,
        l2_bytes_per_s=bandwidth * l2_over_hbm,
        element_bytes=Dtype.BF16.bytes,
        launch_s=launch_s,
        prefetch_s=prefetch_s,
        reduce_s=reduce_s,
    )
    m, n, k = (rows[:, index : index + 1] for index in range(3))
    return candidate_seconds(machine, m, n, k, np.ones_like(m)).min(axis=1)


def fit(name: str) -> dict[str, float]:
    """Constants, held-out error and rows used."""
    device, rows = load_device(name), measured_rows(name)
    training, held_out = split(rows)

    def loss(constants: NDArray[np.float64]) -> float:
        return float(np.mean(np.abs(np.log(predict(device, constants, training) / training[:, 3]))))

    constants = pattern_search(loss, START)
    return {
        **dict(zip(NAMES, constants.tolist(), strict=True)),
        "training_rows": len(training),
        "held_out_rows": len(held_out),
        "held_out_mape": mean_relative_error(predict(device, constants, held_out), held_out[:, 3]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("devices", nargs="+", choices=[*NVIDIA_TABLE, *AMD_TABLE])
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.devices:
        results[name] = fit(name)
        print(f"{name}:")
        for key, value in results[name].items():
            print(f"  {key}: {value:.4g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
