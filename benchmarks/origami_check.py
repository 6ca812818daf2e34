"""Compare Origami's equation as implemented here with the package's own predictions.

    python -m benchmarks.origami_check

Reads the cycles that rocm-origami 0.0.3 predicts for 12 products under 48 tiles on gfx942 and
gfx950 (bf16, both operands contiguous along k). Prints how ``planner.kernels.origami`` ranks the
tiles against the package, what each of the package's weights does to the ranking, and where
hwplan's own tile model ranks otherwise. A pick's regret is the reference's cycles of that pick over
the reference's least.
"""

from __future__ import annotations

import csv
from itertools import product, starmap
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.fitting import DATA
from planner.cost.gemm import (
    CANDIDATES,
    SPLITS,
    STEP_BYTES,
    candidate_seconds,
    gemm_seconds,
    machine,
)
from planner.cost.triton_gemm import tile_seconds
from planner.kernels import resources
from planner.kernels.origami import Grid, Tile, tile_cycles
from planner.kernels.origami_constants import PACKAGE, Weights, architecture
from planner.kernels.resources import TileArrays, fitting
from planner.specs.device import DeviceProfile
from planner.specs.kernels import Gemm, Layout, TileConfig
from planner.specs.load import load_device
from planner.specs.units import Dtype

Array = NDArray[np.float64]

TABLE = DATA / "gemm" / "origami_0.0.3_predicted_cycles_bf16_TN.csv"
MEASURED = DATA / "gemm" / "amd_bf16_gemm_measured.csv"
SIDES = (16, 32, 64, 128, 256)
DEVICE = {"gfx942": "mi300x", "gfx950": "mi350x"}
"""Profiles with the table's units and clocks."""
EXAMPLES = (
    (Gemm(131072, 64, 256), Tile(64, 64, 64), Grid.DATA_PARALLEL, "line_bytes"),
    (Gemm(131072, 64, 256), Tile(64, 128, 64), Grid.DATA_PARALLEL, "line_bytes"),
    (Gemm(131072, 64, 256), Tile(64, 256, 64), Grid.DATA_PARALLEL, "line_bytes"),
    (Gemm(1, 151936, 4096), Tile(16, 128, 64), Grid.DATA_PARALLEL, "line_bytes"),
    (Gemm(1024, 1024, 16384), Tile(32, 32, 64), Grid.DATA_PARALLEL, "step_cycles"),
    (Gemm(3000, 1500, 700), Tile(32, 32, 64), Grid.DATA_PARALLEL, "ragged_k_cycles"),
    (Gemm(256, 256, 65536), Tile(128, 64, 64), Grid.K_SPLIT_AWARE, "split_cycles"),
    (Gemm(256, 256, 65536), Tile(64, 128, 64), Grid.K_SPLIT_AWARE, "split_cycles"),
)
SIX_DIGITS = 1e-5
"""Relative difference that the table's rounding leaves."""
NO_WEIGHT = Weights(
    line_bytes=2, prefetch=1, store=1, occupancy=1,
    step_cycles=0, hbm_latency_cycles=0, split_cycles=0, ragged_k_cycles=0,
)  # fmt: skip
WITHOUT = {
    **{name: PACKAGE._replace(**{name: value}) for name, value in NO_WEIGHT._asdict().items()},
    "all (bare equation)": NO_WEIGHT,
}


class Golden(NamedTuple):
    """The package's predictions for one architecture and grid rule."""

    arch: str
    grid: Grid
    gemms: list[Gemm]
    tiles: list[Tile]
    cycles: Array
    """Products x tiles; infinite where the package refused the tile."""


