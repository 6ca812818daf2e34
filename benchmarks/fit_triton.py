"""Fit the constants of the Triton kernels' model on a sweep; hold out whole (N, K) pairs.

    python -m benchmarks.fit_triton h200 --cross-validate 4

The loss is the mean |log error| of the times, near-best tiles first, plus the regret of a choice
by predicted time (a soft minimum), in logarithms. Constants are found in turns by an evolution
strategy (CMA-ES): each loop's, then the device's, a few times; a weak pull to the start values
keeps those that the data do not decide. Prints the section ``triton`` of the device profile, and
for each layout and dtype the speed of the chosen tile, and of the best of the first four, over that
of the best tile measured: geometric mean and least.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.evolution import minimise
from planner.cost.triton_gemm import Products, seconds
from planner.cost.triton_machine import triton_machine
from planner.kernels.candidates import tile_candidates
from planner.kernels.resources import TileArrays, architecture, fitting
from planner.specs.device import Constant, DeviceProfile, Provenance, TritonProfile
from planner.specs.kernels import Gemm, Layout
from planner.specs.load import load_device
from planner.specs.units import Dtype

Array = NDArray[np.float64]
Rows = NDArray[np.intp]
Constants = dict[str, float]

DEVICE_START: Constants = {
    "matrix_efficiency": 0.95, "register_efficiency": 0.6,
    "unit_l2_bytes_per_clock": 64.0, "l2_over_hbm": 1.5, "hbm_efficiency": 0.8,
    "store_over_hbm": 1.5,
    "unit_store_bytes_per_clock": 30.0, "unit_reduce_bytes_per_clock": 20.0, "launch_s": 1.2e-6,
    "fill_s": 1.2e-6, "finish_s": 5e-9, "hbm_latency_s": 3e-7, "reduce_s": 1.8e-6,
    "issue_s": 2.5e-9, "copy_s": 4.5e-9, "transpose_s": 1.1e-8, "scalar_s": 1.6e-9,
    "register_load_s": 5e-7,
}  # fmt: skip
LOOP_START: Constants = {
    "shared_efficiency": 1.0, "step_s": 2e-8, "latency_s": 1.5e-7, "latency_s_per_byte": 8e-12,
}  # fmt: skip
LOOPS = [f"{layout}_{bits}" for bits in (16, 32) for layout in Layout]
START = DEVICE_START | {f"{loop}.{name}": x for loop in LOOPS for name, x in LOOP_START.items()}
AT_MOST_ONE = ("matrix_efficiency", "register_efficiency", "hbm_efficiency")
VECTOR_EFFICIENCY = 0.3
MARGIN = 0.1
REGRET_WEIGHT = 5.0
SOFTNESS = 0.03
NEAR_BEST = 1.15
FAR_SHARE = 0.1
"""Of the tiles that are slower than that, how many the fit sees."""
PULL = 5e-4
MOST_STAGES = 4


SWEEPS = [
    Path("benchmarks/data/h200_gemm.csv.gz"),
    Path("benchmarks/data/h200_gemm_models.csv.gz"),
]


class Sweep(NamedTuple):
    """Measured tiles: one row each."""

    products: list[tuple[Dtype, Gemm]]
    product: Rows
    """Index into ``products``."""
    tiles: TileArrays
    us: Array
    candidate: NDArray[np.bool_]
    """Whether the planner considers the tile for the product, but for the split."""
    vendor_us: Array
    """Of each product; infinite where it was not measured."""

    def rows(self, chosen: NDArray[np.bool_]) -> Sweep:
        """Some of the rows."""
        tiles = TileArrays(*(column[chosen] for column in self.tiles))
        return self._replace(
            product=self.product[chosen],
            tiles=tiles,
            us=self.us[chosen],
            candidate=self.candidate[chosen],
        )

    def best_us(self) -> Array:
        """Of each product's tiles."""
        return least(self.us, self.product, len(self.products))


def least(values: Array, group: Rows, groups: int) -> Array:
    """Minimum of each group."""
    found = np.full(groups, np.inf)
    np.minimum.at(found, group, values)
    return found


