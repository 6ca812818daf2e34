import math
import os

import numpy as np
import pytest

from benchmarks.origami_check import (
    DEVICE,
    NO_WEIGHT,
    TABLE,
    Golden,
    agreement,
    equation,
    golden,
    kendall,
    own_seconds,
    spearman,
)
from planner.kernels.origami import Grid, Tile, programs, tile_cycles
from planner.kernels.origami_constants import architecture
from planner.specs.errors import UsageError
from planner.specs.kernels import Gemm, Layout
from planner.specs.load import load_device
from planner.specs.units import Dtype

GFX950 = architecture("gfx950")


@pytest.fixture(scope="module")
def tables() -> list[Golden]:
    if not TABLE.exists():
        assert os.environ.get("CI") != "true", f"{TABLE} is missing"
        pytest.skip(f"{TABLE} is not here")
    return golden()


def test_package_cycles_and_refusals_are_reproduced(tables: list[Golden]) -> None:
    assert len(tables) == 4
    for table in tables:
        predicted = equation(table, refuse_skinny=True)
        kept = np.isfinite(table.cycles)
        assert kept.sum() == 504 and kept.size == 576
        assert np.array_equal(np.isfinite(predicted), kept)
        # The table has six digits.
        assert np.abs(predicted[kept] / table.cycles[kept] - 1).max() < 6e-6


def test_package_ranking_is_reproduced(tables: list[Golden]) -> None:
    for table in tables:
        reached = agreement(equation(table, refuse_skinny=True), table.cycles)
        assert min(reached.spearman) > 0.9999
        assert min(reached.kendall) > 0.999
        assert reached.overall_spearman > 0.99999
        assert max(reached.regret) < 1 + 1e-6


def test_the_weights_order_tiles_that_the_bare_equation_cannot(tables: list[Golden]) -> None:
    for table in tables:
        bare = agreement(equation(table, NO_WEIGHT), table.cycles)
        assert 0.6 < np.mean(bare.spearman) < 0.9
        assert max(bare.regret) > 1.3


def test_own_model_ranks_much_as_the_equation_does(tables: list[Golden]) -> None:
    for table in tables:
        own = own_seconds(load_device(DEVICE[table.arch]), table)
        reached = agreement(own, equation(table))
        assert reached.overall_spearman > 0.95
        assert np.mean(reached.spearman) > 0.88
        # 131072x64x256: see docs/kernels.md on tiles wider than the matrix.
        assert sorted(reached.spearman)[1] > 0.77


def test_one_tile_by_hand() -> None:
    cycles = tile_cycles(GFX950, [Gemm(256, 256, 128)], [Tile(256, 256, 64)])[0, 0]
    compute = 16 * 16 * 2 * 16 / 4
    step_bytes = (256 + 256) * 64 * 2
    reached = 0.008  # of the HBM, by one unit
    hbm_rate = 9e12 / 2.2e9 * reached
    memory = step_bytes / hbm_rate + 200
    # No tile to share lines with: L2 and MALL both read all that the HBM does, and are faster.
    assert memory > max(compute, step_bytes / (17e12 / 2.2e9 / 256))
    prefetch = 0.95 * memory
    store = 0.95 * (256 * 256 * 2 / hbm_rate + compute)
    assert cycles == pytest.approx(memory + 500 + 1.5 * prefetch + 2 * store + 1)
    assert cycles == pytest.approx(17342.7, abs=0.1)


def test_bare_equation_by_hand_when_compute_bound() -> None:
    # 512 tiles are two full waves; 64 steps of which one is the prefetch.
    cycles = tile_cycles(GFX950, [Gemm(4096, 8192, 4096)], [Tile(256, 256, 64)], weights=NO_WEIGHT)[
        0, 0
    ]
    step_cycles = 16 * 16 * 2 * 4
    unit_bytes_per_cycle = 17e12 / 2.2e9 / 256
    memory = 2 * 256 * 64 * 2 / unit_bytes_per_cycle  # the L2 of one unit
    assert memory > step_cycles
    store = 256 * 256 * 256 * 2 / (9e12 / 2.2e9) + step_cycles
    assert cycles == pytest.approx(2 * (63 * memory + memory + store + 1))