def golden(table: Path = TABLE) -> list[Golden]:
    """The table, one entry for each architecture and grid rule."""
    found: dict[tuple[str, str], dict[tuple[Gemm, Tile], float]] = {}
    with table.open() as stream:
        for row in csv.DictReader(stream):
            gemm = Gemm(int(row["M"]), int(row["N"]), int(row["K"]), layout=Layout.NT)
            tile = Tile(int(row["mt_m"]), int(row["mt_n"]), int(row["mt_k"]))
            cycles = float(row["latency_cycles"] or "inf")
            found.setdefault((row["arch"], row["grid"]), {})[gemm, tile] = cycles
    entries = []
    for (arch, grid), cells in found.items():
        gemms = list(dict.fromkeys(gemm for gemm, _ in cells))
        tiles = list(dict.fromkeys(tile for _, tile in cells))
        cycles = np.array([[cells[gemm, tile] for tile in tiles] for gemm in gemms])
        entries.append(Golden(arch, Grid(grid), gemms, tiles, cycles))
    return entries


def ranks(values: Array) -> Array:
    """1-based ranks, ties share their mean rank."""
    below = (values[:, None] > values).sum(axis=1)
    return below + ((values[:, None] == values).sum(axis=1) + 1) / 2


def spearman(a: Array, b: Array) -> float:
    """Correlation of ranks."""
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def kendall(a: Array, b: Array) -> float:
    """Kendall's tau-b: concordant minus discordant pairs, corrected for ties."""
    sign_a, sign_b = np.sign(a[:, None] - a), np.sign(b[:, None] - b)
    return float((sign_a * sign_b).sum() / np.sqrt((sign_a**2).sum() * (sign_b**2).sum()))


class Agreement(NamedTuple):
    """How one prediction ranks tiles against another, by product."""

    spearman: list[float]
    kendall: list[float]
    regret: list[float]
    overall_spearman: float
    """Over all (product, tile) pairs."""


def agreement(predicted: Array, reference: Array) -> Agreement:
    """Products x tiles each; pairs that either leaves out (infinite) do not count."""
    kept = np.isfinite(predicted) & np.isfinite(reference)
    rows = [
        (ours[keep], theirs[keep])
        for ours, theirs, keep in zip(predicted, reference, kept, strict=True)
    ]
    return Agreement(
        spearman=[spearman(*row) for row in rows],
        kendall=[kendall(*row) for row in rows],
        regret=[float(theirs[ours.argmin()] / theirs.min()) for ours, theirs in rows],
        overall_spearman=spearman(predicted[kept], reference[kept]),
    )


def equation(table: Golden, weights: Weights = PACKAGE, refuse_skinny: bool = False) -> Array:
    """Cycles by ``planner.kernels.origami``, products x tiles of ``table``."""
    return tile_cycles(
        architecture(table.arch),
        table.gemms,
        table.tiles,
        grid=table.grid,
        weights=weights,
        refuse_skinny=refuse_skinny,
    )


def own_seconds(device: DeviceProfile, table: Golden) -> Array:
    """hwplan's model of the vendor's library, products x tiles; infinite for a tile that is none of
    its candidates.

    Its split factors are free where the package's grid rule may split, else one.
    """
    m, n, k = (np.array([[gemm[index]] for gemm in table.gemms], float) for index in range(3))
    seconds = candidate_seconds(machine(device, Dtype.BF16), m, n, k, np.ones_like(m))
    step_k = STEP_BYTES // Dtype.BF16.bytes
    found = np.full((len(m), len(table.tiles)), np.inf)
    for column, (tile_m, tile_n, split) in enumerate(CANDIDATES):
        tile = Tile(tile_m, tile_n, step_k)
        if tile in table.tiles and split in splits(table.grid):
            of_tile = found[:, table.tiles.index(tile)]
            np.minimum(of_tile, seconds[:, column], out=of_tile)
    return found


