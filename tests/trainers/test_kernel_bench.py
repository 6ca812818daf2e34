"""The selector's regret: arithmetic and choice of candidates, with a timer that is no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from planner.kernels.select import select_kernels
from planner.specs.errors import SpecError, UsageError
from planner.specs.kernels import Backend, Gemm, Layout, TileConfig
from planner.specs.load import load_device
from planner.specs.units import Dtype
from trainers.kernels.bench import (
    PER_GROUP,
    Measured,
    Ratio,
    Shape,
    bench,
    default_shapes,
    device_at_hand,
    read_shapes,
    summarise,
)

TILE = TileConfig(block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=3)
SHAPES = (
    Shape(Dtype.BF16, Gemm(512, 13, 27648, layout=Layout.TN)),
    Shape(Dtype.BF16, Gemm(8192, 1024, 1024)),
)


class TileArea:
    """Larger tiles are faster, those of three stages do not run, the vendor takes 10 us."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Dtype, Gemm, TileConfig]] = []

    def compile(self, wanted: Iterable[tuple[Dtype, Gemm, TileConfig]]) -> None:
        self.compiled.extend(wanted)

    def tiles_us(
        self, dtype: Dtype, gemm: Gemm, tiles: Sequence[TileConfig]
    ) -> tuple[float, dict[TileConfig, float]]:
        ready = {tile for _, of, tile in self.compiled if of == gemm}
        assert ready.issuperset(tiles)
        return 10.0, {t: 1e6 / (t.block_m * t.block_n) for t in tiles if t.num_stages != 3}


def test_selected_tiles_are_measured_among_all_that_make_sense() -> None:
    device, timer = load_device("h200"), TileArea()
    seen: list[tuple[int, int]] = []
    report = bench(device, SHAPES, timer, progress=lambda *done: seen.append(done))
    assert seen == [(1, 2), (2, 2)] and report.asked == len(report.measured) == 2
    for shape, item in zip(SHAPES, report.measured, strict=True):
        ranked = select_kernels(device, shape.dtype, [shape.gemm], top_k=5)[0]
        ours = [k.tile for k in ranked if k.tile is not None and k.tile.num_stages != 3]
        area = [tile.block_m * tile.block_n for tile in ours[:4]]
        assert item.selected == ours[0]
        assert item.selected_us == pytest.approx(1e6 / area[0])
        assert item.best_us <= item.top_us <= item.selected_us
        assert item.candidates > 20 and item.picked is ranked[0].backend
    # No tile twice as wide as the 13 columns, but for the selector's own.
    assert report.measured[0].best.block_n <= 32
    assert bench(device, SHAPES, timer, seconds=0.0).measured == ()


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
    for gpu, name in (
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("AMD Instinct MI300X OAM", "mi300x"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu=gpu: gpu)
        assert device_at_hand("auto").name == name
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Imaginary 9000")
    with pytest.raises(UsageError, match="Imaginary 9000"):
        device_at_hand("auto")
    assert device_at_hand("b200").name == "b200"
