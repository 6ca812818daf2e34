"""How good the selector is on the GPU at hand: its choices against all candidates, measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from planner.kernels.candidates import tile_candidates
from planner.kernels.select import select_kernels
from planner.specs.base import NonNegativeInt, PositiveFloat, Spec
from planner.specs.device import DeviceProfile
from planner.specs.errors import UsageError
from planner.specs.kernels import Backend, Gemm, Layout, TileConfig
from planner.specs.load import DEVICES, load_device, names_in
from planner.specs.units import Dtype
from trainers.kernels.launch import device_arch
from trainers.kernels.shapes import Shape

MEASURED_TOGETHER = 21
"""Products whose kernels are compiled before the first of them is measured."""
LISTED_TILES = 9
"""The selector's first ones: measured whether or not they look sensible."""
SHORT_SPLIT_K = 8192
"""Weight gradients with at least this k and few tiles are where splits of k matter."""
SMALL_MN = 1024 * 512


class Timer(Protocol):
    """Measures; ``trainers.kernels.timing.Gpu`` on a GPU."""

    def compile(self, wanted: Iterable[tuple[Dtype, Gemm, TileConfig]]) -> None:
        """Make ready what ``tiles_us`` will be asked for."""

    def tiles_us(
        self, dtype: Dtype, gemm: Gemm, tiles: Sequence[TileConfig]
    ) -> tuple[float, dict[TileConfig, float]]:
        """Microseconds of the vendor's library, and of each tile that runs."""


class Measured(Spec):
    """One product."""

    dtype: Dtype
    layout: Layout
    m: int
    n: int
    k: int
    vendor_us: PositiveFloat
    vendor_predicted_us: PositiveFloat
    selected: TileConfig
    """The Triton tile that the selector ranks first."""
    selected_us: PositiveFloat
    selected_predicted_us: PositiveFloat
    top_us: PositiveFloat
    """Best of the selector's first few tiles."""
    best: TileConfig
    best_us: PositiveFloat
    """Of all candidates."""
    candidates: NonNegativeInt
    picked: Backend
    """Whose kernel a plan would run."""

    @property
    def picked_us(self) -> float:
        """Of the kernel that a plan would run."""
        return self.vendor_us if self.picked is Backend.VENDOR else self.selected_us


class Ratio(Spec):
    """Of speeds, over products: 1 is as fast as the better one."""

    geometric_mean: PositiveFloat
    least: PositiveFloat
    products: NonNegativeInt

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio | None:
        """None if there is nothing to average."""
        if not ratios:
            return None
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        return cls(geometric_mean=mean, least=min(ratios), products=len(ratios))


class Summary(Spec):
    """The selector's regret; speeds relative to the best that was measured."""

    selected: Ratio | None
    """The selected tile against the best tile."""
    top: Ratio | None
    """The best of the first few against the best tile."""
    picked: Ratio | None
    """What a plan runs against the better of vendor and best tile."""
    against_vendor: Ratio | None
    """What a plan runs against the vendor's library; below 1 it is slower."""
    weight_gradients: Ratio | None
    """The same for the weight gradients with small m n and long k that a plan gives to Triton."""
    vendor_error: float
    """Mean relative error of the predicted time of the vendor's library."""
    selected_error: float
    """The same for the selected tiles."""


class Report(Spec):
    """Everything that ``hwplan kernels bench`` found."""

    device: str
    gpu: str
    top_k: int
    asked: NonNegativeInt
    """Products asked for; fewer are measured if the time ran out."""
    unusable: NonNegativeInt
    """Products left out, because none of the selector's first tiles runs on this GPU."""
    exhaustive: bool
    """Whether all candidates were measured, or only the selector's first ones."""
    summary: Summary
    measured: tuple[Measured, ...]


