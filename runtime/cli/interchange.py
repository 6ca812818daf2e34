"""``hwplan import`` and ``hwplan export``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.specs.errors import UsageError
from runtime.cli.options import AsJson, GlobalBatch, output_file, positive_float
from runtime.cli.output import write, write_json

if TYPE_CHECKING:
    from planner.specs.model import ModelSpec, TableGroup

Constraints = Annotated[
    Path | None,
    typer.Option(
        "--constraints",
        metavar="FILE",
        help="Sharding types and kernels allowed per table, in TorchEasyRec's words "
        "(docs/interchange.md).",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", callback=output_file, help="Write here instead of stdout."
    ),
]


def under_constraints(model: ModelSpec, file: Path | None) -> ModelSpec:
    """The model under the constraints of a file, if one was given.

    Raises:
        SpecError, UsageError: see ``planner.interchange.constraints``.
    """
    if file is None:
        return model
    from planner.interchange.constraints import constrained, load_constraints

    return constrained(model, load_constraints(file), file)


def _numbers(option: typer.CallbackParam, value: str | None) -> str | None:
    """The text, if it is a comma-separated list of whole numbers.

    Raises:
        UsageError: it is not.
    """
    if value is not None and not all(part.strip().isdecimal() for part in value.split(",")):
        raise UsageError(
            "must be whole numbers with commas between them",
            field=option.opts[-1],
            value=value,
            fix=f"write for example {option.opts[-1]} 1000,200,30",
        )
    return value


def _list_option(name: str, help_text: str) -> Any:
    return typer.Option(name, metavar="N,N,…", callback=_numbers, help=help_text)


def _parsed(text: str | None) -> list[int] | None:
    return None if text is None else [int(part) for part in text.split(",")]


def import_tables(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="table_configs.json of NeuroShard or DreamShard, or a script, configuration or "
            "command line with MLPerf's or HugeCTR's lists.",
        ),
    ] = None,
    rows: Annotated[str | None, _list_option("--rows", "Rows of each table; no FILE.")] = None,
    pooling: Annotated[
        str | None, _list_option("--pooling", "With --rows: ids per sample of each table (1).")
    ] = None,
    dim: Annotated[
        str | None,
        _list_option("--dim", "Embedding width: one for all, or with --rows one per table."),
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option("--tasks", metavar="FILE", help="Task file of NeuroShard or DreamShard."),
    ] = None,
    task: Annotated[
        int, typer.Option("--task", metavar="N", min=0, help="Line of the task file, from 0.")
    ] = 0,
    min_pooling: Annotated[
        float | None,
        typer.Option(
            "--min-pooling",
            metavar="X",
            callback=positive_float,
            help="Ids per sample of tables that have fewer in FILE (DreamShard rounds down to 0).",
        ),
    ] = None,
    zipf_exponent: Annotated[
        float | None,
        typer.Option(
            "--zipf-exponent",
            metavar="S",
            min=0.0,
            help="Popularity law of all tables; from the bins of a table_configs.json, else 0.",
        ),
    ] = None,
    like: Annotated[
        str,
        typer.Option(
            "--like",
            metavar="NAME_OR_FILE",
            help="Model that gives the dense part, the optimizers and the precision.",
        ),
    ] = "dlrm",
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Of the new model.")
    ] = "imported",
    global_batch: GlobalBatch = None,
    dense_features: Annotated[
        int | None, typer.Option("--dense-features", metavar="N", min=0, help="Dense inputs.")
    ] = None,
    bottom_mlp: Annotated[
        str | None, _list_option("--bottom-mlp", "Widths of the bottom network.")
    ] = None,
    top_mlp: Annotated[
        str | None, _list_option("--top-mlp", "Widths of the top network, the last is 1.")
    ] = None,
    constraints: Constraints = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Make a model file of other systems' embedding tables.

    Writes YAML that --model takes, to --out or stdout.

    In Python: planner.interchange.read_tables.read_tables(path), then
    planner.interchange.model_file.model_of_tables(base, tables, name=…, source=…) and save_model.
    """
    from planner.interchange.model_file import (
        model_of_tables,
        model_yaml,
        save_model,
        with_popularity,
    )
    from planner.specs.load import load_model

    base = load_model(like)
    tables = _tables(file, rows, pooling, dim, tasks, task, min_pooling)
    if zipf_exponent is not None:
        tables = with_popularity(tables, zipf_exponent)
    model = model_of_tables(
        base,
        tables,
        name=name,
        source=f"tables: {file.name if file else 'the command line of hwplan import'}; "
        f"dense part: {base.source}",
        global_batch=global_batch,
        dense_features=dense_features,
        bottom_mlp=_parsed(bottom_mlp),
        top_mlp=_parsed(top_mlp),
    )
    model = under_constraints(model, constraints)
    if out is not None:
        save_model(model, out)
    if as_json:
        write_json(model.model_dump(mode="json"))
    elif out is None:
        write(model_yaml(model))
    else:
        gib = model.embedding_parameters * 4 / 2**30
        write(f"{out}: {len(model.all_tables)} tables, {gib:,.1f} GiB in fp32\n")


