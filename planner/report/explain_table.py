"""One table's explanation for the terminal: where it sits, at what cost, where else it could."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from planner.explain.table import TableExplanation, TableInPool
from planner.explain.words import placed
from planner.report.explain import signed, stepped
from planner.report.text import columns, indented, milliseconds, percent, section, size

MOST_MOVES = 12
"""Other placements shown, one of each sharding type and kernel; ``--json`` has all."""


def render_table_explanation(found: TableExplanation, console: Console) -> None:
    """Print where a table sits in each pool and what moving it would do."""
    console.print(f"[bold]{escape(f'Table {found.table}')}[/bold]")
    indented(
        console,
        f"{found.num_embeddings:,} rows x {found.embedding_dim} columns, {found.pooling:g} ids per "
        f"sample, popularity exponent {found.zipf_exponent:g}; step {milliseconds(found.step_ms)} "
        "ms; all other tables stay where they are",
    )
    for name, pool in found.pools.items():
        _where(name, pool, console)
        _moves(pool, found.step_ms, console)
        console.print()
        indented(console, escape(f"Why: {pool.verdict}"))


def _where(name: str, pool: TableInPool, console: Console) -> None:
    section(console, f"In {name}: {placed(pool.placement)}")
    if pool.replica_groups > 1:
        indented(console, f"ranks count inside each of the {pool.replica_groups} replica groups")
    cost = pool.cost
    table = columns("on rank", "forward", "backward", "", right=("forward", "backward"))
    rows = (
        ("look-up and update", cost.lookup_forward_ms, cost.lookup_backward_ms, "ms"),
        ("rows fetched ahead", cost.cache_fetch_ms, None, "ms"),
        ("pooled rows sent", cost.rows_sent_ms, cost.gradients_received_ms, "ms (gradients back)"),
        ("pooled rows received", cost.rows_received_ms, cost.gradients_sent_ms, "ms"),
        ("ids sent", cost.ids_sent_ms, None, "ms"),
        ("ids received", cost.ids_received_ms, None, "ms"),
        ("all-reduce", None, cost.all_reduce_ms, "ms"),
    )
    for what, forward, backward, unit in rows:
        if forward or backward:
            cells = ("" if one is None else milliseconds(one) for one in (forward, backward))
            table.add_row(what, *cells, unit)
    indented(console, table)
    memory = f"{size(cost.hbm_bytes)} of device memory"
    if cost.host_bytes:
        memory += f" and {size(cost.host_bytes)} of host memory"
    indented(
        console,
        f"rank {cost.rank}, where it costs most: {memory}; weights of one copy: "
        f"{size(pool.weight_bytes)}",
    )
    indented(
        console,
        f"{percent(pool.share_of_slowest)} of what tables cost rank {pool.slowest_rank}, the "
        "slowest",
    )


def _moves(pool: TableInPool, step_ms: float, console: Console) -> None:
    table = columns("instead", "step then", "tables", "memory", "fits", right=("tables", "memory"))
    best = {(m.placement.sharding_type, m.placement.compute_kernel): m for m in pool.moves[::-1]}
    shown = [move for move in pool.moves if move in best.values()][:MOST_MOVES]
    for move in shown:
        sign = "-" if move.memory_delta_bytes < 0 else "+"
        table.add_row(
            escape(placed(move.placement)),
            stepped(move.step_ms, step_ms),
            signed(move.tables_delta_ms),
            f"{sign}{size(abs(move.memory_delta_bytes))}",
            "yes" if move.fits else escape(move.short_of),
        )
    console.print()
    indented(console, table)
    hidden = len(pool.moves) - len(shown)
    if hidden > 0:
        indented(console, f"the best of each sharding type and kernel; --json has {hidden} more")