def table(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt") as stream:
        yield from csv.DictReader(stream)


@cache
def considered(device: DeviceProfile, dtype: Dtype, layout: Layout) -> set[tuple[int, ...]]:
    """(block_m, block_n, block_k, warps, stages) of the candidates."""
    tiles = tile_candidates(device, dtype, layout)
    return {(t.block_m, t.block_n, t.block_k, t.num_warps, t.num_stages) for t in tiles}


def read_sweep(paths: Sequence[Path], device: DeviceProfile) -> Sweep:
    """Rows of tiles that fit the device without spilling."""
    index: dict[tuple[Dtype, Gemm], int] = {}
    product, tiles, us, candidate, vendor = [], [], [], [], {}
    for row in itertools.chain.from_iterable(map(table, paths)):
        sizes = (int(row[name]) for name in ("m", "n", "k"))
        key = Dtype(row["dtype"]), Gemm(*sizes, layout=Layout(row["layout"]))
        if row["backend"] == "vendor":
            vendor[key] = min(vendor.get(key, np.inf), float(row["us"]))
            continue
        product.append(index.setdefault(key, len(index)))
        names = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "split_k")
        tiles.append([*(float(row[name]) for name in names), 8.0, 0.0, 0.0, 1.0])
        us.append(float(row["us"]))
        shape = tuple(int(row[name]) for name in names[:-1])
        candidate.append(shape in considered(device, key[0], key[1].layout))
    columns = TileArrays(*np.array(tiles).T)
    lds_bytes = device.compute.lds_bytes.value
    keep = fitting(architecture(device), lds_bytes, 1, columns)
    sweep = Sweep(
        products=list(index),
        product=np.array(product, dtype=np.intp),
        tiles=columns,
        us=np.array(us),
        candidate=np.array(candidate),
        vendor_us=np.array([vendor.get(key, np.inf) for key in index]),
    )
    return sweep.rows(keep & (columns.num_stages <= MOST_STAGES))


def loop_of(dtype: Dtype, gemm: Gemm) -> str:
    return f"{gemm.layout}_{32 if dtype.bytes == 4 else 16}"


def profile(constants: Constants, source: str, error: float | None) -> TritonProfile:
    """The section ``triton`` with these constants."""

    def fitted(value: float) -> dict[str, Any]:
        return {
            "value": float(f"{value:.4g}"),
            "provenance": Provenance.MEASURED_FIT,
            "source": source,
            "error": error,
        }

    def assumed(value: float, why: str) -> dict[str, Any]:
        return {"value": value, "provenance": Provenance.ASSUMED, "source": why}

    loops = {
        loop: {name: fitted(constants[f"{loop}.{name}"]) for name in LOOP_START} for loop in LOOPS
    }
    return TritonProfile.model_validate(
        {
            **{name: fitted(constants[name]) for name in DEVICE_START},
            "vector_efficiency": assumed(VECTOR_EFFICIENCY, "no fp32 tile was measured"),
            "margin": assumed(
                MARGIN, "no tile that is chosen with it on the sweep is slower than the vendor"
            ),
            "loops": loops,
        }
    )


class Predictor:
    """Seconds of a sweep's rows: by a device's own constants, or by any."""

    def __init__(self, device: DeviceProfile, sweep: Sweep) -> None:
        self.device, self.rows = device, len(sweep.us)
        dtypes = np.array([dtype.value for dtype, _ in sweep.products])
        self.parts = []
        for dtype in (Dtype(value) for value in np.unique(dtypes)):
            gemms = [gemm for _, gemm in sweep.products]
            chosen = np.flatnonzero((dtypes == dtype.value)[sweep.product])
            columns = Products.of(gemms, dtype.bytes)
            of_rows = Products(*(column[sweep.product[chosen], 0] for column in columns))
            tiles = TileArrays(*(column[chosen] for column in sweep.tiles))
            self.parts.append((dtype, chosen, of_rows, tiles))

    def by(self, device: DeviceProfile) -> Array:
        found = np.empty(self.rows)
        for dtype, chosen, products, tiles in self.parts:
            found[chosen] = seconds(triton_machine(device, dtype), products, tiles)
        return found

    def __call__(self, constants: Constants) -> Array:
        triton = profile(constants, "trial", None)
        return self.by(self.device.model_copy(update={"triton": triton}))


