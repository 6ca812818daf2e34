"""Which kernel runs: the rule against a loop over every candidate, its limits, and its speed."""

import time

import numpy as np
import pytest

from planner.cost.elementwise import epilogue_seconds
from planner.cost.triton_gemm import tile_seconds
from planner.kernels import select
from planner.kernels.candidates import tile_candidates
from planner.kernels.resources import TileArrays
from planner.kernels.select import LONGEST_SUM, planned_seconds, select_kernels
from planner.specs.errors import UsageError
from planner.specs.kernels import Backend, Epilogue, Gemm, Layout
from planner.specs.load import load_device
from planner.specs.units import Dtype

GEMMS = [
    Gemm(6912, 512, 13),
    Gemm(6912, 13, 512, layout=Layout.NN),
    Gemm(512, 13, 6912, layout=Layout.TN),
    Gemm(8192, 1, 256, epilogue=Epilogue.BIAS_SIGMOID),
    Gemm(1, 256, 65_536, layout=Layout.TN),
    Gemm(8192, 1024, 479, epilogue=Epilogue.BIAS_RELU),
    Gemm(8192, 3456, 512, epilogue=Epilogue.CROSS),
    Gemm(256, 512, 8192, layout=Layout.TN),
    Gemm(8192, 2048, 2048),
    Gemm(64, 64, 64, batch=27),
]


@pytest.mark.parametrize("name", ["h200", "mi355x"])
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.TF32])
def test_choice_is_that_of_a_loop_over_all_candidates(name: str, dtype: Dtype) -> None:
    device = load_device(name)
    assert device.triton is not None
    margin = 1 + device.triton.margin.value
    planned = planned_seconds(device, dtype, GEMMS)
    for gemm, ranked, planned_s in zip(
        GEMMS, select_kernels(device, dtype, GEMMS), planned, strict=True
    ):
        vendor_us = float(select._vendor_seconds(device, dtype, [gemm])[0]) * 1e6
        found = {}
        if gemm.batch == 1:
            for tile in tile_candidates(device, dtype, gemm.layout):
                one = tile_seconds(device, dtype, [gemm], TileArrays.of((tile,)))
                found[tile] = float(one[0, 0]) * 1e6
        in_order = sorted(found.values())
        wins = bool(found) and in_order[0] * margin < vendor_us
        first = ranked[0]
        assert first.backend is (Backend.TRITON if wins else Backend.VENDOR)
        best = in_order[0] * margin if wins else vendor_us
        assert planned_s * 1e6 == pytest.approx(best)
        tiles = [kernel for kernel in ranked if kernel.tile is not None]
        for kernel, expected in zip(tiles, in_order, strict=False):
            assert kernel.predicted_us == pytest.approx(expected)
            assert found[kernel.tile] == pytest.approx(expected)
        assert len(ranked) == (4 if found else 1)
        assert sum(kernel.backend is Backend.VENDOR for kernel in ranked) == 1


def test_vendor_stands_where_its_time_with_the_margin_puts_it() -> None:
    device = load_device("h200")
    for ranked in select_kernels(device, Dtype.BF16, GEMMS, top_k=8):
        place = [kernel.backend for kernel in ranked].index(Backend.VENDOR)
        margin = 1 + device.triton.margin.value if device.triton else 1.0
        for index, kernel in enumerate(ranked):
            if index < place:
                assert kernel.predicted_us * margin < ranked[place].predicted_us
            elif index > place:
                assert kernel.predicted_us * margin >= ranked[place].predicted_us


def test_one_candidate_is_the_one_that_runs() -> None:
    device = load_device("h200")
    several = select_kernels(device, Dtype.BF16, GEMMS)
    for one, ranked in zip(select_kernels(device, Dtype.BF16, GEMMS, 1), several, strict=True):
        assert one == ranked[:1]


def test_the_vendor_pays_for_the_epilogue_that_it_lacks() -> None:
    device = load_device("h200")
    plain, fused = Gemm(65_536, 512, 512), Gemm(65_536, 512, 512, epilogue=Epilogue.CROSS)
    (plain_us,), (fused_us,) = (
        [k.predicted_us for k in ranked if k.backend is Backend.VENDOR]
        for ranked in select_kernels(device, Dtype.BF16, [plain, fused])
    )
    extra_s = epilogue_seconds(device, Dtype.BF16, fused)
    assert extra_s > 0
    assert fused_us - plain_us == pytest.approx(extra_s * 1e6)


def test_where_only_the_vendor_runs() -> None:
    cpu, h200 = load_device("cpu"), load_device("h200")
    for device, dtype, gemm in (
        (cpu, Dtype.FP32, Gemm(128, 64, 64)),
        (h200, Dtype.BF16, Gemm(128, 64, 64, batch=2)),
        (h200, Dtype.FP8, Gemm(128, 64, 64, layout=Layout.TN)),
    ):
        (ranked,) = select_kernels(device, dtype, [gemm])
        assert [kernel.backend for kernel in ranked] == [Backend.VENDOR]
        assert planned_seconds(device, dtype, [gemm])[0] * 1e6 == pytest.approx(
            ranked[0].predicted_us
        )
    assert select_kernels(h200, Dtype.BF16, []) == ()
    assert planned_seconds(h200, Dtype.BF16, []).shape == (0,)


@pytest.mark.parametrize("field", ["m", "n", "k", "batch"])
@pytest.mark.parametrize("size", [0, -3, 2**31])
def test_impossible_sizes(field: str, size: int) -> None:
    gemm = Gemm(16, 16, 16)._replace(**{field: size})
    for call in (select_kernels, planned_seconds):
        with pytest.raises(UsageError) as error:
            call(load_device("h200"), Dtype.BF16, [Gemm(16, 16, 16), gemm])
        assert error.value.field == field
        assert error.value.value == size
        assert error.value.fix


def test_other_impossible_requests() -> None:
    h200, a100 = load_device("h200"), load_device("a100")
    with pytest.raises(UsageError, match="top_k"):
        select_kernels(h200, Dtype.BF16, GEMMS, top_k=0)
    for call in (select_kernels, planned_seconds):
        with pytest.raises(UsageError, match="cannot multiply"):
            call(a100, Dtype.FP8, [Gemm(16, 16, 16)])


def test_selection_is_quick() -> None:
    """100 microseconds a shape are asked for; processor time, with room for a busy machine."""
    device = load_device("h200")
    gemms = [
        gemm
        for batch in (512, 1000, 4096, 6912)
        for out, width in ((512, 13), (256, 512), (1024, 479), (1024, 1024), (1, 256))
        for gemm in (
            Gemm(batch, out, width),
            Gemm(batch, width, out, layout=Layout.NN),
            Gemm(out, width, batch, layout=Layout.TN),
        )
    ]
    select_kernels(device, Dtype.BF16, gemms)
    took = []
    for _ in range(5):
        began = time.process_time()
        select_kernels(device, Dtype.BF16, gemms)
        took.append(time.process_time() - began)
    assert min(took) / len(gemms) < 300e-6, np.array(took)


def test_very_long_sums_are_left_to_the_vendor() -> None:
    h200 = load_device("h200")
    at_limit, beyond = (
        select_kernels(h200, Dtype.BF16, [Gemm(16, 27, k, layout=Layout.TN)])[0]
        for k in (LONGEST_SUM, LONGEST_SUM + 1)
    )
    assert len(at_limit) == 4
    assert [kernel.backend for kernel in beyond] == [Backend.VENDOR]
    # Rows of a forward product are no sum.
    assert len(select_kernels(h200, Dtype.BF16, [Gemm(LONGEST_SUM + 1, 27, 16)])[0]) == 4