def bench(
    device: DeviceProfile,
    shapes: Sequence[Shape],
    timer: Timer,
    *,
    top_k: int = 4,
    exhaustive: bool = True,
    seconds: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Measure every product's candidates.

    Args:
        exhaustive: all candidates; else only the selector's first ones.
        seconds: no product is begun after so long, compiling included.

    Raises:
        UsageError: the device has no such precision, or it cannot be measured, or ``top_k`` is not
            positive.
    """
    if top_k < 1:
        raise UsageError("must be 1 or more", field="top_k", value=top_k, fix="use 4")
    if any(shape.dtype is Dtype.FP8 for shape in shapes):
        raise UsageError(
            "fp8 cannot be compared: torch.matmul does not multiply it",
            field="dtype",
            value=Dtype.FP8.value,
            fix="measure other precisions, for example --dtypes bf16",
        )
    began = time.monotonic()
    work = [(shape, _candidates(device, shape, top_k, exhaustive)) for shape in shapes]
    found: list[Measured | None] = []
    for done, (shape, tiles) in enumerate(work):
        if time.monotonic() - began >= seconds:
            break
        if done % MEASURED_TOGETHER == 0:
            together = work[done : done + MEASURED_TOGETHER]
            timer.compile((s.dtype, s.gemm, tile) for s, tiles in together for tile in tiles)
        found.append(_measure(device, shape, tiles, timer, top_k))
        if progress is not None:
            progress(done + 1, len(work))
    measured = tuple(item for item in found if item is not None)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return Report(
        device=device.name,
        gpu=gpu,
        top_k=top_k,
        asked=len(shapes),
        unusable=len(found) - len(measured),
        exhaustive=exhaustive,
        summary=summarise(measured),
        measured=measured,
    )


def _candidates(
    device: DeviceProfile, shape: Shape, top_k: int, exhaustive: bool
) -> tuple[TileConfig, ...]:
    """What the selector ranks highest, and all that are not far larger than the matrix."""
    gemm = shape.gemm

    def sensible(tile: TileConfig) -> bool:
        fits = all(
            block < 2 * max(size, 16)
            for block, size in ((tile.block_m, gemm.m), (tile.block_n, gemm.n))
        )
        return fits and tile.split_k * tile.block_k < 2 * max(gemm.k, tile.block_k)

    listed = max(LISTED_TILES, top_k + 1)
    ranked = select_kernels(device, shape.dtype, [gemm], listed)[0]
    family = tile_candidates(device, shape.dtype, gemm.layout) if exhaustive else ()
    chosen = (kernel.tile for kernel in ranked if kernel.tile is not None)
    return tuple(dict.fromkeys((*chosen, *filter(sensible, family))))


def _measure(
    device: DeviceProfile, shape: Shape, tiles: Sequence[TileConfig], timer: Timer, top_k: int
) -> Measured | None:
    gemm = shape.gemm
    # One place of the ranking is the vendor's.
    ranked = select_kernels(device, shape.dtype, [gemm], top_k + 1)[0]
    ours = [kernel for kernel in ranked if kernel.tile is not None][:top_k]
    theirs = next(kernel for kernel in ranked if kernel.tile is None)
    vendor_us, found = timer.tiles_us(shape.dtype, gemm, tiles)
    usable = [kernel for kernel in ours if kernel.tile in found]
    if not usable:
        return None
    best = min(found, key=lambda tile: found[tile])
    selected = usable[0]
    assert selected.tile is not None
    return Measured(
        dtype=shape.dtype,
        layout=gemm.layout,
        m=gemm.m,
        n=gemm.n,
        k=gemm.k,
        vendor_us=vendor_us,
        vendor_predicted_us=theirs.predicted_us,
        selected=selected.tile,
        selected_us=found[selected.tile],
        selected_predicted_us=selected.predicted_us,
        top_us=min(found[kernel.tile] for kernel in usable if kernel.tile is not None),
        best=best,
        best_us=found[best],
        candidates=len(found),
        picked=ranked[0].backend,
    )


def summarise(measured: Sequence[Measured]) -> Summary:
    """Regret over products."""
    gains = [
        item.vendor_us / item.picked_us
        for item in measured
        if item.layout is Layout.TN
        and item.picked is Backend.TRITON
        and item.k >= SHORT_SPLIT_K
        and item.m * item.n <= SMALL_MN
    ]
    return Summary(
        selected=Ratio.of([item.best_us / item.selected_us for item in measured]),
        top=Ratio.of([item.best_us / item.top_us for item in measured]),
        picked=Ratio.of([min(item.best_us, item.vendor_us) / item.picked_us for item in measured]),
        against_vendor=Ratio.of([item.vendor_us / item.picked_us for item in measured]),
        weight_gradients=Ratio.of(gains),
        vendor_error=_mean_error((i.vendor_predicted_us, i.vendor_us) for i in measured),
        selected_error=_mean_error((i.selected_predicted_us, i.selected_us) for i in measured),
    )


def _mean_error(pairs: Iterable[tuple[float, float]]) -> float:
    errors = [abs(predicted / found - 1) for predicted, found in pairs]
    return math.fsum(errors) / len(errors) if errors else 0.0


def device_at_hand(name: str) -> DeviceProfile:
    """The profile called ``name``; ``auto``: that of this machine's first GPU, by its name, or by
    its architecture where only one profile has that.

    Raises:
        UsageError: no GPU, or none of the shipped profiles is its.
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "this machine has no GPU that PyTorch can use",
            field="--device",
            value=name,
            fix="run it on the GPU machine; hwplan kernels select needs no GPU",
        )
    if name != "auto":
        return load_device(name)
    gpu = torch.cuda.get_device_name()
    words = gpu.lower().replace("-", " ").split()
    shipped = [load_device(shipped_name) for shipped_name in names_in(DEVICES)]
    named = [profile for profile in shipped if profile.name in words]
    alike = [profile for profile in shipped if profile.arch == device_arch(0)]
    for found in (named, alike):
        if len(found) == 1:
            return found[0]
    closest = [profile.name for profile in alike or shipped]
    raise UsageError(
        f"no device profile for this GPU ({gpu}, {device_arch(0)})",
        field="--device",
        value=name,
        fix=f"name the closest one with --device: {', '.join(closest)}, or a profile file",
    )