def triton_seconds(device: DeviceProfile, table: Golden) -> Array:
    """hwplan's model of its own Triton kernels, products x tiles; infinite for a tile that does not
    fit the device. Splits as in ``own_seconds``."""
    configs = [
        TileConfig(
            block_m=tile.m,
            block_n=tile.n,
            block_k=tile.k,
            num_warps=8 if tile.m * tile.n >= 128 * 128 else 4,
            num_stages=2,
            split_k=split,
            matrix_instr_nonkdim=16,
        )
        for tile in table.tiles
        for split in splits(table.grid)
    ]
    tiles = TileArrays.of(configs)
    seconds = tile_seconds(device, Dtype.BF16, table.gemms, tiles)
    lds_bytes = device.compute.lds_bytes.value
    fit = fitting(resources.architecture(device), lds_bytes, Dtype.BF16.bytes, tiles)
    possible = np.where(fit, seconds, np.inf)
    return possible.reshape(len(table.gemms), len(table.tiles), -1).min(axis=2)


def splits(grid: Grid) -> tuple[int, ...]:
    return SPLITS[:1] if grid is Grid.DATA_PARALLEL else SPLITS


def shape(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes[:3]))


def print_reproduction(tables: list[Golden]) -> None:
    for table in tables:
        predicted = equation(table, refuse_skinny=True)
        kept = np.isfinite(table.cycles)
        error = np.abs(predicted[kept] / table.cycles[kept] - 1)
        reached = agreement(predicted, table.cycles)
        refusals_equal = np.array_equal(np.isfinite(predicted), kept)
        print(
            f"{table.arch} {table.grid}: {kept.sum()} cells, {(~kept).sum()} refused "
            f"({'the same' if refusals_equal else 'others'} here); error median "
            f"{np.median(error):.1e} max {error.max():.1e}; Spearman over all "
            f"{reached.overall_spearman:.6f}"
        )
        for gemm, rho, tau, regret in zip(
            table.gemms, reached.spearman, reached.kendall, reached.regret, strict=True
        ):
            print(f"  {shape(gemm):18} Spearman {rho:.5f} Kendall {tau:.5f} regret {regret:.3f}")
        same = sum(regret < 1 + SIX_DIGITS for regret in reached.regret)
        print(f"  same pick: {same} of {len(table.gemms)}")


def print_weights(tables: list[Golden]) -> None:
    print("Without a weight (over all four tables, refusals off): ")
    for name, weights in WITHOUT.items():
        rows = [agreement(equation(table, weights), equation(table)) for table in tables]
        rhos, regrets = np.array([row.spearman for row in rows]), [row.regret for row in rows]
        print(
            f"  {name:22} Spearman mean {rhos.mean():.3f} least {rhos.min():.3f}; "
            f"regret mean {np.mean(regrets):.3f} most {np.max(regrets):.3f}"
        )


def print_own(table: Golden, name: str, seconds: Array) -> None:
    own = seconds * 1e6
    theirs = equation(table) / architecture(table.arch).clock_hz * 1e6
    theirs = np.where(np.isfinite(own), theirs, np.inf)
    reached = agreement(own, theirs)
    print(
        f"{name} ({DEVICE[table.arch]}) against the equation, {table.grid}, "
        f"{np.isfinite(own[0]).sum()} tiles: Spearman mean {np.mean(reached.spearman):.3f}, "
        f"over all {reached.overall_spearman:.3f}"
    )
    for row, gemm in enumerate(table.gemms):
        ours, other = own[row].argmin(), theirs[row].argmin()
        print(
            f"  {shape(gemm):18} Spearman {reached.spearman[row]:6.3f}; "
            f"pick {shape(table.tiles[ours]):11} {own[row, ours]:7.1f} us "
            f"(equation {theirs[row, ours]:7.1f}); "
            f"its pick {shape(table.tiles[other]):11} {theirs[row, other]:7.1f} us "
            f"(ours {own[row, other]:7.1f})"
        )


def print_lds(tables: list[Golden]) -> None:
    """Picks of the table that no program could run."""
    for table in tables:
        lds_bytes = load_device(DEVICE[table.arch]).compute.lds_bytes.value
        picks = [table.tiles[index] for index in table.cycles.argmin(axis=1)]
        over = sum((t.m + t.n) * t.k * Dtype.BF16.bytes > lds_bytes for t in picks)
        print(f"{table.arch} {table.grid}: {over} of {len(picks)} picks exceed the LDS")


