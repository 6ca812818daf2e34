"""How good the selector is on the GPU at hand: its choices against all candidates, measured."""

from __future__ import annotations

import csv
import io
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from planner.cost.dense import Linear, dense_network, step_gemms
from planner.kernels.candidates import tile_candidates
from planner.kernels.select import select_kernels
from planner.specs.base import NonNegativeInt, PositiveFloat, Spec, read_text
from planner.specs.device import DeviceProfile
from planner.specs.errors import SpecError, UsageError
from planner.specs.kernels import Backend, Gemm, Layout, TileConfig
from planner.specs.load import DEVICES, load_device, load_model, names_in
from planner.specs.units import Dtype

BATCHES = (512, 2048, 8192, 27648, 65536)
MODELS = ("dlrm", "dlrm_v1_1tb", "wukong_criteo")
DLRMV4_LAYERS = ((1536, 512), (512, 512), (512, 2048), (512, 1))
"""(inputs, outputs) of MLPerf recommendation_v4: item MLP, HSTU projections, head."""
PER_GROUP = 14
"""Products of each layout and precision."""
LARGEST_BYTES = 4e9
COLUMNS = ("m", "n", "k", "layout", "dtype")
SHORT_SPLIT_K = 8192
"""Weight gradients with at least this k and few tiles are where splits of k matter."""
SMALL_MN = 1024 * 512


class Shape(NamedTuple):
    """A product in one precision."""

    dtype: Dtype
    gemm: Gemm


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
    summary: Summary
    measured: tuple[Measured, ...]


def bench(
    device: DeviceProfile,
    shapes: Sequence[Shape],
    timer: Timer,
    *,
    top_k: int = 4,
    seconds: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Measure every product's candidates.

    Args:
        seconds: no product is begun after so long.

    Raises:
        UsageError: the device has no Triton kernels, or no such precision.
    """
    began = time.monotonic()
    work = [(shape, _candidates(device, shape)) for shape in shapes]
    timer.compile((s.dtype, s.gemm, tile) for s, tiles in work for tile in tiles)
    measured = []
    for done, (shape, tiles) in enumerate(work):
        if time.monotonic() - began > seconds:
            break
        measured.append(_measure(device, shape, tiles, timer, top_k))
        if progress is not None:
            progress(done + 1, len(work))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return Report(
        device=device.name,
        gpu=gpu,
        top_k=top_k,
        asked=len(shapes),
        summary=summarise(measured),
        measured=tuple(measured),
    )


def _candidates(device: DeviceProfile, shape: Shape) -> tuple[TileConfig, ...]:
    """All that are not far larger than the matrix, and what the selector ranks highest."""
    gemm = shape.gemm

    def sensible(tile: TileConfig) -> bool:
        fits = all(
            block < 2 * max(size, 16)
            for block, size in ((tile.block_m, gemm.m), (tile.block_n, gemm.n))
        )
        return fits and tile.split_k * tile.block_k < 2 * max(gemm.k, tile.block_k)

    ranked = select_kernels(device, shape.dtype, [gemm], top_k=9)[0]
    family = tile_candidates(device, shape.dtype, gemm.layout)
    chosen = (kernel.tile for kernel in ranked if kernel.tile is not None)
    return tuple(dict.fromkeys((*chosen, *filter(sensible, family))))


def _measure(
    device: DeviceProfile, shape: Shape, tiles: Sequence[TileConfig], timer: Timer, top_k: int
) -> Measured:
    gemm = shape.gemm
    # One place of the ranking is the vendor's.
    ranked = select_kernels(device, shape.dtype, [gemm], top_k + 1)[0]
    ours = [kernel for kernel in ranked if kernel.tile is not None][:top_k]
    theirs = next(kernel for kernel in ranked if kernel.tile is None)
    vendor_us, found = timer.tiles_us(shape.dtype, gemm, tiles)
    usable = [kernel for kernel in ours if kernel.tile in found]
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


def default_shapes(seed: int = 0) -> tuple[Shape, ...]:
    """Products of dlrm, dlrm_v1_1tb, wukong_criteo and dlrmv4 layers at several local batches: as
    many of each layout and precision."""
    pool = sorted({Gemm(*gemm[:3], layout=gemm.layout) for gemm in model_gemms()})
    choose = random.Random(seed)
    found = []
    for dtype in (Dtype.BF16, Dtype.TF32):
        for layout in Layout:
            group = [gemm for gemm in pool if gemm.layout is layout]
            found += [Shape(dtype, gemm) for gemm in choose.sample(group, PER_GROUP)]
    return tuple(found)


def model_gemms() -> Iterator[Gemm]:
    """Products of the models' steps at all ``BATCHES``."""
    for batch in BATCHES:
        for name in MODELS:
            counts = step_gemms(dense_network(load_model(name)).blocks, batch, recompute=False)
            yield from (gemm for gemm in counts if gemm.batch == 1 and _bytes(gemm) < LARGEST_BYTES)
        for inputs, outputs in DLRMV4_LAYERS:
            linear = Linear(inputs, outputs)
            yield linear.forward(batch)
            yield from linear.backward(batch)


def _bytes(gemm: Gemm) -> float:
    return 4.0 * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)


def read_shapes(path: str | Path) -> tuple[Shape, ...]:
    """Products from a CSV file with the columns m, n, k, layout, dtype.

    Raises:
        SpecError: naming the line and what to change.
    """
    rows = csv.DictReader(io.StringIO(read_text(path, "list of shapes")))
    missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise SpecError(
            f"the column {missing[0]} is missing",
            file=path,
            field="line 1",
            fix=f"begin with the line {','.join(COLUMNS)}",
        )
    found = []
    for row in rows:
        try:
            m, n, k = (int(row[name]) for name in ("m", "n", "k"))
            shape = Shape(Dtype(row["dtype"]), Gemm(m, n, k, layout=Layout(row["layout"])))
        except (TypeError, ValueError) as error:
            raise SpecError(
                f"not a product: {error}",
                file=path,
                field=f"line {rows.line_num}",
                fix="write three whole numbers, a layout (nt, nn, tn) and a dtype (bf16, tf32, …)",
            ) from None
        found.append(shape)
    if not found:
        raise SpecError(
            "no product in it", file=path, fix="add a line such as 8192,512,256,nt,bf16"
        )
    return tuple(found)


def device_at_hand(name: str) -> DeviceProfile:
    """The profile called ``name``; ``auto``: that of this machine's first GPU, by its name.

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
    for profile in map(load_device, names_in(DEVICES)):
        if profile.name in words:
            return profile
    raise UsageError(
        f"no device profile for this GPU ({gpu})",
        field="--device",
        value=name,
        fix=f"name the closest one: {', '.join(names_in(DEVICES))}, or a profile file",
    )
