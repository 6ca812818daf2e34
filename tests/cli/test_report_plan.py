"""What the plan report says, and that it fits narrow and plain terminals."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from spec_samples import PLAN, changed

from planner.report.plan import render_plan
from planner.report.text import bar, milliseconds, percent, ranges, rate, size
from planner.specs.base import validate
from planner.specs.plan import Plan
from planner.specs.units import GIB


def rendered(data: dict[str, Any], width: int = 100, **arguments: Any) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, emoji=False)
    render_plan(validate(Plan, data, None), console, **arguments)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


NAIVE = validate(
    Plan,
    changed(changed(PLAN, "predicted.samples_per_s", 40_000.0), "kind", "naive"),
    None,
)


def test_headline_leads_with_the_speedup() -> None:
    text = rendered(PLAN, naive=NAIVE)
    assert text.splitlines()[0] == "toy on two: 1.60x the naive port, predicted"
    assert "64.00 k samples/s" in text and "40.00 k samples/s" in text


def test_a_naive_port_that_does_not_fit_is_said() -> None:
    text = rendered(PLAN, why_no_naive="rank 3 is short of 2.0 GiB")
    assert "the naive port does not run at all" in text.splitlines()[0]
    assert "rank 3 is short of 2.0 GiB" in text


def test_batch_arithmetic_share_and_policy_per_pool() -> None:
    lines = rendered(PLAN).splitlines()
    amd = next(line.split() for line in lines if line.startswith("  amd "))
    assert amd == ["amd", "mi350x", "2", "24", "(=48/2)", "50", "%", "fp32", "fp32", "none"]


def test_a_pool_that_is_left_out_is_named() -> None:
    alone = changed(PLAN, "pools", {"nvidia": PLAN["pools"]["nvidia"]})
    text = rendered(changed(alone, "global_batch", 48))
    assert "left out: pool amd (all nodes)." in text and "Between pools" not in text
    fewer = changed(PLAN, "cluster", changed(PLAN["cluster"], "pools.0.nodes", 3))
    assert "left out: 2 of 3 nodes of pool amd." in rendered(fewer)
    assert "left out" not in rendered(PLAN) and "Between pools" in rendered(PLAN)


def test_placements_memory_and_steps_are_counted() -> None:
    text = rendered(PLAN)
    assert "column_wise 4+12" in text and "table_wise, 25 % cached" in text
    assert "Memory of amd: 6.3 KiB of 9.8 KiB on rank 1, the fullest" in text
    assert "idle" not in text, "operations that take no time are left out"
    hidden = changed(PLAN, "pools.amd.predicted.critical_path", ["top_forward"])
    line = next(li for li in rendered(hidden).splitlines() if "embedding_forward" in li)
    assert line.endswith("hidden")


def _kernel(
    layout: str, m: int, triton_us: float, split_k: int = 1, dtype: str = "fp32"
) -> dict[str, Any]:
    tile = {"block_m": 128, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 3}
    candidates: list[dict[str, Any]] = [
        {"backend": "triton", "tile": tile | {"split_k": split_k}, "predicted_us": triton_us},
        {"backend": "vendor", "predicted_us": 20.0},
    ]
    if triton_us > 20:
        candidates.reverse()
    sizes = {"layout": layout, "m": m, "n": 13, "k": 4096}
    return {**sizes, "dtype": dtype, "count": 2, "candidates": candidates}


def test_kernels_are_counted_timed_and_the_most_gaining_named() -> None:
    assert "Kernels" not in rendered(PLAN)
    listed = [
        _kernel("nt", 512, 25.0),
        _kernel("tn", 256, 5.5, split_k=8),
        *(_kernel("nn", m, 10.0 + m) for m in range(1, 7)),
        _kernel("nn", 3000, 1.0, dtype="tf32"),
    ]
    text = rendered(changed(PLAN, "pools.amd.kernels", listed))
    # fp32 runs: 2 x (20 + 5.5 + 11 + 12 + ... + 16) us, or 8 products of 2 x 20 us.
    assert "Kernels of amd: 0.213 ms in matrix products, 0.320 ms with the vendor's library" in text
    assert "8 distinct products in fp32: 7 by Triton, 1 by the vendor's library" in text
    table = [" ".join(line.split()) for line in text.splitlines() if "4 warps" in line]
    assert table[0] == "tn 256 x 13 x 4,096 2 128x64x32 split 8, 4 warps, 3 stages 5.5 20.0"
    assert table[1] == "nn 1 x 13 x 4,096 2 128x64x32, 4 warps, 3 stages 11.0 20.0"
    assert len(table) == 5 and "3,000" not in text
    assert "Kernels of nvidia" not in text


def test_considered_table_marks_the_chosen_row() -> None:
    lines = rendered(PLAN).splitlines()
    chosen = [line for line in lines if line.strip().startswith("->")]
    assert len(chosen) == 1 and "both pools" in chosen[0]
    assert any(line.split()[:3] == ["nvidia", "96", "-"] for line in lines)


def test_trust_section_has_gap_solver_provenance_and_band() -> None:
    text = " ".join(rendered(PLAN).split())
    assert "gap: 7.1 % above the lower bound of 1.40 ms" in text
    assert "HiGHS, time_limit (the time limit was hit first)" in text
    assert "10 datasheet, 3 measured" in text and "+-15 %" in text


def test_saved_path_and_markup_in_it_are_printed_as_they_are() -> None:
    assert "Saved to out/[bold]p.json" in rendered(PLAN, saved_to=Path("out/[bold]p.json"))


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = rendered(PLAN, width=width, naive=NAIVE)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text


def test_numbers_read_well() -> None:
    assert size(97.36 * GIB) == "97.4 GiB" and size(512) == "512 B" and size(0) == "0 B"
    assert size(3109.46 * GIB) == "3.0 TiB"
    assert [milliseconds(v) for v in (1234.5, 45.67, 4.567, 0.4567)] == [
        "1,234", "45.7", "4.57", "0.457",
    ]  # fmt: skip
    assert rate(5_312_000) == "5.31 M samples/s" and rate(12.3) == "12.3 samples/s"
    assert (percent(0.0071), percent(0.5), percent(0)) == ("0.7 %", "50 %", "0 %")
    assert ranges([3, 0, 1, 2, 7, 5, 5]) == "0-3, 5, 7"


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_every_number_once(numbers: set[int]) -> None:
    found = []
    for part in ranges(numbers).split(", ") if numbers else []:
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    assert found == sorted(numbers)


@given(st.floats(-1, 3))
def test_bars_keep_their_length(ratio: float) -> None:
    assert len(bar(ratio)) == 24
    assert bar(1.0).count("█") == 24 and bar(0.0).count("█") == 0
