"""Time GEMM kernels on the GPU at hand: every config of a grid, and the vendor's library.

    python -m benchmarks.sweep_gemm --out benchmarks/data/h200_gemm.csv.gz

Shapes are those of dlrm, dlrm_v1_1tb, wukong_criteo and dlrmv4 layers at several local batches, in
the three layouts; the vendor's library is timed on many more, odd ones too. Kernels are compiled
first, on all cores. A time is the least of some replays of a CUDA graph of several launches, per
launch: operands that fit the L2 are in it, as they are between the layers of a network.

Rows are as ``COLUMNS`` says; a backend's tile parameters are 0 for the vendor's library.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import math
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from planner.specs.kernels import Gemm, Layout, TileConfig
from planner.specs.units import Dtype
from trainers.kernels.build import KernelKey
from trainers.kernels.cache import compile_to_cache
from trainers.kernels.launch import device_arch, multiply
from trainers.kernels.shapes import default_shapes, model_gemms
from trainers.kernels.timing import VENDOR_MEASURED_US, least_us, operands, vendor

BATCHES = (512, 2048, 8192, 27648, 65536)
LAYERS = {
    # (outputs, inputs) of dlrm, dlrm_v1_1tb, wukong_criteo (projections and MLPs), dlrmv4.
    "dlrm": [(512, 13), (256, 512), (128, 256), (512, 3456), (3456, 512), (1024, 3456),
             (1024, 1024), (512, 1024), (256, 512), (1, 256)],
    "dlrm_v1_1tb": [(1024, 479), (512, 13), (1024, 1024), (1, 256)],
    "wukong_criteo": [(2048, 2048), (512, 432), (2048, 1024), (1, 512)],
    "dlrmv4": [(2048, 512), (512, 512), (512, 1536), (256, 512), (1, 512)],
}  # fmt: skip
ODD = (1, 13, 16, 27, 64, 100, 128, 256, 367, 400, 416, 479, 512, 768, 1000, 1024, 1536, 2048, 3456)
"""Widths for the vendor's library."""
BLOCKS = (16, 32, 64, 128, 256)
DEPTHS = {Dtype.BF16: (32, 64, 128), Dtype.TF32: (16, 32, 64)}
WARPS_STAGES = ((4, 3), (4, 4), (4, 5), (8, 3), (8, 4))
SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SHARED_BYTES = 232_448
TILE_MEASURED_US = 2500.0
COLUMNS = (
    "dtype", "layout", "m", "n", "k", "backend", "block_m", "block_n", "block_k", "num_warps",
    "num_stages", "split_k", "us",
)  # fmt: skip
Problem = tuple[Dtype, Gemm]


def products(outputs: int, inputs: int, batch: int) -> Iterator[Gemm]:
    """Forward, input gradient, weight gradient of a linear layer."""
    yield Gemm(batch, outputs, inputs, layout=Layout.NT)
    yield Gemm(batch, inputs, outputs, layout=Layout.NN)
    yield Gemm(outputs, inputs, batch, layout=Layout.TN)


