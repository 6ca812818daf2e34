"""``hwplan compare``."""

from __future__ import annotations

from typing import Annotated

import typer

from runtime.cli.options import (
    AsJson,
    ClusterFile,
    GlobalBatch,
    MipGap,
    ModelName,
    TimeLimit,
    positive_int,
)
from runtime.cli.output import working, write_json, write_report


def compare(
    cluster: ClusterFile,
    model: ModelName,
    global_batch: GlobalBatch = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run every plan on this machine and time it.")
    ] = False,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", metavar="N", callback=positive_int, help="Steps timed per plan (--measure)."
        ),
    ] = 40,
    as_json: AsJson = False,
    time_limit: TimeLimit = 60.0,
    mip_gap: MipGap = 0.01,
) -> None:
    """Compare the plan with the naive port.

    On equal terms (matched: every device works) and freely, and lever by lever.

    In Python: planner.compare.compare(cluster, model), runtime.measure.measure(plans).
    """
    from planner.specs.load import load_cluster, load_model

    cluster_spec, model_spec = load_cluster(cluster), load_model(model)
    from planner.compare import compare as compare_plans
    from planner.search import SearchOptions

    options = SearchOptions(mip_gap=mip_gap, time_limit_s=time_limit)
    with working(f"planning {model_spec.name} on {cluster_spec.name}"):
        comparison = compare_plans(cluster_spec, model_spec, global_batch, options)
    if measure:
        from runtime.measure import measure_comparison

        comparison = measure_comparison(comparison, steps=steps)
    if as_json:
        write_json(comparison.model_dump(mode="json"))
    else:
        from planner.report.compare import render_comparison

        write_report(lambda console: render_comparison(comparison, console))
