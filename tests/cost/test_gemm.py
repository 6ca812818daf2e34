import csv
import gzip
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.gemm import (
    SPLITS,
    TILES,
    Machine,
    candidate_seconds,
    gemm_seconds,
    machine,
)
from planner.specs.errors import UsageError
from planner.specs.load import load_device
from planner.specs.units import Dtype
from tests.cost.helpers import data_file

SIMPLE = Machine(
    units=4,
    flops_per_s=4e12,
    hbm_bytes_per_s=1e12,
    l2_bytes_per_s=4e12,
    element_bytes=2,
    launch_s=1e-6,
    prefetch_s=1e-7,
    reduce_s=5e-7,
)


def candidate(tile: tuple[int, int], split: int) -> int:
    return TILES.index(tile) * len(SPLITS) + SPLITS.index(split)


def seconds_of(shape: tuple[int, int, int], tile: tuple[int, int], split: int) -> float:
    columns = [np.array([[float(size)]]) for size in (*shape, 1)]
    return float(candidate_seconds(SIMPLE, *columns)[0, candidate(tile, split)])


def test_one_wave_by_hand() -> None:
    # 256 x 256 x 128 in 128 x 128 tiles: 4 tiles on 4 units, one wave, 2 steps of 64.
    # Compute per tile: 2*128*128*128 FLOP at 1e12 / (1 + 1024/16384) FLOP/s = 4.456e-6 s.
    # L2: (128+128)*128*2 bytes at 1e12 bytes/s per unit = 6.55e-8; HBM: less.
    # Store: 4 tiles of 128*128*2 bytes at 1e12 bytes/s = 1.311e-7.
    compute_s = 2 * 128**3 * (1 + 1024 / 128**2) / 1e12
    expected = 1e-6 + 1e-7 + compute_s + 4 * 128 * 128 * 2 / 1e12
    assert seconds_of((256, 256, 128), (128, 128), 1) == pytest.approx(expected, rel=1e-9)


def test_a_fifth_tile_needs_a_second_wave() -> None:
    one = seconds_of((512, 128, 4096), (128, 128), 1)
    two = seconds_of((513, 128, 4096), (128, 128), 1)
    assert two - 1e-6 > 1.9 * (one - 1e-6)


def test_split_k_by_hand() -> None:
    # One tile, K = 4096, split 4: 4 tiles in one wave, 16 steps each, plus the reduction.
    compute_s = 16 * 2 * 64 * 64 * 64 * (1 + 1024 / 64**2) / 1e12
    store_s = 4 * 64 * 64 * 2 / 1e12
    reduce_s = 5e-7 + 8 * 64 * 64 * 4 / 4e12
    expected = 1e-6 + 1e-7 + compute_s + store_s + reduce_s
    assert seconds_of((64, 64, 4096), (64, 64), 4) == pytest.approx(expected, rel=1e-9)


def test_weight_gradients_with_long_k_profit_from_split_k() -> None:
    device = load_device("h200")
    columns = [np.array([[float(size)]]) for size in (256, 128, 65536, 1)]
    found = candidate_seconds(machine(device, Dtype.BF16), *columns)[0]
    unsplit = min(found[candidate(tile, 1)] for tile in TILES)
    assert found.min() < 0.7 * unsplit


def test_unsupported_precision_says_what_to_use() -> None:
    with pytest.raises(UsageError, match="bf16") as caught:
        gemm_seconds(load_device("a100"), 64, 64, 64, Dtype.FP8)
    assert caught.value.value == "fp8"


def test_cdna4_pays_for_tf32_in_bf16_passes() -> None:
    b200, mi350x = load_device("b200"), load_device("mi350x")
    shape = (8192, 8192, 8192)
    assert Dtype.TF32 in mi350x.compute.emulated
    bf16 = [gemm_seconds(device, *shape, Dtype.BF16) for device in (b200, mi350x)]
    tf32 = [gemm_seconds(device, *shape, Dtype.TF32) for device in (b200, mi350x)]
    assert bf16[1] < 1.4 * bf16[0]
    assert tf32[1] > 1.35 * tf32[0]  # against 1.03 by bf16 peaks
    # Never faster than three passes at the bf16 peak.
    assert tf32[1] > 3 * 2 * 8192**3 / 2307e12


@settings(max_examples=150, deadline=None)
@given(
    m=st.integers(1, 40_000),
    n=st.integers(1, 4096),
    k=st.integers(1, 4096),
    more=st.integers(1, 20_000),
    device=st.sampled_from(["h200", "b200", "mi350x", "mi300x", "cpu"]),
)
def test_larger_is_never_faster(m: int, n: int, k: int, more: int, device: str) -> None:
    profile = load_device(device)
    base = gemm_seconds(profile, m, n, k, Dtype.FP32) * (1 - 1e-12)
    assert base <= gemm_seconds(profile, m + more, n, k, Dtype.FP32)
    assert base <= gemm_seconds(profile, m, n + more, k, Dtype.FP32)
    assert base <= gemm_seconds(profile, m, n, k + more, Dtype.FP32)
    assert base <= gemm_seconds(profile, m, n, k, Dtype.FP32, batch=2)


def nvidia_rows(system: str) -> list[tuple[int, int, int, float]]:
    path = data_file("gemm/nvidia_bf16_linear_measured.csv.gz")
    with gzip.open(path, "rt") as stream:
        return [
            (int(row["m"]), int(row["n"]), int(row["k"]), float(row["latency_us"]) * 1e-6)
            for row in csv.DictReader(stream)
            if row["system"] == system
        ]


def amd_rows(_: str) -> list[tuple[int, int, int, float]]:
    with data_file("gemm/amd_bf16_gemm_measured.csv").open() as stream:
        return [
            (int(row["M"]), int(row["N"]), int(row["K"]), float(row["us"]) * 1e-6)
            for row in csv.DictReader(stream)
            if row["gfx"] == "gfx950" and float(row["us"]) > 0
        ]


@pytest.mark.parametrize(
    ("device", "read", "table", "largest_mape"),
    [
        ("h200", nvidia_rows, "h200_sxm", 0.11),
        ("h100", nvidia_rows, "h100_sxm", 0.11),
        ("b200", nvidia_rows, "b200_sxm", 0.14),
        ("mi355x", amd_rows, "", 0.15),
    ],
)
def test_shipped_constants_predict_measured_gemms(
    device: str,
    read: Callable[[str], list[tuple[int, int, int, float]]],
    table: str,
    largest_mape: float,
) -> None:
    profile = load_device(device)
    rows = random.Random(0).sample(read(table), 600)
    errors = [abs(gemm_seconds(profile, *row[:3], Dtype.BF16) / row[3] - 1) for row in rows]
    assert np.mean(errors) < largest_mape
