"""Fit latency and efficiency of each collective on nccl-tests tables.

    python -m benchmarks.fit_collectives h200 b200

t = latency + per_rank_latency (n - 1) + wire bytes / (efficiency link), least squares of the
relative error, over 2, 4 and 8 GPUs and 4 KiB to 512 MiB. Errors are on the odd sizes of each
table, the fit sees the even ones.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.fitting import DATA, mean_relative_error, pattern_search
from planner.specs.load import load_device

TABLE = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
}
OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_to_all": "alltoall",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
}
SMALLEST_BYTES = 4096

Array = NDArray[np.float64]


def wire_bytes(operation: str, ranks: Array, total_bytes: Array) -> Array:
    """Bytes that each rank sends, for a buffer of ``total_bytes``."""
    halves = 2 if operation == "all_reduce" else 1
    return halves * (ranks - 1) / ranks * total_bytes


def measured(name: str, operation: str) -> Array:
    """Rows (ranks, bytes, seconds), several NCCL versions side by side."""
    with (DATA / "collectives" / "nccl_busbw_measured.csv").open() as stream:
        return np.array(
            [
                (float(row["gpus"]), float(row["bytes"]), float(row["latency_us"]) * 1e-6)
                for row in csv.DictReader(stream)
                if row["device"] == TABLE[name]
                and row["op"] == OPERATIONS[operation]
                and float(row["bytes"]) >= SMALLEST_BYTES
            ]
        )


def predict(operation: str, constants: Array, link: float, rows: Array) -> Array:
    """Seconds of each row."""
    latency_s, per_rank_latency_s, efficiency = constants
    wire = wire_bytes(operation, rows[:, 0], rows[:, 1])
    return latency_s + per_rank_latency_s * (rows[:, 0] - 1) + wire / (efficiency * link)


def fit(name: str, operation: str) -> dict[str, float]:
    """Constants and the relative error on sizes that the fit did not see."""
    link = load_device(name).scale_up.bytes_per_s.value
    rows = measured(name, operation)
    sizes = np.unique(rows[:, 1])
    seen = np.isin(rows[:, 1], sizes[::2])
    training, held_out = rows[seen], rows[~seen]

    def loss(constants: Array) -> float:
        ratio = predict(operation, constants, link, training) / training[:, 2]
        return float(np.mean(np.abs(np.log(ratio))))

    constants = pattern_search(loss, np.array([6e-6, 1e-6, 0.75]))
    return {
        "latency_s": float(constants[0]),
        "per_rank_latency_s": float(constants[1]),
        "efficiency": float(constants[2]),
        "error": mean_relative_error(predict(operation, constants, link, held_out), held_out[:, 2]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("devices", nargs="+", choices=list(TABLE))
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in arguments.devices:
        print(f"{name}:")
        results[name] = {operation: fit(name, operation) for operation in OPERATIONS}
        for operation, found in results[name].items():
            print(f"  {operation}: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
