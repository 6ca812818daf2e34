"""``hwplan train``."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.specs.errors import UsageError
from runtime.cli.options import AsJson, GlobalBatch, positive_int
from runtime.cli.output import working, write_json, write_report
from runtime.stdout import stdout_for_results

if TYPE_CHECKING:
    from planner.specs.plan import Plan


RESERVE = 0.05
"""Of a device's memory, left free besides after it ran out."""


class OnOutOfMemory(StrEnum):
    """What to do when a device's memory does not suffice after all."""

    STOP = "stop"
    REPLAN = "replan"


def train(
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="PLAN", help="A plan.json to execute.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="FILE", help="Plan for this cluster file first."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME_OR_FILE", help="The model to plan and train."),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="SOURCE",
            help="synthetic, or criteo:PATH[,PATH...] (TSV, plain or gzip).",
        ),
    ] = "synthetic",
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            callback=positive_int,
            help="Stop after N steps (synthetic: 100 if left out).",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs", metavar="N", callback=positive_int, help="Passes over the files (1)."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="Ray cluster to run on, or auto; an embedded one on this machine if left out.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="New folder for plan.json, metrics.jsonl and result.json (runs/...).",
        ),
    ] = None,
    eval_fraction: Annotated[
        float,
        typer.Option(
            "--eval-fraction", metavar="F", help="Share of the samples held out for the metrics."
        ),
    ] = 0.1,
    seed: Annotated[
        int,
        typer.Option("--seed", metavar="N", min=0, help="Of initial weights, samples and order."),
    ] = 0,
    global_batch: GlobalBatch = None,
    kernels: Annotated[
        Path | None,
        typer.Option(
            "--kernels",
            metavar="DIR",
            help="Kernels of the plan (hwplan kernels compile), at this path on every node.",
        ),
    ] = None,
    ignore_fingerprint: Annotated[
        bool,
        typer.Option(
            "--ignore-fingerprint",
            help="Execute the plan even if cluster, model, profiles or hwplan changed since.",
        ),
    ] = False,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint-dir",
            metavar="DIR",
            help="Save checkpoints there (a folder that all nodes share), and go on from the "
            "newest one of this run that it holds.",
        ),
    ] = None,
    checkpoint_interval: Annotated[
        int,
        typer.Option(
            "--checkpoint-interval",
            metavar="N",
            callback=positive_int,
            help="Steps from one checkpoint to the next.",
        ),
    ] = 1000,
    keep: Annotated[
        int,
        typer.Option(
            "--keep", metavar="N", callback=positive_int, help="Checkpoints kept: the newest N."
        ),
    ] = 3,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            metavar="N",
            min=0,
            help="After a worker or node is lost or hangs, start again from the last checkpoint, "
            "planning again if nodes are missing: so often without a checkpoint between.",
        ),
    ] = 0,
    on_out_of_memory: Annotated[
        OnOutOfMemory,
        typer.Option(
            "--on-out-of-memory",
            help="stop, or replan: plan again with 5 % more of every device's memory left free.",
        ),
    ] = OnOutOfMemory.STOP,
    mllog: Annotated[
        Path | None,
        typer.Option("--mllog", metavar="FILE", help="Write MLPerf's :::MLLOG lines there."),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="DIR", help="Write TensorBoard's curves there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model as a plan says, on Ray.

    Executes a saved plan (--plan), or plans first (--cluster and --model). Progress goes to stderr.

    In Python: runtime.train.train(task, folder).
    """
    with stdout_for_results():
        from runtime.run_folder import RunFolder, check_folder, default_folder
        from runtime.train import check_place
        from trainers.task import TrainTask, parse_data

        source = parse_data(data)
        check_place(address, source.paths)
        if out is not None:
            check_folder(out)
        chosen = _plan_of(plan, cluster, model, global_batch, ignore_fingerprint)
        from runtime.cli.progress import Progress, render_result
        from runtime.elastic import Recovery
        from runtime.observe.several import observers
        from runtime.train import train as run

        task = TrainTask(
            plan=chosen,
            data=source,
            steps=steps,
            epochs=epochs,
            seed=seed,
            eval_fraction=eval_fraction,
            checkpoint_dir=None if checkpoint_dir is None else str(checkpoint_dir.absolute()),
            checkpoint_interval_steps=checkpoint_interval,
            keep_checkpoints=keep,
            kernel_store=_checked_store(kernels, plan, chosen),
        )
        folder = RunFolder(out if out is not None else default_folder(chosen), chosen)
        recovery = Recovery(
            max_restarts=max_restarts,
            reserve_after_oom=RESERVE if on_out_of_memory is OnOutOfMemory.REPLAN else 0.0,
        )
        with Progress(task) as progress, observers(chosen, seed, mllog, tensorboard) as others:
            result = run(task, folder, address, (progress.on_event, *others), recovery)
    if result["malformed_lines"]:
        examples = ", ".join(result["malformed_examples"])
        print(
            f"warning: {result['malformed_lines']} malformed lines were left out ({examples})",
            file=sys.stderr,
        )
    if as_json:
        write_json(result)
    else:
        write_report(lambda console: render_result(result, console))


def _checked_store(kernels: Path | None, plan_file: Path | None, plan: Plan) -> str | None:
    """The store's absolute path, checked here before any worker starts.

    Raises:
        UsageError: no saved plan that it could belong to. SpecError: an unusable store.
    """
    if kernels is None:
        return None
    if plan_file is None:
        raise UsageError(
            "compiled kernels belong to a saved plan",
            field="--kernels",
            value=str(kernels),
            fix="give the plan that they were compiled for with --plan",
        )
    from trainers.kernels.store import KernelStore

    KernelStore.open(kernels, plan)
    return str(kernels.absolute())


def _plan_of(
    plan_file: Path | None,
    cluster: str | None,
    model: str | None,
    global_batch: int | None,
    ignore_fingerprint: bool,
) -> Plan:
    """The saved plan, checked against what is here now, or a new one.

    Raises:
        UsageError: neither or both ways are given, or the plan is for something else.
    """
    from planner.specs.load import load_cluster, load_model

    if plan_file is None:
        if cluster is None or model is None:
            raise UsageError(
                "nothing to train",
                field="--cluster" if cluster is None else "--model",
                fix="give --plan PLAN, or both --cluster FILE and --model NAME_OR_FILE",
            )
        from planner.search import plan_job
        from runtime.train import check_trainable

        cluster_spec, model_spec = load_cluster(cluster), load_model(model)
        check_trainable(model_spec)  # before the minutes that planning a large model may take
        with working(f"planning {model_spec.name} on {cluster_spec.name}"):
            return plan_job(cluster_spec, model_spec, global_batch)
    if global_batch is not None:
        raise UsageError(
            "a saved plan has its global batch",
            field="--global-batch",
            value=global_batch,
            fix="leave it out, or plan again with hwplan plan --global-batch",
        )
    from planner.specs.plan import load_plan
    from runtime.plan_check import check_fingerprint

    saved = load_plan(plan_file)
    if not ignore_fingerprint:
        check_fingerprint(
            saved,
            plan_file,
            load_cluster(cluster) if cluster is not None else saved.cluster,
            load_model(model) if model is not None else saved.model,
        )
    return saved
