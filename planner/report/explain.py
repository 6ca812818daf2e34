"""A plan's explanation for the terminal: step, limits, levers, and what came next."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from planner.explain.change import Change
from planner.explain.limits import Limit
from planner.explain.plan import Explanation
from planner.explain.words import told
from planner.report.text import bar, columns, indented, milliseconds, percent, section

SMALLEST_MS = 5e-4
"""Smaller differences would read 0.000."""
MOST_LEVERS = 4
"""Levers and resources that ``hwplan plan`` names."""


def signed(delta_ms: float) -> str:
    """A difference of milliseconds with its sign; ``0`` where there is none."""
    if abs(delta_ms) < SMALLEST_MS:
        return "0"
    return f"{'-' if delta_ms < 0 else '+'}{milliseconds(abs(delta_ms))}"


def stepped(step_ms: float, planned_ms: float) -> str:
    """A step as the planned one and a difference: ``10.2 (=9.06+1.10)``."""
    delta_ms = step_ms - planned_ms
    if abs(delta_ms) < SMALLEST_MS:
        return milliseconds(step_ms)
    return f"{milliseconds(step_ms)} (={milliseconds(planned_ms)}{signed(delta_ms)})"


def render_explanation(found: Explanation, console: Console) -> None:
    """Print all of an explanation."""
    console.print(f"[bold]{escape(f'{found.model} on {found.cluster}: why this plan')}[/bold]")
    indented(
        console,
        f"step {milliseconds(found.step_ms)} ms at global batch {found.global_batch:,}; all other "
        "steps are this plan's with one thing changed, at fixed placements",
    )
    _path(found, console)
    _balance(found, console)
    _limits(found, console)
    _speedups(found, console)
    _levers(found, console)
    _next(found, console)
    _considered(found, console)


def render_summary(found: Explanation, console: Console) -> None:
    """Print what a plan's report has room for: what binds, the levers, the price of the next."""
    section(console, "Why this plan (hwplan explain says more)")
    indented(console, escape(f"decided by: {_decided_by(found)}"))
    binding = [limit for limit in found.limits if limit.binds]
    words = "; ".join(_limit_words(limit) for limit in binding) or "none"
    indented(console, escape(f"limits that bind: {words}"))
    worth = [
        f"{lever.what} {signed(lever.delta_ms)} ms" + ("" if lever.fits else " (does not fit)")
        for lever in found.worth[:MOST_LEVERS]
        if abs(lever.delta_ms) >= SMALLEST_MS or not lever.fits
    ]
    indented(console, escape(f"without each lever: {', '.join(worth) or 'no step is longer'}"))
    indented(console, escape(f"next best: {_next_words(found)}"))
    better = [f"{name} {signed(one.delta_ms)} ms" for name, one in found.improvements.items()]
    if better:
        indented(console, escape(f"a single change would be shorter: {', '.join(better)}"))


def _decided_by(found: Explanation) -> str:
    faster = [one for one in found.speedups[:MOST_LEVERS] if one.saved_ms >= SMALLEST_MS]
    words = [
        f"{_of(one.resource, one.pool)} (10 % faster: {signed(-one.saved_ms)} ms)" for one in faster
    ]
    if found.step_ms > found.devices_ms + SMALLEST_MS:
        hidden = f"all else is done after {milliseconds(found.devices_ms)} ms"
        return f"{', '.join(words)}; {hidden}"
    return ", ".join(words)


def _of(what: str, pool: str) -> str:
    return f"{what} of {pool}" if pool else what


def _limit_words(limit: Limit) -> str:
    saved = signed(-limit.saved_ms)
    note = f", {limit.note}" if limit.note else ""
    return f"{limit.what} ({limit.relaxed}: {saved} ms{note})"


def _next_words(found: Explanation) -> str:
    row = found.next_best
    words = []
    if row is not None and row.step_ms is not None:
        words.append(f"{row.description}, {signed(row.step_ms - found.step_ms)} ms")
    words += [
        f"{name} with {change.what} {change.instead}, {signed(change.delta_ms)} ms"
        for name, change in found.second_policies.items()
        if change is not None
    ]
    return "; ".join(words) or "nothing else was priced"


