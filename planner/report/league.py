"""Baselines against the plan, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from planner.baselines.league import ILP, ILP_RECIPE, League, Standing
from planner.report.text import columns, indented, milliseconds, percent, section, size

NAMES = {
    ILP: "hwplan (ILP)",
    ILP_RECIPE: "  with recipe's weights",
    "torchrec": "TorchRec's planner",
    "torchrec_greedy": "TorchRec-style greedy",
    "hugectr": "HugeCTR-style greedy",
    "table_wise": "table-wise in turn",
    "row_wise": "row-wise",
    "size_balanced": "size-balanced",
    "lookup_balanced": "lookup-balanced",
}


def render_leagues(found: Sequence[League], console: Console, remark: str = "") -> None:
    """Print every league; ``remark``: what else the reader should know, a line."""
    for league in found:
        _league(league, console)
    if remark:
        console.print()
        console.print(escape(remark))


def _league(league: League, console: Console) -> None:
    groups = league.replica_groups
    title = league.name if groups == 1 else f"{league.name}, one of {groups} replica groups"
    section(console, f"{title}: {league.ranks} ranks, {league.samples:,} samples per step")
    indented(
        console,
        f"no placement is faster than {milliseconds(league.lower_bound_ms)} ms; "
        f"gap {percent(league.gap)}",
    )
    rated = any(standing.other for standing in league.standings)
    headings = ["step ms", "x plan", "tables ms", "slowest rank", "its memory"]
    headings += ["TorchRec's ms"] if rated else []
    table = columns("planner", *headings, right=headings)
    for standing in league.standings:
        cells = [_name(standing), *_cells(standing)]
        if rated:
            cells.append(_other(standing))
        table.add_row(*(escape(cell) for cell in cells))
    indented(console, table)
    for standing in league.standings:
        if standing.note:
            indented(console, escape(f"{_name(standing).strip()}: {standing.note}"))


def _name(standing: Standing) -> str:
    return NAMES.get(standing.planner, standing.planner)


def _cells(standing: Standing) -> tuple[str, ...]:
    if standing.step_ms is None or standing.ratio is None or standing.tables_ms is None:
        return ("-",) * 5
    return (
        milliseconds(standing.step_ms),
        f"{standing.ratio:.2f}x" if standing.fits else "no room",
        milliseconds(standing.tables_ms),
        str(standing.slowest_rank),
        size(standing.slowest_rank_bytes or 0),
    )


def _other(standing: Standing) -> str:
    if standing.other is None:
        return "-"
    return milliseconds(standing.other.step_ms) + ("" if standing.other.fits else " (no room)")