def print_refusals(tables: list[Golden]) -> None:
    """What the package's refusals cost by its own cycles."""
    for table in tables:
        free = equation(table)
        for gemm, cycles, kept in zip(table.gemms, free, np.isfinite(table.cycles), strict=True):
            if not kept.all():
                ratio = cycles[kept].min() / cycles.min()
                print(f"{table.arch} {table.grid} {shape(gemm)}: {ratio:.2f} as slow by refusals")


def print_examples() -> None:
    """Single cells that docs/kernels.md argues with."""
    print("Single tiles on gfx950, equation against ours, us:")
    target, device = architecture("gfx950"), load_device(DEVICE["gfx950"])
    for gemm, tile, grid, left_out in EXAMPLES:
        table = Golden("gfx950", grid, [gemm], [tile], np.empty((1, 1)))
        microseconds = equation(table)[0, 0] / target.clock_hz * 1e6
        without = equation(table, WITHOUT[left_out])[0, 0] / target.clock_hz * 1e6
        print(
            f"  {shape(gemm):16} {shape(tile):10} {grid:13} {microseconds:7.1f} "
            f"({without:7.1f} without {left_out}), {own_seconds(device, table)[0, 0] * 1e6:7.1f}"
        )


def print_measured() -> None:
    """Both models' fastest candidate against the best measured kernel of each product (gfx950)."""
    with MEASURED.open() as stream:
        rows = [row for row in csv.DictReader(stream) if row["gfx"] == "gfx950"]
    fastest: dict[Gemm, float] = {}
    for row in rows:
        gemm, microseconds = Gemm(int(row["M"]), int(row["N"]), int(row["K"])), float(row["us"])
        if microseconds > 0:
            fastest[gemm] = min(fastest.get(gemm, np.inf), microseconds)
    gemms, measured = list(fastest), np.array(list(fastest.values()))
    device = load_device("mi355x")
    target = architecture("gfx950")._replace(clock_hz=device.compute.clock_hz.value)
    tiles = [
        tile
        for tile in starmap(Tile, product(SIDES, SIDES, SIDES))
        if (tile.m + tile.n) * tile.k * Dtype.BF16.bytes <= device.compute.lds_bytes.value
    ]
    cycles = tile_cycles(target, gemms, tiles, grid=Grid.K_SPLIT_AWARE).min(axis=1)
    predictions = {
        "equation": cycles / target.clock_hz * 1e6,
        "hwplan": np.array([gemm_seconds(device, *g[:3], Dtype.BF16) * 1e6 for g in gemms]),
    }
    short = np.array([min(gemm.m, gemm.n) for gemm in gemms])
    print(f"{len(gemms)} products measured on gfx950, fastest of {len(tiles)} tiles:")
    for label, group in (
        ("all", short > 0),
        ("short side <= 16", short <= 16),
        ("short side > 16", short > 16),
    ):
        for name, predicted in predictions.items():
            ratio = predicted[group] / measured[group]
            print(
                f"  {label:16} {group.sum():5} {name:8} error mean {np.abs(ratio - 1).mean():.3f} "
                f"bias {np.exp(np.log(ratio).mean()):.2f} "
                f"Spearman {spearman(predicted[group], measured[group]):.3f}"
            )


def main() -> None:
    tables = golden()
    print_reproduction(tables)
    print_weights(tables)
    print_lds(tables)
    print_refusals(tables)
    for table in tables:
        device = load_device(DEVICE[table.arch])
        print_own(table, "vendor model", own_seconds(device, table))
        if device.triton is not None:
            print_own(table, "Triton model", triton_seconds(device, table))
    print_examples()
    print_measured()


if __name__ == "__main__":
    main()
