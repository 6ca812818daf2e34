"""Numbers as people read them, and the few rich building blocks that all reports share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from planner.specs.base import rounded
from planner.specs.units import GIB, MIB

KIB = 1024
BAR_CELLS = 24
FULL, EMPTY = "█", "·"


def size(count: float) -> str:
    """Bytes in the largest unit that leaves a whole part: ``97.4 GiB``, ``512 B``."""
    for unit, name in ((1024 * GIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def milliseconds(value: float) -> str:
    """Milliseconds with three significant digits, never in exponent notation."""
    value = rounded(value)  # as in a saved plan, so that a plan reads the same before and after
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def microseconds(value: float) -> str:
    """Microseconds, to a tenth below 100."""
    value = rounded(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def rate(samples_per_s: float) -> str:
    """Samples per second: ``5.31 M samples/s``."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if samples_per_s >= unit:
            return f"{samples_per_s / unit:.2f}{name} samples/s"
    return f"{samples_per_s:.1f} samples/s"


def percent(ratio: float) -> str:
    """A ratio as a percentage with a sensible number of digits."""
    value = 100 * ratio
    return f"{value:.0f} %" if value >= 10 else f"{value:.1f} %" if value else "0 %"


def ranges(numbers: Iterable[int]) -> str:
    """Sorted distinct integers, runs shortened: ``0-7, 12``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def bar(ratio: float, cells: int = BAR_CELLS) -> str:
    """A bar of fixed length, filled to ``ratio`` (0..1)."""
    filled = round(cells * min(max(ratio, 0.0), 1.0))
    return FULL * filled + EMPTY * (cells - filled)


def columns(*headings: str, right: Sequence[str] = ()) -> Table:
    """An empty table; headings named in ``right`` are numbers and align right."""
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold"
    )
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left")
    return table


def section(console: Console, title: str) -> None:
    """A blank line and a heading."""
    console.print()
    console.print(f"[bold]{escape(title)}[/bold]")


def indented(console: Console, what: Table | str) -> None:
    """Two columns in from the left; user text in strings must be escaped by the caller."""
    console.print(Padding(what, (0, 0, 0, 2)))
