"""Fit the TBE constants on the measured H200 rows; prints every row, measured and predicted.

    python -m benchmarks.fit_embedding

The measured loop launches from Python, so a row is max(host, device): small rows show the host.
Eight tables of the same shape per call; ids are uniform. The same batch is repeated, so the
software cache hits after the warm-up and its row measures look-ups, not misses.
"""

from __future__ import annotations

import csv

import numpy as np
from numpy.typing import NDArray

from benchmarks.fitting import DATA, pattern_search
from planner.cost.tbe import Rates, Shard, backward_seconds, forward_seconds, rates
from planner.specs.load import load_device
from planner.specs.model import ComputeKernel
from planner.specs.units import Dtype

KERNELS = {
    "device": ComputeKernel.FUSED,
    "managed": ComputeKernel.FUSED_UVM,
    "managed_caching": ComputeKernel.FUSED_UVM_CACHING,
}
NAMES = (
    "host_forward_s",
    "host_backward_s",
    "read_efficiency",
    "update_efficiency",
    "sort_s_per_id",
    "uvm_efficiency",
    "cache_lookup_s_per_id",
)
START = np.array([2.2e-4, 5e-4, 0.8, 0.7, 3e-10, 0.9, 1e-9])
BEST_EFFICIENCY = 0.85
"""What a plain copy reaches on the device: no row read can be better."""

Array = NDArray[np.float64]


def measured_rows() -> list[dict[str, str]]:
    """The rows of the table, comments left out."""
    with (DATA / "embedding_tbe_h200.csv").open() as stream:
        return list(csv.DictReader(line for line in stream if not line.startswith("#")))


def shard_of(row: dict[str, str]) -> Shard:
    """One of the row's equal tables."""
    batch = float(row["batch"])
    return Shard(
        table_rows=int(row["rows_per_table"]),
        table_draws=batch * float(row["pooling"]),
        row_share=1.0,
        zipf_exponent=0.0,
        bags=batch,
        columns=int(row["dim"]),
        element_bytes=Dtype(row["weight_dtype"]).bytes,
        state_floats_per_row=1,
    )


def device_seconds(row: dict[str, str], constants: Rates) -> tuple[float, float]:
    """(forward, backward) device seconds of one call over the row's tables."""
    embedding = load_device("h200").embedding
    shard, kernel, tables = shard_of(row), KERNELS[row["location"]], int(row["tables"])
    # The measured batches repeat: their rows are in a software cache already, whatever its size.
    forward = tables * forward_seconds(shard, constants, kernel)
    backward = tables * backward_seconds(shard, constants, kernel)
    return embedding.call_s.value + forward, embedding.backward_call_s.value + backward


def predict(row: dict[str, str], constants: Rates, host: tuple[float, float]) -> Array:
    """(forward, forward + backward) seconds as the measuring loop sees them."""
    forward, backward = device_seconds(row, constants)
    forward = max(forward, host[0])
    return np.array([forward, forward + max(backward, host[1])])


def measured_seconds(row: dict[str, str]) -> Array:
    """(forward, forward + backward) seconds as measured."""
    return np.array([float(row["forward_ms"]), float(row["forward_backward_ms"])]) * 1e-3


def with_constants(constants: Array) -> tuple[Rates, tuple[float, float]]:
    """Device rates with the fitted constants (order of ``NAMES``), and the host's two times."""
    device = load_device("h200")
    hbm = device.memory.hbm_bytes_per_s.value
    changed = rates(device, 1.0)._replace(
        read_bytes_per_s=hbm * min(constants[2], BEST_EFFICIENCY),
        update_bytes_per_s=hbm * min(constants[3], BEST_EFFICIENCY),
        sort_s_per_id=constants[4],
        uvm_bytes_per_s=device.host.link_bytes_per_s.value * constants[5],
        cache_lookup_s_per_id=constants[6],
    )
    return changed, (constants[0], constants[1])


def main() -> None:
    rows = measured_rows()

    def loss(constants: Array) -> float:
        changed, host = with_constants(constants)
        return float(
            np.mean(
                [
                    np.abs(np.log(predict(row, changed, host) / measured_seconds(row)))
                    for row in rows
                ]
            )
        )

    constants = pattern_search(loss, START)
    for name, value in zip(NAMES, constants, strict=True):
        print(f"{name}: {value:.4g}")
    changed, host = with_constants(constants)
    errors = []
    for row in rows:
        predicted, measured = predict(row, changed, host), measured_seconds(row)
        errors.extend(np.abs(predicted / measured - 1))
        shape = (
            "{location} {weight_dtype} {rows_per_table} x {dim}, pooling {pooling}, batch {batch}"
        )
        print(
            f"{shape.format(**row)}: measured ms {np.round(measured * 1e3, 3)}, "
            f"predicted {np.round(predicted * 1e3, 3)}"
        )
    print(f"mean error {np.mean(errors):.3f}, largest {np.max(errors):.3f}")


if __name__ == "__main__":
    main()