@pytest.mark.parametrize(
    ("tiles", "steps", "launched"),
    [
        (256, 64, 256),  # one wave already
        (512, 64, 256),  # two tiles each
        (384, 64, 256),  # one and a half each
        (500, 64, 500),  # 500 / 1.5 is more than a wave: one tile each
        (100, 64, 200),  # two share a tile
        (100, 15, 100),  # ... which would leave each fewer than eight steps
        (30, 63, 180),  # six share a tile: eight would leave seven steps
        (30, 64, 240),  # deep: as many as fill the units and have eight steps
        (4, 256, 128),
    ],
)
def test_k_split_aware_grid_by_hand(tiles: int, steps: int, launched: int) -> None:
    found = programs(np.array([tiles * 1.0]), np.array([steps * 1.0]), 256, Grid.K_SPLIT_AWARE)
    assert found.tolist() == [launched]
    found = programs(np.array([tiles * 1.0]), np.array([steps * 1.0]), 256, Grid.DATA_PARALLEL)
    assert found.tolist() == [tiles]


def test_layout_decides_which_side_fills_whole_lines() -> None:
    gemms = [Gemm(8192, 8192, 8192, layout=layout) for layout in Layout]
    nt, nn, tn = tile_cycles(GFX950, gemms, [Tile(32, 32, 64), Tile(64, 64, 64)])
    assert nn[0] > nt[0] and tn[0] > nn[0]
    assert nt[1] == nn[1] == tn[1]


def test_tall_skinny_tiles_are_refused_on_demand() -> None:
    tiles = [Tile(256, 128, 32), Tile(256, 128, 64), Tile(256, 64, 64)]
    for layout, expected in ((Layout.NT, [False, True, False]), (Layout.TN, [False] * 3)):
        gemms = [Gemm(65536, 256, 512, layout=layout)]
        assert np.isfinite(tile_cycles(GFX950, gemms, tiles)).all()
        assert np.isinf(tile_cycles(GFX950, gemms, tiles, refuse_skinny=True)).tolist() == [
            expected
        ]
    assert np.isinf(
        tile_cycles(GFX950, [Gemm(128, 4096, 512)], [Tile(64, 32, 64)], refuse_skinny=True)
    ).all()


def test_rank_correlations_by_hand() -> None:
    a, b = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 2.0, 4.0])
    assert spearman(a, b) == pytest.approx(0.8)
    assert kendall(a, b) == pytest.approx(4 / 6)
    tied = np.array([1.0, 1.0, 2.0, 3.0])
    assert kendall(a, tied) == pytest.approx(5 / math.sqrt(6 * 5))


def test_errors_name_the_value_and_the_fix() -> None:
    with pytest.raises(UsageError, match=r"sm_90[\s\S]*use one of gfx942, gfx950"):
        architecture("sm_90")
    one = [Tile(64, 64, 64)]
    with pytest.raises(UsageError, match=r"\(0, 8, 8\)[\s\S]*at least 1"):
        tile_cycles(GFX950, [Gemm(0, 8, 8)], one)
    with pytest.raises(UsageError, match=r"tile without[\s\S]*\(64, -1, 64\)[\s\S]*at least 1"):
        tile_cycles(GFX950, [Gemm(8, 8, 8)], [Tile(64, -1, 64)])
    with pytest.raises(UsageError, match=r"batch[\s\S]*got 3[\s\S]*use batch 1"):
        tile_cycles(GFX950, [Gemm(8, 8, 8, batch=3)], one)
    without = GFX950._replace(instructions={Dtype.BF16: GFX950.instructions[Dtype.BF16]})
    with pytest.raises(UsageError, match=r"fp8[\s\S]*use one of bf16"):
        tile_cycles(without, [Gemm(8, 8, 8)], one, dtype=Dtype.FP8)
