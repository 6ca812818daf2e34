"""Sweeps, sizings and sensitivities for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape

from planner.report.text import columns, indented, milliseconds, percent, rate, section
from planner.whatif.price import Objective
from planner.whatif.sensitivity import Sensitivity, Shift
from planner.whatif.size import Sizing
from planner.whatif.sweep import PlannedPoint, Row, Sweep

UNITS = {Objective.DEVICES: "devices", Objective.DOLLARS: "$/h", Objective.WATTS: "W"}
MOST_SHIFTS = 20
"""Shifts that change nothing are shown up to this many rows in all."""

MOST_REASONS = 4
"""Different reasons why points have no plan that are shown."""


def render_sweep(sweep: Sweep, console: Console) -> None:
    """Every point, those on the Pareto front marked; then why the others have no plan."""
    console.print(f"[bold]{escape(f'{sweep.model} on {sweep.cluster}')}[/bold]")
    criteria = ", ".join(name.replace("_per_", "/").replace("_", " ") for name in sweep.criteria)
    count = len(sweep.rows)
    indented(
        console,
        f"{count} point{'s' if count > 1 else ''}, {sweep.plans_made} planned; "
        f"* no other is as good in all of {criteria}",
    )
    console.print()
    numbers = ("samples/s", "gap", "devices", "$/h", "kW")
    table = columns("", *map(escape, sweep.axes), *numbers, "nodes at work", right=numbers)
    for row in sweep.rows:
        settings = (escape(str(value)) for value in row.settings.values())
        table.add_row("*" if row.pareto else "", *settings, *_cells(row))
    indented(console, table)
    reasons: dict[str, list[str]] = {}
    for row in sweep.rows:
        if row.planned is None:
            reasons.setdefault(row.why_not, []).append(_settings(row))
    if reasons:
        section(console, "No plan")
        for why, where in list(reasons.items())[:MOST_REASONS]:
            others = f" and {len(where) - 1} more" if len(where) > 1 else ""
            indented(console, escape(f"{where[0]}{others}: {why}"))
        rest = sum(map(len, list(reasons.values())[MOST_REASONS:]))
        if rest:
            indented(console, f"and {rest} more points (--json has all)")


def _cells(row: Row) -> tuple[str, ...]:
    if row.planned is None:
        return "no plan", "", "", "", "", ""
    one = row.planned
    return (
        _rate(one.samples_per_s),
        percent(one.gap) if one.gap > 1e-6 else "0 %",
        f"{one.devices:,}",
        _dollars(one),
        f"{one.watts / 1e3:,.1f}",
        escape(_nodes(one.nodes)),
    )


def _settings(row: Row) -> str:
    return ", ".join(f"{name}={value}" for name, value in row.settings.items())


def _rate(samples_per_s: float) -> str:
    return rate(samples_per_s).removesuffix(" samples/s")


def _dollars(one: PlannedPoint) -> str:
    return "-" if one.dollars_per_hour is None else f"{one.dollars_per_hour:,.2f}"


def _nodes(nodes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in nodes.items())


def render_sizing(sizing: Sizing, console: Console) -> None:
    """What is needed, what it reaches, and how sure that is."""
    one = sizing.planned
    job = f"{sizing.model} at {rate(sizing.target_samples_per_s)} on {sizing.cluster}"
    cost = f"{sizing.cost:,.10g} {UNITS[sizing.objective]}"
    console.print(f"[bold]{escape(job)}: {cost}[/bold]")
    table = columns("pool", "nodes", "samples per rank", right=("nodes", "samples per rank"))
    for name, nodes in sizing.nodes.items():
        table.add_row(escape(name), str(nodes), f"{one.local_batch[name]:,}")
    indented(console, table)
    console.print()
    indented(
        console,
        f"reaches {rate(one.samples_per_s)}, step {milliseconds(one.step_ms)} ms at global batch "
        f"{sizing.global_batch:,}",
    )
    indented(console, f"{one.devices:,} devices, {_dollars(one)} $/h, {one.watts / 1e3:,.1f} kW")
    if sizing.undecided:
        left = f"{sizing.undecided} cheaper could not be excluded within the gap"
    else:
        left = "nothing cheaper reaches it"
    indented(
        console,
        f"{sizing.plans_made} plans decided {sizing.candidates:,} "
        f"combination{'s' if sizing.candidates > 1 else ''} of nodes; {left}",
    )


def render_sensitivity(found: Sensitivity, console: Console) -> None:
    """Constants that change the plan, then those that move its step most."""
    flips = len(found.flips)
    verdict = f"{flips} shift{'s' if flips != 1 else ''} would change the plan"
    if not flips:
        verdict = "no constant would change the plan"
    console.print(f"[bold]{escape(f'{found.model} on {found.cluster}')}: {verdict}[/bold]")
    indented(
        console,
        f"step {milliseconds(found.step_ms)} ms at global batch {found.global_batch:,}; "
        f"{found.constants} constant{'s' if found.constants != 1 else ''} with an error, "
        f"{found.replanned} of them planned again",
    )
    if found.flips:
        section(console, "Changes the plan")
        table = columns("constant", "error", "kept", "new", "gain", "then", right=("kept", "new"))
        for shift in found.flips:
            table.add_row(
                _name(shift),
                _error(shift),
                _ms(shift.kept_step_ms, "no room"),
                _ms(shift.replanned_step_ms, "no plan"),
                percent(shift.gain),
                escape(shift.now),
            )
        indented(console, table)
    rest = [shift for shift in found.shifts if not shift.flips and shift.kept_shift]
    shown = rest[: max(0, MOST_SHIFTS - flips)]
    if shown:
        section(console, "Moves its step")
        table = columns(
            "constant", "error", "step ms", "by", "planned again", right=("step ms", "by")
        )
        for shift in shown:
            sign = "+" if shift.kept_shift > 0 else "-"
            table.add_row(
                _name(shift),
                _error(shift),
                _ms(shift.kept_step_ms, "no room"),
                sign + percent(abs(shift.kept_shift)),
                "no better plan" if shift.replanned else "-",
            )
        indented(console, table)
        if len(rest) > len(shown):
            indented(console, f"and {len(rest) - len(shown)} smaller ones (--json has all)")


def _name(shift: Shift) -> str:
    return escape(f"{shift.device} {shift.constant}")


def _error(shift: Shift) -> str:
    sign = "+" if shift.direction == "up" else "-"
    return f"{sign}{percent(shift.error)}{' assumed' if shift.assumed_error else ''}"


def _ms(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else milliseconds(value)
