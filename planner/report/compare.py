"""A comparison for the terminal: speed-ups, who gets how many samples, and the levers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.markup import escape

from planner.compare import Comparison, Contest
from planner.report.text import bar, columns, indented, milliseconds, percent, rate, section

VISIBLE = 5e-4
"""Smaller gains would read 0.0 %."""


class Timing(Protocol):
    """A measured plan."""

    @property
    def step_ms(self) -> float: ...
    @property
    def samples_per_s(self) -> float: ...


class TimedContest(Protocol):
    """Planned and naive, measured (``runtime.comparison.MeasuredContest``)."""

    @property
    def planned(self) -> Timing: ...
    @property
    def naive(self) -> Timing | None: ...
    @property
    def speedup(self) -> float | None: ...


def render_comparison(
    comparison: Comparison, console: Console, measured: Mapping[str, TimedContest] | None = None
) -> None:
    """Print a comparison; ``measured`` holds ``matched`` and ``free`` if the plans were run."""
    _headline(comparison, console, measured)
    _contests(comparison, console, measured)
    _splits(comparison, console)
    if comparison.waterfall:
        _waterfall(comparison, console)


def _headline(
    comparison: Comparison, console: Console, measured: Mapping[str, TimedContest] | None
) -> None:
    plan = comparison.matched.planned.plan
    job = escape(f"{plan.model.name} on {plan.cluster.name}")
    best = measured["matched"] if measured else comparison.matched
    console.print(f"[bold]{job}: {_lead(best, 'measured' if measured else 'predicted')}[/bold]")
    if comparison.why_no_naive:
        indented(console, escape(comparison.why_no_naive))
    predicted = comparison.matched.speedup
    also = f"; predicted: {predicted:.2f}x" if measured and predicted is not None else ""
    indented(console, f"matched: same devices, global batch {plan.global_batch:,}{also}")
    if comparison.free.planned.plan.works_like(plan):
        fixed = all(pool.min_nodes == pool.nodes for pool in plan.cluster.pools)
        why = "min_nodes keeps all nodes at work" if fixed else "leaving devices out does not help"
        indented(console, f"free: the same plan; {why}")
        return
    working = ", ".join(
        f"{pool.nodes} x {pool.devices_per_node} in {name}"
        for name, pool in comparison.free.planned.plan.pools.items()
    )
    free = _times(comparison.free, "predicted")
    if measured:
        free = f"{_times(measured['free'], 'measured')}, {free}"
    indented(console, escape(f"free: {free}, with {working}"))


def _lead(contest: Contest | TimedContest, how: str) -> str:
    if contest.speedup is None:
        return f"{rate(contest.planned.samples_per_s)}, {how}; the naive port does not run"
    return f"{contest.speedup:.2f}x the naive port, {how}"


def _times(contest: Contest | TimedContest, how: str) -> str:
    if contest.speedup is None:
        return f"{rate(contest.planned.samples_per_s)} {how}"
    return f"{contest.speedup:.2f}x {how}"


Sides = Mapping[str, tuple[Timing | None, float | None]]
"""By the name of a plan: its timing, if it runs, and its speed-up."""


def _sides(matched: Contest | TimedContest, free: Contest | TimedContest) -> Sides:
    return {
        "naive port": (matched.naive, None if matched.naive is None else 1.0),
        "planned, matched": (matched.planned, matched.speedup),
        "planned, free": (free.planned, free.speedup),
    }


def _contests(
    comparison: Comparison, console: Console, measured: Mapping[str, TimedContest] | None
) -> None:
    outcomes = _sides(comparison.matched, comparison.free)
    section(console, "Predicted")
    numbers = ("step ms", "samples/s", "speed-up")
    predicted = columns("plan", *numbers, right=numbers)
    for name, (outcome, speedup) in outcomes.items():
        predicted.add_row(name, *_speed(outcome, speedup))
    indented(console, predicted)
    if not measured:
        return
    section(console, "Measured")
    headings = (*numbers, "prediction off by")
    table = columns("plan", *headings, right=headings)
    for name, (timing, speedup) in _sides(measured["matched"], measured["free"]).items():
        outcome = outcomes[name][0]
        off = "-"
        if outcome is not None and timing is not None:
            error = outcome.step_ms / timing.step_ms - 1
            off = f"{'+' if error >= 0 else '-'}{percent(abs(error))}"
        table.add_row(name, *_speed(timing, speedup), off)
    indented(console, table)


def _speed(timing: Timing | None, speedup: float | None) -> tuple[str, str, str]:
    if timing is None:
        return "-", "-", "-"
    times = "-" if speedup is None else f"{speedup:.2f}x"
    return milliseconds(timing.step_ms), _rate(timing.samples_per_s), times


def _rate(samples_per_s: float) -> str:
    return rate(samples_per_s).removesuffix(" samples/s")


def _splits(comparison: Comparison, console: Console) -> None:
    section(console, "Samples per rank")
    naive = comparison.matched.naive
    plans = {
        **({"naive port": naive.plan} if naive else {}),
        "planned, matched": comparison.matched.planned.plan,
        "planned, free": comparison.free.planned.plan,
    }
    table = columns("pool", *plans, right=tuple(plans))
    for pool in comparison.matched.planned.plan.cluster.pools:
        cells = []
        for plan in plans.values():
            name = plan.workplace(pool.name)
            joined = f" ({name})" if name != pool.name else ""
            found = plan.pools[name] if name else None
            cells.append(escape(f"{found.local_batch:,} x {found.ranks}{joined}") if found else "-")
        table.add_row(escape(pool.name), *cells)
    indented(console, table)


def _waterfall(comparison: Comparison, console: Console) -> None:
    section(console, "What each lever brings, one after another")
    table = columns("lever", "step ms", "", "", right=("step ms",))
    first_ms = comparison.waterfall[0].step_ms
    before_ms = first_ms
    for lever in comparison.waterfall:
        gained = before_ms - lever.step_ms
        table.add_row(
            lever.name,
            milliseconds(lever.step_ms),
            bar(lever.step_ms / first_ms),
            f"-{percent(gained / before_ms)}" if gained >= VISIBLE * before_ms else "",
        )
        before_ms = lever.step_ms
    indented(console, table)
