"""The selector's regret: arithmetic and choice of candidates, with a timer that is no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from planner.kernels.select import select_kernels
from planner.specs.errors import SpecError, UsageError
from planner.specs.kernels import (
    Backend,
    Epilogue,
    Gemm,
    Layout,
    PlannedGemm,
    RankedKernel,
    TileConfig,
)
from planner.specs.load import load_device
from planner.specs.units import Dtype
from trainers.kernels import bench as bench_module
from trainers.kernels.bench import (
    MEASURED_TOGETHER,
    Measured,
    Ratio,
    bench,
    device_at_hand,
    summarise,
)
from trainers.kernels.shapes import (
    PER_GROUP,
    Shape,
    default_shapes,
    of_dtypes,
    plan_shapes,
    read_shapes,
    shapes_of,
)

TILE = TileConfig(block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=3)
SHAPES = (
    Shape(Dtype.BF16, Gemm(512, 13, 27648, layout=Layout.TN)),
    Shape(Dtype.BF16, Gemm(8192, 1024, 1024)),
)


class TileArea:
    """Larger tiles are faster, some do not run, the vendor takes 10 us."""

    def __init__(self, broken: Iterable[TileConfig | None] = ()) -> None:
        self.broken = frozenset(broken)
        self.compiled: list[tuple[Dtype, Gemm, TileConfig]] = []

    def compile(self, wanted: Iterable[tuple[Dtype, Gemm, TileConfig]]) -> None:
        self.compiled.extend(wanted)

    def tiles_us(
        self, dtype: Dtype, gemm: Gemm, tiles: Sequence[TileConfig]
    ) -> tuple[float, dict[TileConfig, float]]:
        ready = {tile for _, of, tile in self.compiled if of == gemm}
        assert ready.issuperset(tiles)
        return 10.0, {t: 1e6 / (t.block_m * t.block_n) for t in tiles if t not in self.broken}


def test_selected_tiles_are_measured_among_all_that_make_sense() -> None:
    device = load_device("h200")

    def listed(shape: Shape) -> list[TileConfig]:
        ranked = select_kernels(device, shape.dtype, [shape.gemm], top_k=5)[0]
        return [kernel.tile for kernel in ranked if kernel.tile is not None]

    timer = TileArea(broken=(listed(shape)[0] for shape in SHAPES))
    seen: list[tuple[int, int]] = []
    report = bench(device, SHAPES, timer, progress=lambda *done: seen.append(done))
    assert seen == [(1, 2), (2, 2)] and report.asked == len(report.measured) == 2
    for shape, item in zip(SHAPES, report.measured, strict=True):
        ours = [tile for tile in listed(shape) if tile not in timer.broken]
        assert item.selected == ours[0]
        assert item.selected_us == pytest.approx(1e6 / (ours[0].block_m * ours[0].block_n))
        assert item.best_us <= item.top_us <= item.selected_us
        ranked = select_kernels(device, shape.dtype, [shape.gemm])[0]
        assert item.candidates > 20 and item.picked is ranked[0].backend
    # No tile twice as wide as the 13 columns, but for the selector's own.
    assert report.measured[0].best.block_n <= 32
    assert bench(device, SHAPES, timer, seconds=0.0).measured == ()


def test_quick_measures_the_selectors_tiles_only() -> None:
    device, timer = load_device("h200"), TileArea()
    report = bench(device, SHAPES, timer, exhaustive=False, top_k=2)
    assert not report.exhaustive and report.unusable == 0
    for shape in SHAPES:
        ranked = select_kernels(device, shape.dtype, [shape.gemm], top_k=9)[0]
        listed = {kernel.tile for kernel in ranked if kernel.tile is not None}
        assert {tile for _, gemm, tile in timer.compiled if gemm == shape.gemm} == listed


class NothingRuns(TileArea):
    def tiles_us(
        self, dtype: Dtype, gemm: Gemm, tiles: Sequence[TileConfig]
    ) -> tuple[float, dict[TileConfig, float]]:
        return 10.0, {}


def test_products_without_a_kernel_that_runs_are_counted() -> None:
    report = bench(load_device("h200"), SHAPES, NothingRuns(), exhaustive=False)
    assert (report.unusable, report.asked, report.measured) == (2, 2, ())


def test_the_time_limit_holds_for_compiling_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(bench_module.time, "monotonic", lambda: clock[0])

    class Slow(TileArea):
        def compile(self, wanted: Iterable[tuple[Dtype, Gemm, TileConfig]]) -> None:
            clock[0] += 60.0
            super().compile(wanted)

    timer = Slow()
    report = bench(load_device("h200"), default_shapes(), timer, exhaustive=False, seconds=61.0)
    # The second group of products takes the time over the limit with its first one.
    assert len(report.measured) == MEASURED_TOGETHER + 1
    assert report.asked == 6 * PER_GROUP
    of_first = default_shapes()[: len(report.measured)]
    assert [(m.dtype, m.layout, m.m) for m in report.measured] == [
        (shape.dtype, shape.gemm.layout, shape.gemm.m) for shape in of_first
    ]
    assert len({(m.dtype, m.layout) for m in report.measured}) == 6


def test_what_cannot_be_measured() -> None:
    device = load_device("h200")
    with pytest.raises(UsageError, match="fp8 cannot be compared"):
        bench(device, [Shape(Dtype.FP8, Gemm(64, 64, 64))], TileArea())
    with pytest.raises(UsageError, match="top_k"):
        bench(device, SHAPES, TileArea(), top_k=0)


def measured(best: float, selected: float, vendor: float, picked: Backend, k: int) -> Measured:
    return Measured(
        dtype=Dtype.BF16, layout=Layout.TN, m=64, n=64, k=k, vendor_us=vendor,
        vendor_predicted_us=2 * vendor, selected=TILE, selected_us=selected,
        selected_predicted_us=selected, top_us=best, best=TILE, best_us=best, candidates=9,
        picked=picked,
    )  # fmt: skip


def test_regret_by_hand() -> None:
    summary = summarise(
        [
            measured(4.0, 5.0, 10.0, Backend.TRITON, 8192),
            measured(8.0, 16.0, 4.0, Backend.VENDOR, 8192),
            measured(1.0, 1.0, 0.5, Backend.TRITON, 512),
        ]
    )
    for ratio, mean, least in (
        (summary.selected, (0.8 * 0.5) ** (1 / 3), 0.5),
        (summary.top, 1.0, 1.0),
        (summary.picked, (0.8 * 1 * 0.5) ** (1 / 3), 0.5),
        (summary.against_vendor, 1.0, 0.5),
    ):
        assert ratio is not None and (ratio.least, ratio.products) == (least, 3)
        assert ratio.geometric_mean == pytest.approx(mean)
    assert summary.weight_gradients == Ratio(geometric_mean=2.0, least=2.0, products=1)
    assert summary.vendor_error == pytest.approx(1.0) and summary.selected_error == 0.0
    assert summarise([]).selected is None


def test_default_shapes_cover_every_layout_in_both_precisions() -> None:
    shapes = default_shapes()
    assert len(set(shapes)) == len(shapes) == 2 * 3 * PER_GROUP >= 60
    assert {(s.dtype, s.gemm.layout) for s in shapes} == {
        (dtype, layout) for dtype in (Dtype.BF16, Dtype.TF32) for layout in Layout
    }
    assert shapes == default_shapes()
    assert {shape.dtype for shape in shapes_of(None, None, [Dtype.FP16], "h200")} == {Dtype.FP16}


def test_shapes_of_a_plan() -> None:
    def item(dtype: Dtype, batch: int, epilogue: Epilogue) -> PlannedGemm:
        return PlannedGemm(
            layout=Layout.NT, m=64, n=32, k=16, batch=batch, epilogue=epilogue, dtype=dtype,
            count=1, candidates=(RankedKernel(backend=Backend.VENDOR, predicted_us=1.0),),
        )  # fmt: skip

    kernels = (
        item(Dtype.BF16, 1, Epilogue.BIAS),
        item(Dtype.BF16, 1, Epilogue.BIAS_RELU),
        item(Dtype.BF16, 8, Epilogue.NONE),
        item(Dtype.TF32, 1, Epilogue.BIAS),
    )
    pools = {
        "fast": SimpleNamespace(device="h200", kernels=kernels),
        "cheap": SimpleNamespace(device="cpu", kernels=()),
    }
    plan = SimpleNamespace(pools=pools)
    bf16, tf32 = (Shape(dtype, Gemm(64, 32, 16)) for dtype in (Dtype.BF16, Dtype.TF32))
    assert plan_shapes(plan, "h200") == (bf16, tf32)
    with pytest.raises(UsageError, match=r"no kernels for this device(.|\n)*kernels for h200"):
        plan_shapes(plan, "b200")
    assert of_dtypes((bf16, tf32), [Dtype.TF32]) == (tf32,)
    with pytest.raises(UsageError, match=r"precision(.|\n)*bf16, tf32"):
        of_dtypes((bf16, tf32), [Dtype.FP32])


def test_shapes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text("dtype,layout,m,n,k\nbf16,tn,512,13,8192\ntf32,nt,8,8,8\n")
    assert read_shapes(path) == (
        Shape(Dtype.BF16, Gemm(512, 13, 8192, layout=Layout.TN)),
        Shape(Dtype.TF32, Gemm(8, 8, 8)),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("m,n,k,layout\n1,1,1,nt", ["line 1", "dtype is missing"]),
        ("m,n,k,layout,dtype\n1,x,1,nt,bf16", ["line 2", "'x'"]),
        ("m,n,k,layout,dtype\n1,1,1,tt,bf16", ["line 2", "'tt'"]),
        ("m,n,k,layout,dtype\n1,1,1,nt,int8", ["line 2", "'int8'"]),
        ("m,n,k,layout,dtype\n1,1\n", ["line 2"]),
        ("m,n,k,layout,dtype\n", ["no product"]),
        ("", ["line 1", "missing"]),
    ],
)
def test_unusable_shape_files(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_shapes(path)
    message = str(caught.value)
    assert all(word in message for word in (*words, str(path), "To fix")), message


def test_the_profile_of_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(UsageError, match="no GPU")
        if not torch.cuda.is_available()
        else (pytest.raises(UsageError, match="unknown device"))
    ):
        device_at_hand("none such")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def plug_in(gpu: str, arch: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
        monkeypatch.setattr(bench_module, "device_arch", lambda index: arch)

    for gpu, arch, name in (
        ("NVIDIA H200", "sm_90", "h200"),
        ("NVIDIA A100-SXM4-80GB", "sm_80", "a100"),
        ("AMD Instinct MI300X OAM", "gfx942", "mi300x"),
        ("NVIDIA A800", "sm_80", "a100"),
    ):
        plug_in(gpu, arch)
        assert device_at_hand("auto").name == name
    for gpu, arch, closest in (
        ("AMD Radeon Graphics", "gfx950", "--device: mi350x, mi355x,"),
        ("Imaginary 9000", "sm_999", "--device: a100, b200"),
    ):
        plug_in(gpu, arch)
        with pytest.raises(UsageError) as caught:
            device_at_hand("auto")
        assert gpu in str(caught.value) and arch in str(caught.value)
        assert closest in str(caught.value)
    assert device_at_hand("b200").name == "b200"
