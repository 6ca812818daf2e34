"""The choice by predicted time against tiles measured on an H200."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.evolution import minimise
from benchmarks.fit_triton import (
    START,
    Choice,
    Predictor,
    Sweep,
    choose,
    profile,
    read_sweep,
    section,
)
from planner.specs.device import DeviceProfile, TritonProfile
from planner.specs.kernels import Layout
from planner.specs.load import load_device
from planner.specs.units import Dtype
from tests.cost.helpers import data_file

OWN = Path(__file__).parent.parent.parent / "benchmarks" / "data" / "h200_gemm.csv.gz"


@cache
def h200() -> DeviceProfile:
    return load_device("h200")


@cache
def measured(path: Path) -> tuple[Sweep, np.ndarray]:
    """Tiles, and their predicted seconds by the shipped constants."""
    sweep = read_sweep([path], h200())
    return sweep, Predictor(h200(), sweep).by(h200())


def geometric_mean(speeds: np.ndarray) -> float:
    return float(np.exp(np.log(speeds).mean()))


def choices(path: Path, dtype: Dtype, layout: Layout) -> Choice:
    sweep, predicted = measured(path)
    chosen = [
        index
        for index, (its_dtype, gemm) in enumerate(sweep.products)
        if its_dtype is dtype and gemm.layout is layout
    ]
    return choose(sweep, predicted, chosen)


def test_chosen_tiles_of_our_kernel() -> None:
    sweep, predicted = measured(OWN)
    assert len(sweep.products) >= 60
    choice = choose(sweep, predicted, range(len(sweep.products)))
    assert geometric_mean(choice.first) >= 0.95
    assert choice.first.min() >= 0.69
    assert geometric_mean(choice.first_four) >= 0.98


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.TF32])
@pytest.mark.parametrize("layout", list(Layout))
def test_chosen_tiles_in_each_layout(dtype: Dtype, layout: Layout) -> None:
    choice = choices(OWN, dtype, layout)
    assert geometric_mean(choice.first) >= 0.92
    assert geometric_mean(choice.first_four) >= 0.975


@pytest.mark.parametrize("layout", [Layout.NN, Layout.TN])
def test_chosen_tiles_of_a_kernel_that_the_fit_never_saw(layout: Layout) -> None:
    """Another Triton kernel, other shapes and another compiler: the mechanisms carry over."""
    choice = choices(data_file("gemm/triton_h200_sweep.csv.gz"), Dtype.BF16, layout)
    assert geometric_mean(choice.first) >= 0.94
    assert geometric_mean(choice.first_four) >= 0.975


def test_absolute_times_of_near_best_tiles() -> None:
    sweep, predicted = measured(OWN)
    near = sweep.us < 1.15 * sweep.best_us()[sweep.product]
    errors = np.abs(predicted[near] * 1e6 / sweep.us[near] - 1)
    assert errors.mean() < 0.11


def test_what_a_choice_gives_up_by_hand() -> None:
    sweep, _ = measured(OWN)
    few = sweep.rows(np.arange(len(sweep.us)) < 6)._replace(
        product=np.array([0, 0, 0, 0, 0, 1]),
        us=np.array([3.0, 2.0, 4.0, 5.0, 1.0, 7.0]),
        candidate=np.ones(6, dtype=bool),
    )
    choice = choose(few, np.array([1.0, 2.0, 3.0, 4.0, 5.0, 9.0]), (0, 1))
    assert choice.first.tolist() == [1 / 3, 1.0]
    assert choice.first_four.tolist() == [1 / 2, 1.0]


def test_printed_section_is_a_section() -> None:
    found = profile(START, "a test", 0.1)
    read = yaml.safe_load(section(found))["triton"]
    assert set(read) == set(TritonProfile.model_fields)
    assert float(read["loops"]["tn_32"]["latency_s"]["value"]) == START["tn_32.latency_s"]


def test_evolution_finds_the_bottom_of_a_curved_valley() -> None:
    def valley(x: np.ndarray) -> float:
        return float((1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2)

    found = minimise(valley, np.array([-1.0, 1.5]), spread=0.5, steps=150, seed=0)
    assert found == pytest.approx(np.ones(2), abs=1e-3)