def loss_of(device: DeviceProfile, sweep: Sweep) -> Callable[[Constants], float]:
    """Mean |log error| (near-best rows weigh most) + regret of the soft minimum."""
    predict, groups = Predictor(device, sweep), len(sweep.products)
    log_us, best = np.log(sweep.us), np.log(sweep.best_us())[sweep.product]
    behind = log_us - best
    weights = np.exp(-behind / 0.25) + 0.1
    weights /= np.bincount(sweep.product, weights, minlength=groups)[sweep.product]
    present = len(np.unique(sweep.product))

    def loss(constants: Constants) -> float:
        log_predicted = np.log(predict(constants) * 1e6)
        error = float(weights @ np.abs(log_predicted - log_us))
        first = least(log_predicted, sweep.product, groups)[sweep.product]
        chance = np.exp((first - log_predicted) / SOFTNESS)
        chance /= np.bincount(sweep.product, chance, minlength=groups)[sweep.product]
        return (error + REGRET_WEIGHT * float(chance @ behind)) / present

    return loss


def fit(device: DeviceProfile, sweep: Sweep, rounds: int, seed: int = 0) -> Constants:
    """Constants for ``sweep``; reads the near-best rows and a sample of the others."""
    random = np.random.default_rng(seed)
    near = sweep.us < NEAR_BEST * sweep.best_us()[sweep.product]
    some = near | (random.random(len(sweep.us)) < FAR_SHARE)
    seen = sweep.rows(some & sweep.candidate)
    loops = np.array([loop_of(*product) for product in seen.products])[seen.product]
    constants = dict(START)

    def improve(names: Sequence[str], part: Sweep, steps: int, spread: float) -> None:
        loss = loss_of(device, part)
        start = np.log([START[name] for name in names])

        def trial(logs: Array) -> float:
            values = dict(zip(names, np.exp(logs).tolist(), strict=True))
            above = sum(max(np.log(values.get(name, 1.0)), 0.0) ** 2 for name in AT_MOST_ONE)
            pull = PULL * float(np.sum((logs - start) ** 2))
            return loss(constants | values) + pull + 20 * above

        now = np.log([constants[name] for name in names])
        found = minimise(trial, now, spread, steps, seed)
        constants.update(zip(names, np.exp(found).tolist(), strict=True))

    def improve_loops(steps: int, spread: float) -> None:
        for loop in LOOPS:
            chosen = loops == loop
            if chosen.any():
                names = [f"{loop}.{name}" for name in LOOP_START]
                improve(names, seen.rows(chosen), steps, spread)

    for number in range(rounds):
        improve_loops(40 if number else 60, 0.25)
        improve(list(DEVICE_START), seen, 40, 0.15)
    improve_loops(40, 0.1)
    for name in AT_MOST_ONE:
        constants[name] = min(constants[name], 1.0)
    return constants


class Choice(NamedTuple):
    """Speed of candidates over that of the best tile measured, of each product."""

    first: Array
    first_four: Array


def choose(sweep: Sweep, predicted: Array, products: Iterable[int]) -> Choice:
    """What a choice by ``predicted`` gives up."""
    first, four = [], []
    for index in products:
        measured = sweep.product == index
        rows = np.flatnonzero(measured & sweep.candidate)
        if not len(rows):
            continue
        best = sweep.us[measured].min()
        order = sweep.us[rows[np.argsort(predicted[rows], kind="stable")]]
        first.append(best / order[0])
        four.append(best / order[:4].min())
    return Choice(np.array(first), np.array(four))


