"""A plan, read top down: how good it is, what each pool does, where the time and memory go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from planner.explain.plan import Explanation
from planner.report.explain import render_summary
from planner.report.plan_kernels import render_kernels
from planner.report.text import (
    bar,
    columns,
    indented,
    milliseconds,
    percent,
    ranges,
    rate,
    section,
    size,
)
from planner.specs.model import Table as EmbeddingTable
from planner.specs.plan import Placement, Plan, PoolPlan

BIGGEST_TABLES = 5
NOT_CATEGORIES = ("total", "capacity", "host", "host_capacity")


def render_plan(
    plan: Plan,
    console: Console,
    naive: Plan | None = None,
    why_no_naive: str = "",
    saved_to: Path | None = None,
    explanation: Explanation | None = None,
) -> None:
    """Print a plan.

    Args:
        plan: what to print.
        console: where to; plain text if it is no terminal.
        naive: the naive port for the same cluster and model, to compare with.
        why_no_naive: why there is none (it does not fit, say).
        saved_to: file that the plan was written to.
        explanation: why the plan is as it is, in short.
    """
    _headline(plan, console, naive, why_no_naive)
    _pools(plan, console)
    for name, pool in plan.pools.items():
        _placements(plan, name, pool, console)
    for name, pool in plan.pools.items():
        _step(name, pool, console)
    for name, pool in plan.pools.items():
        render_kernels(name, pool, console)
    _memory(plan, console)
    _exchange(plan, console)
    _considered(plan, console)
    if explanation is not None:
        render_summary(explanation, console)
    _trust(plan, console)
    if saved_to is not None:
        console.print()
        console.print(f"Saved to {escape(str(saved_to))}", soft_wrap=True)


def _headline(plan: Plan, console: Console, naive: Plan | None, why_no_naive: str) -> None:
    job = escape(f"{plan.model.name} on {plan.cluster.name}")
    predicted = plan.predicted
    if plan.kind == "naive":
        console.print(f"[bold]{job}: the naive port[/bold]")
    elif naive is not None:
        speedup = predicted.samples_per_s / naive.predicted.samples_per_s
        on = " on all devices" if any(_left_out(plan)) else ""
        console.print(f"[bold]{job}: {speedup:.2f}x the naive port{on}, predicted[/bold]")
    elif why_no_naive:
        console.print(f"[bold]{job}: the naive port does not run at all[/bold]")
    else:
        console.print(f"[bold]{job}[/bold]")
    indented(
        console,
        f"step {milliseconds(predicted.step_ms)} ms, {rate(predicted.samples_per_s)} "
        f"at global batch {plan.global_batch:,}",
    )
    if naive is not None and plan.kind == "planned":
        indented(
            console,
            f"naive port: step {milliseconds(naive.predicted.step_ms)} ms, "
            f"{rate(naive.predicted.samples_per_s)}",
        )
    if why_no_naive:
        indented(console, f"naive port: {escape(why_no_naive)}")
    unused = list(_left_out(plan))
    if unused:
        indented(
            console, escape(f"left out: {'; '.join(unused)}. The step is no shorter with them")
        )


def _left_out(plan: Plan) -> Iterator[str]:
    """Pools, and nodes of working pools, that have no part in the plan."""
    at_work = plan.nodes_at_work
    for pool in plan.cluster.pools:
        working = at_work.get(pool.name, 0)
        if working == 0:
            yield f"pool {pool.name} (all nodes)"
        elif working < pool.nodes:
            yield f"{pool.nodes - working} of {pool.nodes} nodes of pool {pool.name}"


def _pools(plan: Plan, console: Console) -> None:
    section(console, "Pools")
    table = columns(
        "pool", "device", "ranks", "samples per rank", "share", "compute", "comm.", "recompute",
        right=("ranks", "samples per rank", "share"),
    )  # fmt: skip
    for name, pool in plan.pools.items():
        samples = pool.ranks * pool.local_batch
        table.add_row(
            escape(name),
            escape(Path(pool.device).stem),
            _ranks(pool),
            f"{pool.local_batch:,} (={samples:,}/{pool.ranks})",
            percent(plan.share(name)),
            pool.policy.compute_precision,
            pool.policy.communication_precision,
            escape(", ".join(pool.policy.recompute) or "none"),
        )
    indented(console, table)


def _ranks(pool: PoolPlan) -> str:
    """With the replica groups, where there are several."""
    groups = pool.replica_groups
    return f"{pool.ranks}" + (f" (={groups} groups of {pool.group_ranks})" if groups > 1 else "")


def _placements(plan: Plan, name: str, pool: PoolPlan, console: Console) -> None:
    section(console, f"Tables in {name}")
    by_name = {table.name: table for table in plan.model.all_tables}
    kinds: Counter[tuple[str, str, str]] = Counter()
    weights: Counter[tuple[str, str, str]] = Counter()
    for table_name, placement in pool.placements.items():
        kind = (placement.sharding_type, placement.compute_kernel, placement.data_type)
        kinds[kind] += 1
        weights[kind] += _weight_bytes(by_name[table_name], placement)
    summary = columns("tables", "sharding", "kernel", "weights", "size", right=("tables", "size"))
    for group, count in sorted(kinds.items(), key=lambda item: (-weights[item[0]], item[0])):
        summary.add_row(f"{count:,}", *group, size(weights[group]))
    indented(console, summary)
    biggest = sorted(
        pool.placements.items(), key=lambda item: -_weight_bytes(by_name[item[0]], item[1])
    )[:BIGGEST_TABLES]
    detail = columns("biggest", "rows x columns", "size", "sharding", "ranks", right=("size",))
    for table_name, placement in biggest:
        shape = by_name[table_name]
        detail.add_row(
            escape(table_name),
            f"{shape.num_embeddings:,} x {shape.embedding_dim}",
            size(_weight_bytes(shape, placement)),
            _how(placement),
            ranges(placement.ranks),
        )
    console.print()
    indented(console, detail)


def _weight_bytes(table: EmbeddingTable, placement: Placement) -> int:
    return table.parameters * placement.data_type.bytes


def _how(placement: Placement) -> str:
    """Sharding, then what is particular about it."""
    text = str(placement.sharding_type)
    if placement.column_widths:
        text += f" {'+'.join(map(str, placement.column_widths))}"
    if placement.cache_load_factor is not None:
        text += f", {percent(placement.cache_load_factor)} cached"
    return text


def _step(name: str, pool: PoolPlan, console: Console) -> None:
    prediction = pool.predicted
    section(
        console,
        f"Step of {name}: {milliseconds(prediction.step_ms)} ms "
        f"(rank {prediction.slowest_rank} is slowest)",
    )
    critical = set(prediction.critical_path)
    table = columns("operation", "ms", "", "", right=("ms",))
    for operation, duration_ms in prediction.breakdown_ms.items():
        if duration_ms == 0:
            continue
        table.add_row(
            escape(operation),
            milliseconds(duration_ms),
            bar(duration_ms / prediction.step_ms),
            "" if operation in critical else "hidden",
        )
    indented(console, table)


def _memory(plan: Plan, console: Console) -> None:
    for name, pool in plan.pools.items():
        rank, usage = max(
            enumerate(pool.memory_bytes), key=lambda item: item[1]["total"] / item[1]["capacity"]
        )
        section(
            console,
            f"Memory of {name}: {size(usage['total'])} of {size(usage['capacity'])} "
            f"on rank {rank}, the fullest",
        )
        table = columns("category", "size", "", right=("size",))
        categories = [item for item in usage.items() if item[0] not in NOT_CATEGORIES and item[1]]
        for category, used in sorted(categories, key=lambda item: -item[1]):
            table.add_row(category.replace("_", " "), size(used), bar(used / usage["capacity"]))
        indented(console, table)
        if usage.get("host"):
            indented(console, f"and {size(usage['host'])} of host memory for tables")


def _exchange(plan: Plan, console: Console) -> None:
    exchange, several = plan.exchange, len(plan.pools) > 1
    if not several and not exchange.embedding_bytes_per_exchange:
        return
    section(console, "Between pools" if several else "Between replica groups")
    if several:
        indented(console, f"dense gradients, every step: {size(exchange.dense_bytes_per_step)}")
    every = exchange.embedding_interval_steps
    indented(
        console,
        f"embedding rows, every {'step' if every == 1 else f'{every} steps'}: "
        f"{size(exchange.embedding_bytes_per_exchange)} "
        f"(the model allows {plan.model.max_exchange_interval_steps})",
    )


def _considered(plan: Plan, console: Console) -> None:
    if not plan.considered:
        return
    section(console, "Considered")
    table = columns("", "samples per rank", "ms", "what", right=("ms",))
    for alternative in plan.considered:
        table.add_row(
            "->" if alternative.chosen else "",
            ", ".join(f"{pool} {batch:,}" for pool, batch in alternative.local_batch.items()),
            "-" if alternative.step_ms is None else milliseconds(alternative.step_ms),
            escape("; ".join(part for part in (alternative.description, alternative.note) if part)),
        )
    indented(console, table)


PROOFS = {
    "optimal": "proven within the gap asked for",
    "exhausted": "search ended, its bounds prove no more",
    "time_limit": "the time limit was hit first",
}
"""What a solver's status says of the gap."""


def _trust(plan: Plan, console: Console) -> None:
    predicted, solver = plan.predicted, plan.solver
    section(console, "How far to trust this")
    if solver.status != "heuristic":
        proof = PROOFS[solver.status]
        indented(
            console,
            f"gap: {percent(predicted.gap)} above the lower bound of "
            f"{milliseconds(predicted.lower_bound_ms)} ms",
        )
        indented(
            console,
            f"solver: {escape(solver.name)}, {solver.status} ({proof}), "
            f"{solver.evaluated} programs solved, {solver.pruned} excluded by bounds; "
            f"limits: gap {percent(solver.mip_gap)}, {solver.time_limit_s:g} s",
        )
    counts = ", ".join(f"{count} {origin}" for origin, count in predicted.provenance.items())
    indented(console, f"constants: {counts}")
    indented(console, f"error band from those: +-{percent(predicted.error_band)}")
    indented(console, f"fingerprint: {plan.fingerprint[:16]}")
