"""``hwplan plan`` and ``hwplan show``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli.interchange import Constraints, under_constraints
from runtime.cli.options import (
    AsJson,
    ClusterFile,
    GlobalBatch,
    MipGap,
    ModelName,
    TimeLimit,
    TopK,
    output_file,
)
from runtime.cli.output import working, write_json, write_report

if TYPE_CHECKING:
    from planner.specs.plan import Plan


def plan(
    cluster: ClusterFile,
    model: ModelName,
    global_batch: GlobalBatch = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", callback=output_file, help="Write the plan here (plan.json)."
        ),
    ] = None,
    as_json: AsJson = False,
    top_k: TopK = 5,
    time_limit: TimeLimit = 60.0,
    mip_gap: MipGap = 0.01,
    constraints: Constraints = None,
) -> None:
    """Find the fastest plan for a cluster.

    Also says how far from optimal it can be, and what else was considered.

    In Python: planner.search.plan_job(cluster, model), planner.specs.plan.save_plan(plan, path).
    """
    from planner.specs.load import load_cluster, load_model
    from planner.specs.plan import plan_json, save_plan

    cluster_spec, model_spec = load_cluster(cluster), load_model(model)
    model_spec = under_constraints(model_spec, constraints)
    from planner.search import SearchOptions, plan_job

    options = SearchOptions(mip_gap=mip_gap, time_limit_s=time_limit, top_k=top_k)
    with working(f"planning {model_spec.name} on {cluster_spec.name}"):
        result = plan_job(cluster_spec, model_spec, global_batch, options)
    if out is not None:
        save_plan(result, out)
    if as_json:
        write_json(plan_json(result))
    else:
        _report(result, saved_to=out)


def show(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    as_json: AsJson = False,
) -> None:
    """Print a saved plan.

    In Python: planner.specs.plan.load_plan(path), planner.report.plan.render_plan(plan, console).
    """
    from planner.specs.plan import load_plan, plan_json

    saved = load_plan(plan_file)
    if as_json:
        write_json(plan_json(saved))
    else:
        _report(saved)


def _report(shown: Plan, saved_to: Path | None = None) -> None:
    """Print a plan beside the naive port of the same job.

    Where a device profile is no longer there, what would have to be priced again is left out.
    """
    from planner.baselines.naive import naive_port
    from planner.explain.plan import explain_plan
    from planner.report.plan import render_plan
    from planner.specs.errors import InfeasibleError, SpecError, UsageError

    naive, why, why_no_naive = None, None, ""
    try:
        why = explain_plan(shown)
        naive = naive_port(shown.cluster, shown.model, shown.global_batch)
    except InfeasibleError as error:
        why_no_naive = error.problem
    except (SpecError, UsageError) as error:
        print(f"note: nothing is priced again: {error}", file=sys.stderr)
    write_report(
        lambda console: render_plan(shown, console, naive, why_no_naive, saved_to, explanation=why)
    )