def summary(choice: Choice) -> str:
    mean, mean_of_four = (np.exp(np.log(part).mean()) for part in choice)
    return (
        f"{len(choice.first):4d} products: first {mean:.3f} (least {choice.first.min():.3f}), "
        f"best of four {mean_of_four:.3f} (least {choice.first_four.min():.3f})"
    )


def print_choice(sweep: Sweep, predicted: Array) -> None:
    for dtype in dict.fromkeys(dtype for dtype, _ in sweep.products):
        for layout in Layout:
            chosen = [
                index
                for index, (its_dtype, gemm) in enumerate(sweep.products)
                if its_dtype is dtype and gemm.layout is layout
            ]
            if chosen:
                print(f"# {dtype} {layout}: {summary(choose(sweep, predicted, chosen))}")
    print(f"# all: {summary(choose(sweep, predicted, range(len(sweep.products))))}")


def layer(gemm: Gemm) -> tuple[int, int]:
    """The sizes that do not carry the batch."""
    return (gemm.m, gemm.n) if gemm.layout is Layout.TN else (gemm.n, gemm.k)


def cross_validate(device: DeviceProfile, sweep: Sweep, folds: int, rounds: int) -> tuple[str, str]:
    """Choice and error on products whose layer the fit never saw."""
    layers = sorted({layer(gemm) for _, gemm in sweep.products})
    np.random.default_rng(1).shuffle(layers)
    choices, errors = [], []
    for fold in range(folds):
        held_out = {tuple(pair) for pair in layers[fold::folds]}
        outside = np.array([layer(gemm) in held_out for _, gemm in sweep.products])
        constants = fit(device, sweep.rows(~outside[sweep.product]), rounds)
        predicted = Predictor(device, sweep)(constants)
        choices.append(choose(sweep, predicted, np.flatnonzero(outside).tolist()))
        near = sweep.us < NEAR_BEST * sweep.best_us()[sweep.product]
        rows = outside[sweep.product] & near
        errors.append(np.abs(predicted[rows] * 1e6 / sweep.us[rows] - 1))
    choice = Choice(*(np.concatenate(parts) for parts in zip(*choices, strict=True)))
    return summary(choice), f"mean error of near-best tiles {np.concatenate(errors).mean():.3f}"


def section(triton: TritonProfile) -> str:
    """As YAML."""

    def line(name: str, constant: Constant, indent: int) -> str:
        error = "" if constant.error is None else f", error: {constant.error:.3g}"
        return (
            f"{' ' * indent}{name}: {{value: {constant.value:.4g}, "
            f'provenance: {constant.provenance}, source: "{constant.source}"{error}}}'
        )

    lines = ["triton:"]
    for name, value in triton:
        if isinstance(value, Constant):
            lines.append(line(name, value, 2))
    lines.append("  loops:")
    for loop, constants in triton.loops.items():
        lines.append(f"    {loop}:")
        lines += [line(name, value, 6) for name, value in constants]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device")
    parser.add_argument("--sweeps", type=Path, nargs="+", default=SWEEPS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cross-validate", type=int, default=0, metavar="FOLDS")
    arguments = parser.parse_args()
    device = load_device(arguments.device)
    sweep = read_sweep(arguments.sweeps, device)
    constants = fit(device, sweep, arguments.rounds)
    predicted = Predictor(device, sweep)(constants)
    near = sweep.us < NEAR_BEST * sweep.best_us()[sweep.product]
    error = float(np.mean(np.abs(predicted[near] * 1e6 / sweep.us[near] - 1)))
    source = f"benchmarks/fit_triton.py on {' and '.join(map(Path.as_posix, arguments.sweeps))}"
    print(section(profile(constants, source, float(f"{error:.2g}"))))
    print_choice(sweep, predicted)
    for path in arguments.sweeps:
        one = read_sweep([path], device)
        predicted_one = Predictor(device, one)(constants)
        print(f"# {path.name}: {summary(choose(one, predicted_one, range(len(one.products))))}")
    if arguments.cross_validate:
        held_out = cross_validate(device, sweep, arguments.cross_validate, arguments.rounds)
        print("# held out:", *held_out)


if __name__ == "__main__":
    main()
