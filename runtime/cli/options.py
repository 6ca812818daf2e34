"""Command-line options that several commands share, and the checks that typer does not make."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from planner.specs.errors import UsageError


def positive_int(option: typer.CallbackParam, value: int | None) -> int | None:
    """The value, or None if the option was not given.

    Raises:
        UsageError: zero or negative.
    """
    if value is not None and value <= 0:
        raise UsageError(
            "must be a whole number above 0", field=_flag(option), value=value, fix=_hint(option)
        )
    return value


def positive_float(option: typer.CallbackParam, value: float | None) -> float | None:
    """The value, or None if the option was not given.

    Raises:
        UsageError: zero, negative, NaN or infinite.
    """
    if value is not None and not (math.isfinite(value) and value > 0):
        raise UsageError(
            "must be a finite number above 0", field=_flag(option), value=value, fix=_hint(option)
        )
    return value


def fraction(option: typer.CallbackParam, value: float | None) -> float | None:
    """The value, or None if the option was not given.

    Raises:
        UsageError: NaN, negative, or 1 and above.
    """
    if value is not None and not 0 <= value < 1:
        raise UsageError(
            "must be at least 0 and below 1", field=_flag(option), value=value, fix=_hint(option)
        )
    return value


def output_file(option: typer.CallbackParam, value: Path | None) -> Path | None:
    """The path, checked before work that would be lost if it could not be written.

    Raises:
        UsageError: its folder does not exist, or it is a folder itself.
    """
    if value is None:
        return None
    if value.is_dir():
        raise UsageError(
            "this is a folder", field=_flag(option), value=str(value), fix="name a file inside it"
        )
    if not value.parent.is_dir():
        raise UsageError(
            "the folder to write to does not exist",
            field=_flag(option),
            value=str(value),
            fix=f"make it first: mkdir -p {value.parent}",
        )
    return value


def _flag(option: typer.CallbackParam) -> str:
    return option.opts[-1]


def _hint(option: typer.CallbackParam) -> str:
    default = option.default
    example = f"{_flag(option)} {default}" if default is not None else f"{_flag(option)} 4096"
    return f"give a number such as {example}, or leave the option out"


ClusterFile = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="Cluster file (or the name of one that hwplan ships, e.g. mixed).",
    ),
]
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME_OR_FILE",
        help="Built-in model (see hwplan models) or a model file.",
    ),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        "--global-batch",
        metavar="N",
        callback=positive_int,
        help="Samples per step over all pools; the model's own if left out.",
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k", metavar="N", callback=positive_int, help="Alternatives kept in the plan."
    ),
]
TimeLimit = Annotated[
    float,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        callback=positive_float,
        help="Stop searching after this long and report the gap.",
    ),
]
MipGap = Annotated[
    float,
    typer.Option(
        "--mip-gap",
        metavar="G",
        callback=fraction,
        help="Relative gap at which a program counts as solved.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")
]
