"""Tiles: what they take of a unit, the candidates, and the time of one tile by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.triton_gemm import tile_seconds
from planner.cost.triton_machine import triton_machine
from planner.kernels.candidates import TileFamily, tile_candidates
from planner.kernels.resources import (
    ARCHITECTURES,
    TileArrays,
    architecture,
    fits,
    fitting,
    occupancy,
    register_demand,
    shared_bytes,
)
from planner.specs.device import DeviceProfile
from planner.specs.errors import UsageError
from planner.specs.kernels import Epilogue, Gemm, Layout, TileConfig
from planner.specs.load import load_device
from planner.specs.units import Dtype

GPUS = ("a100", "h100", "h200", "b200", "gb200", "mi300x", "mi325x", "mi350x", "mi355x")
TILE = TileConfig(block_m=128, block_n=128, block_k=64, num_warps=4, num_stages=3)


def tile(**changes: int) -> TileConfig:
    return TILE.model_copy(update=changes)


def seconds(gemm: Gemm, *tiles: TileConfig, dtype: Dtype = Dtype.BF16) -> list[float]:
    return tile_seconds(load_device("h200"), dtype, [gemm], TileArrays.of(tiles))[0].tolist()


@pytest.mark.parametrize(
    ("changes", "kib"),
    [
        # wgmma: 3 buffers of (128 + 128) rows of 128 bytes.
        ({}, 96),
        # mma.sync below 64 rows: one buffer less.
        ({"block_m": 32}, 2 * 160 * 128 // 1024),
        # Rearranging C: 128 x 128 fp32 sums.
        ({"block_k": 16}, 64),
    ],
)
def test_shared_memory_of_a_tile(changes: dict[str, int], kib: int) -> None:
    tiles = TileArrays.of((tile(**changes),))
    assert shared_bytes(ARCHITECTURES["sm_90"], 2, tiles) == kib * 1024


def test_amd_tiles_hold_one_stage_less() -> None:
    tiles = TileArrays.of((tile(num_stages=2),))
    assert shared_bytes(ARCHITECTURES["gfx942"], 2, tiles) == 32 * 1024


def test_registers_and_occupancy_by_hand() -> None:
    arch = ARCHITECTURES["sm_90"]
    tiles = TileArrays.of((TILE,))
    # 128 sums for each of 128 threads: 24 + 1.4 * 128 = 203.2, in steps of 8.
    demand = register_demand(arch, tiles, np.zeros(1))
    assert demand == 208
    held = shared_bytes(arch, 2, tiles)
    # 65,536 / (208 * 128) = 2.46 by registers, 233,472 / (98,304 + 1,024) = 2.35 by memory.
    assert occupancy(arch, 233_472, held, demand, tiles.num_warps) == 2
    assert occupancy(arch, 233_472, 2 * held, demand, tiles.num_warps) == 1
    assert occupancy(arch, 233_472, 9 * held, demand, tiles.num_warps) == 1


def test_what_fits() -> None:
    h200, mi300x, a100 = load_device("h200"), load_device("mi300x"), load_device("a100")
    assert fits(h200, Dtype.BF16, TILE)
    assert not fits(h200, Dtype.BF16, tile(num_stages=8)), "256 KiB"
    assert not fits(h200, Dtype.BF16, tile(block_n=256)), "256 sums in each thread spill"
    assert fits(h200, Dtype.BF16, tile(block_n=256, num_warps=8))
    assert not fits(h200, Dtype.FP8, tile(block_k=8)), "smaller than a matrix instruction"
    assert fits(a100, Dtype.BF16, tile(num_stages=4))
    assert not fits(mi300x, Dtype.BF16, tile(num_stages=4)), "96 KiB of 64"


@pytest.mark.parametrize("name", GPUS)
def test_candidates_fit_their_device(name: str) -> None:
    device = load_device(name)
    for dtype in device.compute.peak_flops_per_s:
        for layout in Layout:
            tiles = tile_candidates(device, dtype, layout)
            assert 50 <= len(tiles) <= 512
            assert len(set(tiles)) == len(tiles)
            columns = TileArrays.of(tiles)
            limit = device.compute.lds_bytes.value
            assert fitting(architecture(device), limit, dtype.bytes, columns).all()
            assert {t.split_k for t in tiles} >= {1, 2, 4}
            assert tile_candidates(device, dtype, layout) == tiles


def test_family_names_the_loop_of_each_tile() -> None:
    family = TileFamily.of((tile(split_k=4), tile(block_m=64), TILE, tile(block_m=64, split_k=2)))
    assert len(family.loops.block_m) == 2
    assert family.loops.block_m[family.loop].tolist() == [128, 64, 128, 64]
    assert set(family.loops.split_k.tolist()) == {1}


def test_devices_without_tiles() -> None:
    cpu, h200 = load_device("cpu"), load_device("h200")
    with pytest.raises(UsageError, match="no Triton kernels"):
        tile_candidates(cpu, Dtype.FP32, Layout.NT)
    with pytest.raises(UsageError, match="no Triton kernels"):
        tile_seconds(cpu, Dtype.FP32, [Gemm(1, 1, 1)], TileArrays.of((TILE,)))
    with pytest.raises(UsageError, match="cannot multiply"):
        tile_seconds(load_device("a100"), Dtype.FP8, [Gemm(1, 1, 1)], TileArrays.of((TILE,)))
    small = h200.compute.lds_bytes.model_copy(update={"value": 2048.0})
    compute = h200.compute.model_copy(update={"lds_bytes": small})
    with pytest.raises(UsageError, match=r"no tile .* fits[\s\S]*lds_bytes|lds_bytes"):
        tile_candidates(h200.model_copy(update={"compute": compute}), Dtype.BF16, Layout.NT)


def plain(device: DeviceProfile) -> DeviceProfile:
    """Only the matrix unit and the launch take time: a peak FLOP/s and a microsecond."""
    assert device.triton is not None
    free = {"launch_s": 1e-6}
    changes = {}
    for name in type(device.triton).model_fields:
        constant = getattr(device.triton, name)
        if name == "loops":
            continue
        value = free.get(name, 0.0 if name.endswith("_s") else 1.0 if "efficiency" in name else 1e9)
        changes[name] = constant.model_copy(update={"value": value})
    loops = {
        key: loop.model_copy(
            update={
                name: getattr(loop, name).model_copy(
                    update={"value": 1e9 if name == "shared_efficiency" else 0.0}
                )
                for name in type(loop).model_fields
            }
        )
        for key, loop in device.triton.loops.items()
    }
    triton = device.triton.model_copy(update=changes | {"loops": loops})
    fast = device.memory.hbm_bytes_per_s.model_copy(update={"value": 1e18})
    memory = device.memory.model_copy(update={"hbm_bytes_per_s": fast})
    return device.model_copy(update={"triton": triton, "memory": memory})


def test_waves_by_hand() -> None:
    """A 128 x 128 x 64 step at a unit's peak; 132 units hold two programs each."""
    device = plain(load_device("h200"))
    step_s = 2 * 128 * 128 * 64 / (9.89e14 / 132)
    tiles = TileArrays.of((TILE,))

    def loop_s(tiles_of_c: int, k: int = 640) -> float:
        gemm = Gemm(128 * tiles_of_c, 128, k)
        return float(tile_seconds(device, Dtype.BF16, [gemm], tiles)[0, 0]) - 1e-6

    # The unit does r programs' products in turn; one program's own cannot be faster (its share of
    # the sum of powers).
    alone = 2**0.25
    pair = (2**4 + 1) ** 0.25
    assert loop_s(1) == pytest.approx(10 * step_s * alone)
    assert loop_s(132) == pytest.approx(loop_s(1)), "one for each unit"
    assert loop_s(133) == pytest.approx(10 * step_s * pair)
    assert loop_s(264) == pytest.approx(loop_s(133))
    assert loop_s(265) == pytest.approx(loop_s(264) + loop_s(1)), "a second wave"
    assert loop_s(1, k=648) == pytest.approx(11 * step_s * alone), "an eleventh step"