def _tables(
    file: Path | None,
    rows: str | None,
    pooling: str | None,
    dim: str | None,
    tasks: Path | None,
    task: int,
    min_pooling: float | None,
) -> tuple[TableGroup, ...]:
    """Tables of the file or of the options.

    Raises:
        UsageError: neither or both are given. SpecError: unusable tables.
    """
    from planner.interchange.read_tables import read_tables, tables_of_options

    if (file is None) == (rows is None):
        raise UsageError(
            "one source of tables is needed",
            field="FILE" if file is None else "--rows",
            fix="give a FILE, or --rows N,N,… with --dim N",
        )
    widths = _parsed(dim)
    if rows is not None:
        return tables_of_options(_parsed(rows) or [], _parsed(pooling), widths)
    if pooling is not None or (widths and len(widths) > 1):
        raise UsageError(
            "the file says this table by table",
            field="--dim" if pooling is None else "--pooling",
            value=dim if pooling is None else pooling,
            fix="leave it out; --dim takes one width, for files that have none",
        )
    return read_tables(
        str(file),
        width=widths[0] if widths else None,
        tasks=tasks,
        task=task,
        min_pooling=min_pooling,
    )


class ExportFormat(StrEnum):
    """What ``hwplan export`` writes."""

    JSON = "json"
    PYTHON = "python"
    CONSTRAINTS = "constraints"


class DeviceType(StrEnum):
    """PyTorch's word for the devices of a pool."""

    CUDA = "cuda"
    CPU = "cpu"


def export_plan(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--as",
            help="TorchRec ShardingPlan as JSON or as a Python module, or the placements as "
            "constraints for --constraints.",
        ),
    ] = ExportFormat.JSON,
    pool: Annotated[
        str | None,
        typer.Option("--pool", metavar="NAME", help="Which pool, if the plan has several."),
    ] = None,
    module: Annotated[
        str,
        typer.Option(
            "--module",
            metavar="PATH",
            help="Path of the EmbeddingBagCollection inside the model; empty: it is the model.",
        ),
    ] = "",
    first_rank: Annotated[
        int,
        typer.Option("--first-rank", metavar="N", min=0, help="World rank of the pool's rank 0."),
    ] = 0,
    device_type: Annotated[
        DeviceType | None,
        typer.Option("--device-type", help="AMD's GPUs are cuda too. The pool's, if left out."),
    ] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Write a plan's placements for use without hwplan's trainer.

    In Python: planner.interchange.torchrec_plan.sharding_plan_data, sharding_plan_module;
    planner.interchange.constraints.constraints_of_plan.
    """
    from planner.specs.base import write_atomically
    from planner.specs.plan import load_plan

    plan = load_plan(plan_file)
    if form is ExportFormat.CONSTRAINTS:
        from planner.interchange.constraints import (
            constraints_data,
            constraints_of_plan,
            constraints_yaml,
        )

        found = constraints_of_plan(plan, pool)
        data = dict(constraints_data(found))
        text = constraints_yaml(
            found, f"Placements of plan {plan.fingerprint[:16]} for model {plan.model.name}."
        )
    else:
        from planner.interchange import torchrec_plan as torchrec

        name = torchrec.pool_to_export(plan, pool)
        on_cpu = plan.cluster.pool(name).cpu_cores is not None
        where: dict[str, Any] = {
            "module": module,
            "first_rank": first_rank,
            "device_type": str(device_type or (DeviceType.CPU if on_cpu else DeviceType.CUDA)),
        }
        if form is ExportFormat.JSON:
            data = torchrec.sharding_plan_data(plan, name, **where)
            text = torchrec.sharding_plan_json(data)
        else:
            text = torchrec.sharding_plan_module(plan, name, **where)
            data = {"python": text}
    if out is not None:
        write_atomically(out, text)
    if as_json:
        write_json(data)
    elif out is None:
        write(text)
    else:
        write(f"{out}: {form} of plan {plan.fingerprint[:16]}\n")
