"""``hwplan``: the command line. Importing this module imports no command's implementation."""

from __future__ import annotations

import io
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from planner.specs.errors import HwplanError
from runtime.cli.baselines import baselines
from runtime.cli.compare import compare
from runtime.cli.explain import explain
from runtime.cli.interchange import export_plan, import_tables
from runtime.cli.inventory import devices, models
from runtime.cli.kernels import kernels
from runtime.cli.plan import plan, show
from runtime.cli.status import status
from runtime.cli.train import train
from runtime.cli.whatif import sensitivity, size, sweep

app = typer.Typer(
    name="hwplan",
    help="Plan and run the training of recommendation models on clusters that mix accelerators.",
    epilog="Exit codes: 0 fine, 2 bad input or usage, 3 infeasible, 4 the run failed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    plan, train, status, compare, baselines, models, devices, show, explain, sweep, size,
    sensitivity,
):  # fmt: skip
    app.command()(command)
app.command("import")(import_tables)
app.command("export")(export_plan)
app.add_typer(kernels, name="kernels")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hwplan {version('hwplan')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options that come before the command."""


def _open_standard_streams() -> None:
    """A descriptor that the caller closed (``2>&-``) would be given to the next file opened.

    Where it was closed nothing can be read or written: opened the wrong way round, every use of it
    fails as that of a closed one does.
    """
    for descriptor, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(os.open(os.devnull, mode), descriptor)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def main() -> None:
    """Run one command. Errors that a user can cause become one screen on stderr and a code."""
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a bar or a dash gets "?" rather than an error.
            stream.reconfigure(errors="replace")
    try:
        app()
    except HwplanError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
