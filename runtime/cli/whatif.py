"""``hwplan sweep``, ``hwplan size`` and ``hwplan sensitivity``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.specs.errors import UsageError
from runtime.cli.options import (
    AsJson,
    ClusterFile,
    GlobalBatch,
    MipGap,
    ModelName,
    TimeLimit,
    output_file,
    positive_float,
    positive_int,
)
from runtime.cli.output import counting, write_json, write_report

if TYPE_CHECKING:
    from planner.specs.base import Spec

Vary = Annotated[
    list[str],
    typer.Option(
        "--vary",
        metavar="AXIS=VALUES",
        help="What varies: nodes:POOL=1..8, device:POOL=h200,b200, nic_gbps:POOL=200,400, "
        "bridge_gbps=40,100 or global_batch=8192,16384. May be given several times.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", callback=output_file, help="Also write the result here (JSON)."
    ),
]
PlanTime = Annotated[
    float,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        callback=positive_float,
        help="Of each plan: stop searching after this long.",
    ),
]


def sweep(
    cluster: ClusterFile,
    model: ModelName,
    vary: Vary,
    global_batch: GlobalBatch = None,
    max_points: Annotated[
        int,
        typer.Option(
            "--max-points", metavar="N", callback=positive_int, help="Refuse larger sweeps."
        ),
    ] = 200,
    out: Out = None,
    as_json: AsJson = False,
    time_limit: PlanTime = 60.0,
    mip_gap: MipGap = 0.01,
) -> None:
    """Plan a job on variants of a cluster, and mark those worth having.

    A point is worth having (*) if no other has as many samples/s with as few devices, dollars per
    hour and watts.

    In Python: planner.whatif.sweep.sweep(cluster, model, vary).
    """
    from planner.specs.load import load_cluster, load_model

    cluster_spec, model_spec = load_cluster(cluster), load_model(model)
    from planner.search import SearchOptions
    from planner.whatif.report import render_sweep
    from planner.whatif.sweep import sweep as sweep_points

    options = SearchOptions(mip_gap=mip_gap, time_limit_s=time_limit)
    with counting(f"planning {model_spec.name} on variants of {cluster_spec.name}") as progress:
        found = sweep_points(
            cluster_spec,
            model_spec,
            vary,
            global_batch,
            options,
            max_points=max_points,
            progress=progress,
        )
    _save(found, out)
    if as_json:
        write_json(_data(found))
    else:
        write_report(lambda console: render_sweep(found, console))


def size(
    cluster: ClusterFile,
    model: ModelName,
    target: Annotated[
        float,
        typer.Option(
            "--target-samples-per-s",
            metavar="X",
            callback=positive_float,
            help="Rate that the job must reach.",
        ),
    ],
    objective: Annotated[
        str,
        typer.Option(
            "--objective", metavar="WHAT", help="What should be small: devices, dollars or watts."
        ),
    ] = "devices",
    max_nodes: Annotated[
        list[str] | None,
        typer.Option(
            "--max-nodes",
            metavar="N or POOL=N",
            help="Most nodes of each pool; the cluster file's if left out.",
        ),
    ] = None,
    global_batch: GlobalBatch = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="global_batch=VALUES",
            help="Global batches of which any may be used: global_batch=8192,16384.",
        ),
    ] = None,
    out: Out = None,
    as_json: AsJson = False,
    time_limit: PlanTime = 60.0,
    mip_gap: MipGap = 0.01,
) -> None:
    """Find the smallest cluster that reaches a rate.

    The pools are those of the cluster file, with any number of nodes.

    In Python: planner.whatif.size.size(cluster, model, target_samples_per_s).
    """
    from planner.specs.load import load_cluster, load_model

    cluster_spec, model_spec = load_cluster(cluster), load_model(model)
    from planner.search import SearchOptions
    from planner.whatif.price import as_objective
    from planner.whatif.report import render_sizing
    from planner.whatif.size import batches_of
    from planner.whatif.size import size as smallest
    from planner.whatif.vary import parse_max_nodes

    options = SearchOptions(mip_gap=mip_gap, time_limit_s=time_limit)
    if vary and global_batch is not None:
        raise UsageError(
            "the global batch is given twice",
            field="--global-batch",
            value=global_batch,
            fix="give --global-batch, or --vary global_batch=…",
        )
    batches = batches_of(vary or (), cluster_spec)
    with counting(f"sizing {cluster_spec.name} for {model_spec.name}") as progress:
        found = smallest(
            cluster_spec,
            model_spec,
            target,
            objective=as_objective(objective),
            most_nodes=parse_max_nodes(max_nodes or (), cluster_spec),
            global_batches=batches if global_batch is None else (global_batch,),
            options=options,
            progress=progress,
        )
    _save(found.sizing, out)
    if as_json:
        write_json(_data(found.sizing))
    else:
        write_report(lambda console: render_sizing(found.sizing, console))


def sensitivity(
    cluster: ClusterFile,
    model: ModelName,
    global_batch: GlobalBatch = None,
    most: Annotated[
        int,
        typer.Option(
            "--most",
            metavar="N",
            callback=positive_int,
            help="Constants for which the job is planned again: those that move the step most.",
        ),
    ] = 20,
    only: Annotated[
        str,
        typer.Option(
            "--only", metavar="TEXT", help="Constants whose DEVICE:PATH holds this, e.g. embedding."
        ),
    ] = "",
    assumed_error: Annotated[
        float,
        typer.Option(
            "--assumed-error",
            metavar="E",
            callback=positive_float,
            help="Relative error of assumed constants that have none in the profile.",
        ),
    ] = 0.3,
    out: Out = None,
    as_json: AsJson = False,
    time_limit: TimeLimit = 60.0,
    mip_gap: MipGap = 0.01,
) -> None:
    """Find the constants that would change the plan if they were off by their error.

    In Python: planner.whatif.sensitivity.sensitivity(cluster, model).
    """
    from planner.specs.load import load_cluster, load_model

    cluster_spec, model_spec = load_cluster(cluster), load_model(model)
    from planner.search import SearchOptions
    from planner.whatif.report import render_sensitivity
    from planner.whatif.sensitivity import sensitivity as shifts

    options = SearchOptions(mip_gap=mip_gap, time_limit_s=time_limit)
    with counting(f"moving the constants of {model_spec.name} on {cluster_spec.name}") as progress:
        found = shifts(
            cluster_spec,
            model_spec,
            global_batch,
            options,
            most=most,
            assumed_error=assumed_error,
            only=only,
            progress=progress,
        )
    _save(found, out)
    if as_json:
        write_json(_data(found))
    else:
        write_report(lambda console: render_sensitivity(found, console))


def _data(found: Spec) -> dict[str, Any]:
    return found.model_dump(mode="json")


def _save(found: Spec, out: Path | None) -> None:
    if out is not None:
        from planner.specs.base import write_atomically

        write_atomically(out, json.dumps(_data(found), indent=2, allow_nan=False) + "\n")