def _path(found: Explanation, console: Console) -> None:
    section(console, "What the step is made of (its critical path)")
    table = columns("pool", "operation", "ms", "", "bound by", right=("ms",))
    for part in found.critical_path:
        table.add_row(
            escape(part.pool),
            escape(told(part.operation)),
            milliseconds(part.ms),
            bar(part.ms / found.step_ms),
            part.bound_by or "nothing that could be faster",
        )
    indented(console, table)
    parts = "+".join(milliseconds(part.ms) for part in found.critical_path)
    if len(found.critical_path) > 1:
        indented(console, f"{milliseconds(found.step_ms)} (={parts})")
    if found.step_ms > found.devices_ms + SMALLEST_MS:
        indented(
            console,
            "the hosts launch for longer than devices and links need: those are done after "
            f"{milliseconds(found.devices_ms)} ms",
        )


def _balance(found: Explanation, console: Console) -> None:
    section(console, "Balance of tables (their time on a rank that waits for no other)")
    headings = ("rank", "ms", "mean", "above", "pool's step")
    table = columns("pool", *headings, right=headings)
    for one in found.balance:
        table.add_row(
            escape(one.pool),
            f"{one.slowest_rank}",
            milliseconds(one.slowest_ms),
            milliseconds(one.mean_ms),
            percent(one.excess),
            milliseconds(one.own_step_ms),
        )
    indented(console, table)


def _limits(found: Explanation, console: Console) -> None:
    section(console, "What binds")
    table = columns("", "limit", "now", "relaxed", "step then")
    for limit in found.limits:
        step = "-" if limit.step_ms is None else stepped(limit.step_ms, found.step_ms)
        relaxed = ", ".join(part for part in (limit.relaxed, limit.note) if part)
        mark = "->" if limit.binds else ""
        table.add_row(
            mark,
            escape(limit.what),
            escape(limit.now),
            escape(relaxed),
            step,
        )
    indented(console, table)


def _speedups(found: Explanation, console: Console) -> None:
    section(console, "What 10 % more speed would be worth")
    table = columns("resource", "step then")
    nothing = []
    for one in found.speedups:
        name = escape(_of(one.resource, one.pool))
        if one.saved_ms >= SMALLEST_MS:
            table.add_row(name, stepped(one.step_ms, found.step_ms))
        else:
            nothing.append(name)
    indented(console, table)
    if nothing:
        indented(console, f"nothing: {', '.join(nothing)}")


def _levers(found: Explanation, console: Console) -> None:
    section(console, "What each lever is worth (switched to the plain value)")
    table = columns("lever", "planned", "plain", "step then", "fits")
    for lever in found.worth:
        table.add_row(*_change_cells(lever, found.step_ms))
    indented(console, table)
    same = [lever.what for lever in found.levers if not lever.made]
    if same:
        indented(console, escape(f"as the plain plan has it: {', '.join(same)}"))


def _change_cells(change: Change, planned_ms: float) -> Iterator[str]:
    yield escape(change.what)
    yield escape(change.planned)
    yield escape(change.instead)
    yield stepped(change.step_ms, planned_ms)
    yield "yes" if change.fits else escape(change.short_of)


def _next(found: Explanation, console: Console) -> None:
    section(console, "The price of the next best")
    row = found.next_best
    if row is not None and row.step_ms is not None:
        indented(
            console, escape(f"plan: {row.description}: {stepped(row.step_ms, found.step_ms)} ms")
        )
    elif found.considered:
        indented(console, "plan: every other one was given up by its bound")
    for name, change in found.second_policies.items():
        words = "no other policy fits"
        if change is not None:
            step = stepped(change.step_ms, found.step_ms)
            words = f"{change.what} {change.instead} instead of {change.planned}: {step} ms"
        indented(console, escape(f"policy of {name}: {words}"))


def _considered(found: Explanation, console: Console) -> None:
    if not found.considered:
        return
    section(console, "Considered")
    table = columns("", "what", "samples per rank", "step ms", "why not")
    for row in found.considered:
        step = "-" if row.step_ms is None else stepped(row.step_ms, found.step_ms)
        if row.chosen:
            step = milliseconds(found.step_ms)  # it may have been refined since
        why = row.note
        if row.step_ms is not None and not row.chosen and not why:
            why = "no shorter" if row.step_ms >= found.step_ms - SMALLEST_MS else "more devices"
        table.add_row(
            "->" if row.chosen else "",
            escape(row.description),
            ", ".join(f"{pool} {batch:,}" for pool, batch in row.local_batch.items()),
            step,
            escape(why),
        )
    indented(console, table)
    if found.idle_pools:
        indented(console, escape(f"pools left out: {', '.join(found.idle_pools)}"))
