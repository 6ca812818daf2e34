"""Measure one core of this machine for ``cluster_configs/devices/cpu.yaml``; prints profile lines.

    python -m benchmarks.measure_cpu

Everything is CPU time (``thread_time``) of one-thread torch, the least of several repeats, so that
other work on the machine disturbs little. Needs the training extra. What workers cost beyond their
kernels is in ``benchmarks.measure_workers``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from numpy.typing import NDArray
from torch import nn

from benchmarks.fitting import mean_relative_error, pattern_search
from planner.cost.gemm import Core, core_seconds
from planner.cost.tbe import Rates, Shard, backward_seconds, forward_seconds
from planner.specs.model import ComputeKernel
from trainers.setup import prepare_host

Array = NDArray[np.float64]
GEMM_SHAPES = [
    (m, n, k)
    for m in (16, 64, 192, 256)
    for n, k in ((1024, 1024), (512, 1024), (1024, 367), (512, 13), (16, 256), (1, 512))
] + [(1024, 1024, 64), (1024, 1024, 256), (512, 1024, 192), (1024, 367, 256)]
BATCHED_SHAPES = [
    (rows, columns, inner, batch)
    for batch in (16, 64, 256)
    for vectors, width in ((27, 256), (27, 64), (9, 128))
    for rows, columns, inner in ((vectors, vectors, width), (vectors, width, vectors))
]
LARGE_FLOPS = 1e7
TBE_SHAPES = [  # tables, rows, columns, pooling, batch
    (26, 10007, 16, 1, 64),
    (26, 10007, 16, 1, 256),
    (26, 10007, 16, 1, 1024),
    (4, 10007, 16, 1, 256),
    (8, 100_000, 64, 10, 256),
    (8, 100_000, 64, 10, 1024),
    (8, 100_000, 128, 1, 1024),
]


def least_seconds(
    function: Callable[[], object],
    repeats: int = 40,
    inner: int = 4,
) -> float:
    """Least CPU seconds of one call."""
    function()
    best = np.inf
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(inner):
            function()
        best = min(best, (time.thread_time() - start) / inner)
    return float(best)


def measure_gemm(dtype: torch.dtype) -> dict[str, float]:
    """Constants of the core model."""
    seconds = []
    for m, n, k in GEMM_SHAPES:
        a, b = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
        seconds.append(least_seconds(lambda a=a, b=b: nn.functional.linear(a, b)))
    measured = np.array(seconds)
    sizes = np.array(GEMM_SHAPES, dtype=np.float64)

    def predict(constants: Array) -> Array:
        flops_per_s, bytes_per_s, launch_s = constants
        element = torch.finfo(dtype).bits / 8
        core = Core(flops_per_s, bytes_per_s, bytes_per_s, element, launch_s)
        return core_seconds(core, *sizes.T, np.ones(len(sizes)))

    # Small products are launches and caches; a step's time is in the large ones.
    large = 2 * sizes.prod(axis=1) >= LARGE_FLOPS

    def error(constants: Array) -> float:
        return mean_relative_error(predict(constants)[large], measured[large])

    constants = pattern_search(error, np.array([1.5e11, 2e10, 2e-6]))
    small = np.array(BATCHED_SHAPES, dtype=np.float64)
    small_measured = []
    for m, n, k, batch in BATCHED_SHAPES:
        a, b = torch.randn(batch, m, k, dtype=dtype), torch.randn(batch, k, n, dtype=dtype)
        small_measured.append(least_seconds(lambda a=a, b=b: torch.bmm(a, b)))

    def predict_batched(ratio: Array) -> Array:
        flops_per_s, bytes_per_s, launch_s = constants
        element = torch.finfo(dtype).bits / 8
        small_bytes_per_s = bytes_per_s * float(ratio[0])
        core = Core(flops_per_s, bytes_per_s, small_bytes_per_s, element, launch_s)
        return core_seconds(core, *small.T)

    def batched_error(ratio: Array) -> float:
        return mean_relative_error(predict_batched(ratio), np.array(small_measured))

    ratio = pattern_search(batched_error, np.array([1.5]))
    names = ("flops_per_s", "bytes_per_s", "launch_s")
    return {
        **dict(zip(names, constants.tolist(), strict=True)),
        "error": error(constants),
        "l2_over_hbm": float(ratio[0]),
        "batched_error": batched_error(ratio),
    }


def measure_elementwise() -> dict[str, float]:
    """Bytes per second of a large ReLU, seconds of a tiny one and of its autograd operator."""
    large, tiny = torch.randn(1 << 20), torch.randn(16, requires_grad=True)
    bandwidth = 2 * large.numel() * 4 / least_seconds(lambda: torch.relu(large))

    def chain(length: int) -> None:
        value = tiny
        for _ in range(length):
            value = torch.relu(value)
        value.sum().backward()

    small = torch.randn(1 << 17)
    l2_bandwidth = 2 * small.numel() * 4 / least_seconds(lambda: torch.relu(small), inner=50)
    pair_s = (least_seconds(lambda: chain(64)) - least_seconds(lambda: chain(32))) / 32
    with torch.no_grad():
        kernel_s = least_seconds(lambda: torch.relu(tiny), inner=200)
    return {
        "bytes_per_s": bandwidth,
        "l2_bytes_per_s": l2_bandwidth,
        "launch_s": kernel_s,
        "op_s": max(pair_s / 2 - kernel_s, 0),
    }


def measure_tbe(memory_bytes_per_s: float, l2_bytes_per_s: float) -> dict[str, float]:
    """Constants of the TBE model, uniform ids."""
    measured = []
    for tables, rows, columns, pooling, batch in TBE_SHAPES:
        tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, columns, EmbeddingLocation.HOST, ComputeDevice.CPU)] * tables,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        )
        count = tables * batch * pooling
        ids = torch.randint(0, rows, (count,))
        offsets = torch.arange(0, count + 1, pooling)
        gradient = torch.randn(batch, tables * columns)
        with torch.no_grad():
            forward = least_seconds(lambda t=tbe, i=ids, o=offsets: t(i, o))

        def both(t=tbe, i=ids, o=offsets, g=gradient) -> None:
            t(i, o).backward(g)

        measured.append((forward, least_seconds(both) - forward))
    target = np.array(measured)

    def predict(constants: Array) -> Array:
        call_s, table_s, read, backward_call_s, sort, update = constants
        rates = Rates(
            table_s=table_s,
            read_bytes_per_s=memory_bytes_per_s * read,
            update_bytes_per_s=memory_bytes_per_s * update,
            l2_bytes_per_s=l2_bytes_per_s,
            cache_bytes=2 * 2**20,
            access_bytes=64,
            sort_s_per_id=sort,
            uvm_bytes_per_s=1.0,
            cache_lookup_s_per_id=0.0,
        )
        rows_out = []
        for tables, rows, columns, pooling, batch in TBE_SHAPES:
            shard = Shard(rows, batch * pooling, 1.0, 0.0, batch, columns, 4, 1)
            kernel = ComputeKernel.FUSED
            rows_out.append(
                (
                    call_s + tables * forward_seconds(shard, rates, kernel),
                    backward_call_s + tables * backward_seconds(shard, rates, kernel),
                )
            )
        return np.array(rows_out)

    constants = pattern_search(
        lambda c: float(np.mean(np.abs(np.log(predict(c) / target)))),
        np.array([1e-4, 3e-6, 0.3, 2e-4, 2e-8, 0.3]),
    )
    names = (
        "call_s",
        "table_s",
        "read_efficiency",
        "backward_call_s",
        "sort_s_per_id",
        "update_efficiency",
    )
    return {
        **dict(zip(names, constants.tolist(), strict=True)),
        "error": mean_relative_error(predict(constants).ravel(), target.ravel()),
    }


def main() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    prepare_host(torch.device("cpu"))
    print(f"one thread, {os.cpu_count()} cores, torch {torch.__version__}; CPU seconds")
    gemm = measure_gemm(torch.float32)
    elementwise = measure_elementwise()
    sections = {
        "gemm fp32": gemm,
        "gemm bf16": measure_gemm(torch.bfloat16),
        "elementwise": elementwise,
        "tbe": measure_tbe(elementwise["bytes_per_s"], elementwise["l2_bytes_per_s"]),
    }
    for name, constants in sections.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in constants.items()))


if __name__ == "__main__":
    main()