def tile_problems(seed: int) -> list[Problem]:
    """Every layer at every batch in bf16, a third of that in tf32; shuffled."""
    layers = sorted({layer for group in LAYERS.values() for layer in group})
    gemms = [gemm for layer in layers for batch in BATCHES for gemm in products(*layer, batch)]
    shuffled = random.Random(seed)
    shuffled.shuffle(gemms)
    tf32 = gemms[: len(gemms) // 3]
    found = [(Dtype.BF16, gemm) for gemm in gemms[: 2 * len(gemms) // 3]]
    found += [(Dtype.TF32, gemm) for gemm in tf32]
    shuffled.shuffle(found)
    return found


def model_problems(seed: int, count: int) -> list[Problem]:
    """Products of the built-in models that ``hwplan kernels bench`` does not measure unasked."""
    measured = {(shape.dtype, shape.gemm) for shape in default_shapes()}
    pool = sorted({Gemm(*gemm[:3], layout=gemm.layout) for gemm in model_gemms()})
    both = [(dtype, gemm) for gemm in pool for dtype in (Dtype.BF16, Dtype.TF32)]
    return random.Random(seed).sample([one for one in both if one not in measured], count)


def vendor_problems(seed: int, count: int) -> list[Problem]:
    """Random layers of odd widths at batches between 256 and 65,536."""
    choose = random.Random(seed)
    dtypes = (Dtype.BF16, Dtype.BF16, Dtype.TF32, Dtype.TF32, Dtype.FP16, Dtype.FP32)
    found = []
    for _ in range(count):
        layer = choose.choice(ODD), choose.choice(ODD)
        batch = choose.choice((*BATCHES, 256, 1024, 4096, 6912, 16384, 32768, 55296))
        gemm = choose.choice(list(products(*layer, batch)))
        dtype = choose.choice(dtypes)
        found.append((dtype, gemm))
    return found


def tiles(dtype: Dtype, gemm: Gemm, units: int) -> list[TileConfig]:
    """The grid, without what cannot fit the device or is far larger than the matrix."""
    found = []
    blocks = itertools.product(BLOCKS, BLOCKS, DEPTHS[dtype], WARPS_STAGES)
    for block_m, block_n, block_k, (warps, stages) in blocks:
        shared = stages * (block_m + block_n) * block_k * dtype.bytes
        accumulators = block_m * block_n / (warps * 32)
        if shared > SHARED_BYTES or accumulators > 256 or block_m * block_n < 512 * warps / 4:
            continue
        if block_m >= 2 * max(gemm.m, 16) or block_n >= 2 * max(gemm.n, 16):
            continue
        if block_k >= 2 * max(gemm.k, 32) or (
            stages > 2 and (stages - 1) * block_k > gemm.k + block_k
        ):
            continue
        grid = math.ceil(gemm.m / block_m) * math.ceil(gemm.n / block_n)
        if grid > 64 * units * 4:
            continue
        shape = {"block_m": block_m, "block_n": block_n, "block_k": block_k}
        found.append(TileConfig(**shape, num_warps=warps, num_stages=stages))
        if stages not in (3, 4) or grid > units:
            continue
        found += [
            TileConfig(**shape, num_warps=warps, num_stages=stages, split_k=split)
            for split in SPLITS
            if grid * split <= 4 * units
            and grid * split >= units / 4
            and gemm.k >= 4 * split * block_k
        ]
    return found


def sampled(found: list[TileConfig], count: int, seed: int) -> list[TileConfig]:
    """At most ``count`` of them."""
    return found if len(found) <= count else random.Random(seed).sample(found, count)


def row(problem: Problem, backend: str, tile: TileConfig | None, us: float) -> tuple[Any, ...]:
    dtype, gemm = problem
    config = [0] * 6 if tile is None else [
        tile.block_m, tile.block_n, tile.block_k, tile.num_warps, tile.num_stages, tile.split_k
    ]  # fmt: skip
    return (dtype.value, gemm.layout.value, gemm.m, gemm.n, gemm.k, backend, *config, f"{us:.3f}")


def sweep_plan(
    problems: list[Problem], per_problem: int, seed: int
) -> list[tuple[Problem, list[tuple[TileConfig, KernelKey]]]]:
    """Each problem's configs with their keys."""
    arch = device_arch(0)
    units = torch.cuda.get_device_properties(0).multi_processor_count
    found = []
    for index, (dtype, gemm) in enumerate(problems):
        configs = sampled(tiles(dtype, gemm, units), per_problem, seed + index)
        keys = [KernelKey.of(arch, dtype, gemm, tile) for tile in configs]
        found.append(((dtype, gemm), list(zip(configs, keys, strict=True))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--per-problem", type=int, default=260)
    parser.add_argument("--vendor-problems", type=int, default=2500)
    parser.add_argument("--seconds", type=float, default=400.0, help="stop after about so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--models", action="store_true", help="products of the built-in models instead"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(arguments.seed)
    if arguments.models:
        problems = model_problems(arguments.seed, arguments.problems)
    else:
        problems = tile_problems(arguments.seed)[: arguments.problems]
    plan = sweep_plan(problems, arguments.per_problem, arguments.seed)
    with gzip.open(arguments.out, "wt") as stream:
        table = csv.writer(stream)
        table.writerow(COLUMNS)
        for dtype, gemm in vendor_problems(arguments.seed, arguments.vendor_problems):
            a, b = operands(dtype, gemm)
            us = least_us(vendor(dtype, gemm, a, b))
            table.writerow(row((dtype, gemm), "vendor", None, us))
            del a, b
        stream.flush()
        print(f"vendor: {time.monotonic() - began:.0f} s", flush=True)
        failed = compile_to_cache([key for _, configs in plan for _, key in configs])
        print(*list(failed.items())[:3], sep="\n")
        print(f"compiled, {len(failed)} failed: {time.monotonic() - began:.0f} s", flush=True)
        done = 0
        for problem, configs in plan:
            if time.monotonic() - began > arguments.seconds:
                break
            dtype, gemm = problem
            a, b = operands(dtype, gemm)
            table.writerow(
                row(
                    problem, "vendor", None, least_us(vendor(dtype, gemm, a, b), VENDOR_MEASURED_US)
                )
            )
            for tile, key in configs:
                try:
                    us = least_us(partial(multiply, key, a, b), TILE_MEASURED_US)
                except Exception as error:  # too many registers or shared memory for a launch
                    if "out of resource" not in str(error).lower():
                        raise
                    continue
                table.writerow(row(problem, "triton", tile, us))
            stream.flush()
            done += 1
            del a, b
        print(f"timed {done} of {len(plan)} problems: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