def test_split_trades_steps_for_a_second_kernel() -> None:
    deep = Gemm(256, 512, 65_536, layout=Layout.TN)
    one, eight = seconds(deep, TILE, tile(split_k=8))
    assert eight < one / 3
    shallow = Gemm(4096, 4096, 512, layout=Layout.TN)
    one, eight = seconds(shallow, TILE, tile(split_k=8))
    assert one < eight


def test_unaligned_operands_cost_more() -> None:
    aligned, odd = seconds(Gemm(8192, 1024, 480), TILE)[0], seconds(Gemm(8192, 1024, 479), TILE)[0]
    assert odd > 1.5 * aligned
    # By m there is no contiguous operand of nt.
    assert seconds(Gemm(8191, 1024, 480), TILE)[0] <= aligned


def test_epilogue_of_the_cross_layer_moves_three_matrices_more() -> None:
    plain_s = seconds(Gemm(65_536, 1024, 512), TILE)[0]
    cross = Gemm(65_536, 1024, 512, epilogue=Epilogue.CROSS)
    moved_bytes = 3 * 65_536 * 1024 * 2
    assert seconds(cross, TILE)[0] - plain_s >= moved_bytes / triton_machine(
        load_device("h200"), Dtype.BF16
    ).store_bytes_per_s * (1 - 1e-9)


SIZES = st.integers(1, 70_000)
WIDTHS = st.sampled_from((1, 13, 16, 64, 100, 256, 479, 1024, 3456))


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(Layout),
    first=SIZES,
    second=SIZES,
    widths=st.tuples(WIDTHS, WIDTHS),
    dtype=st.sampled_from((Dtype.BF16, Dtype.TF32, Dtype.FP32)),
    name=st.sampled_from(("h200", "b200", "mi300x", "mi355x")),
)
def test_no_tile_is_faster_for_a_larger_batch(
    layout: Layout, first: int, second: int, widths: tuple[int, int], dtype: Dtype, name: str
) -> None:
    device = load_device(name)
    if layout is Layout.TN:
        gemms = [Gemm(*widths, batch, layout=layout) for batch in sorted((first, second))]
    else:
        gemms = [Gemm(batch, *widths, layout=layout) for batch in sorted((first, second))]
    tiles = TileArrays.of(tile_candidates(device, dtype, layout))
    small, large = tile_seconds(device, dtype, gemms, tiles)
    assert (large >= small * (1 - 1e-12)).all()


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(Layout),
    sizes=st.tuples(*[st.integers(1, 300)] * 3),
    grown=st.tuples(*[st.integers(0, 300)] * 3),
    dtype=st.sampled_from((Dtype.BF16, Dtype.TF32)),
)
def test_no_tile_is_faster_for_a_larger_aligned_product(
    layout: Layout, sizes: tuple[int, int, int], grown: tuple[int, int, int], dtype: Dtype
) -> None:
    device = load_device("h200")
    small = Gemm(*(16 * size for size in sizes), layout=layout)
    large = Gemm(*(16 * (a + b) for a, b in zip(sizes, grown, strict=True)), layout=layout)
    tiles = TileArrays.of(tile_candidates(device, dtype, layout))
    small_s, large_s = tile_seconds(device, dtype, [small, large], tiles)
    assert (large_s >= small_s * (1 - 1e-12)).all()
