"""``hwplan explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runtime.cli.options import AsJson
from runtime.cli.output import write_json, write_report


def explain(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    table: Annotated[
        str | None,
        typer.Option(
            "--table", metavar="NAME", help="Why this table sits where it does in each pool."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say why a plan is as it is.

    What its step is made of, which limits bind, what each lever is worth, what came next; with
    --table where a table sits and what moving it would cost.

    In Python: planner.explain.plan.explain_plan(plan), planner.explain.table.explain_table(plan,
    name).
    """
    from planner.specs.plan import load_plan

    plan = load_plan(plan_file)
    if table is None:
        from planner.explain.plan import explain_plan

        found = explain_plan(plan)
        if as_json:
            write_json(found.model_dump(mode="json"))
        else:
            from planner.report.explain import render_explanation

            write_report(lambda console: render_explanation(found, console))
        return
    from planner.explain.table import explain_table

    one = explain_table(plan, table)
    if as_json:
        write_json(one.model_dump(mode="json"))
    else:
        from planner.report.explain_table import render_table_explanation

        write_report(lambda console: render_table_explanation(one, console))
