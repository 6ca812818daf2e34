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
        bool, typer.Option("--measure", help="Also run the plans, in turns, and time them.")
    ] = False,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", metavar="N", callback=positive_int, help="Steps timed per plan (--measure)."
        ),
    ] = 40,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="Ray cluster to run on, or auto (--measure); an embedded one if left out.",
        ),
    ] = None,
    as_json: AsJson = False,
    time_limit: TimeLimit = 60.0,
    mip_gap: MipGap = 0.01,
) -> None:
    """Compare the plan with the naive port.

    On equal terms (matched: every device works) and freely, and lever by lever.

    In Python: planner.compare.compare(cluster, model),
    runtime.comparison.measure_comparison(comparison, steps).
    """
    from planner.specs.load import load_cluster, load_model

    cluster_spec, model_spec = load_cluster(cluster), load_model(model)
    from planner.compare import compare as compare_plans
    from planner.search import SearchOptions

    options = SearchOptions(mip_gap=mip_gap, time_limit_s=time_limit)
    if measure:
        from runtime.train import check_place, check_trainable

        check_trainable(model_spec)
        check_place(address)
    with working(f"planning {model_spec.name} on {cluster_spec.name}"):
        comparison = compare_plans(cluster_spec, model_spec, global_batch, options)
    from runtime.comparison import comparison_json, measure_comparison

    measured = measure_comparison(comparison, steps, address) if measure else None
    if as_json:
        write_json(comparison_json(comparison, measured))
    else:
        from planner.report.compare import render_comparison

        write_report(lambda console: render_comparison(comparison, console, measured))
