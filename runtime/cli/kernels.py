"""``hwplan kernels``: select for one product, compile a plan's, measure on the GPU at hand."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.specs.errors import UsageError
from planner.specs.kernels import Epilogue, Layout
from planner.specs.units import Dtype
from runtime.cli.options import AsJson, output_file
from runtime.cli.output import counting, write_json, write_report
from runtime.stdout import stdout_for_results

kernels = typer.Typer(
    help="Which kernel runs a matrix product: choose, compile ahead of time, measure.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

TopK = Annotated[int, typer.Option("--top-k", metavar="K", help="Candidates to keep.")]


@kernels.command()
def select(
    device: Annotated[str, typer.Option("--device", metavar="NAME_OR_FILE", help="Device type.")],
    m: Annotated[int, typer.Option("--m", metavar="M", help="Rows of C.")],
    n: Annotated[int, typer.Option("--n", metavar="N", help="Columns of C.")],
    k: Annotated[int, typer.Option("--k", metavar="K", help="Inner size.")],
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Precision.")] = Dtype.BF16,
    layout: Annotated[
        Layout,
        typer.Option("--layout", help="nt: forward; nn: input gradient; tn: weight gradient."),
    ] = Layout.NT,
    epilogue: Annotated[
        Epilogue, typer.Option("--epilogue", help="What follows the product.")
    ] = Epilogue.NONE,
    top_k: TopK = 4,
    as_json: AsJson = False,
) -> None:
    """The kernels for one matrix product on a device, best first. Nothing is measured.

    In Python: planner.kernels.select.select_kernels(device, dtype, gemms, top_k).
    """
    from planner.kernels.select import select_kernels
    from planner.report.kernel_commands import render_selection, selection_json
    from planner.specs.kernels import Gemm
    from planner.specs.load import load_device

    profile = load_device(device)
    gemm = Gemm(m, n, k, 1, layout, epilogue)
    ranked = select_kernels(profile, dtype, [gemm], top_k)[0]
    if as_json:
        write_json(selection_json(profile, dtype, gemm, ranked))
    else:
        write_report(lambda console: render_selection(profile, dtype, gemm, ranked, console))


@kernels.command("compile")
def compile_plan(
    plan: Annotated[Path, typer.Option("--plan", metavar="PLAN", help="A plan.json.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder for the kernels.")],
    pool: Annotated[
        list[str] | None,
        typer.Option("--pool", metavar="NAME", help="Only this pool's (repeatable)."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", metavar="N", min=1, help="Processes (all cores).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile a plan's kernels for its GPUs; needs none of them.

    In Python: trainers.kernels.offline.compile_plan(plan, folder).
    """
    from planner.report.kernel_commands import render_store
    from planner.specs.plan import load_plan

    require_triton()
    wanted = load_plan(plan)
    began = time.monotonic()
    with stdout_for_results():
        from trainers.kernels.offline import compile_plan as run
        from trainers.kernels.offline import summarise

        with counting("compiling kernels") as progress:
            manifest = run(wanted, out, pools=pool or (), jobs=jobs, progress=progress)
    facts = {
        "seconds": time.monotonic() - began,
        "pools": [item.model_dump() for item in summarise(wanted, manifest, pool or ())],
        **manifest.model_dump(mode="json"),
    }
    if as_json:
        write_json(facts)
    else:
        write_report(lambda console: render_store(facts, out, console))


@kernels.command()
def bench(
    device: Annotated[
        str,
        typer.Option("--device", metavar="auto|NAME_OR_FILE", help="Profile of the GPU at hand."),
    ] = "auto",
    shapes: Annotated[
        Path | None,
        typer.Option("--shapes", metavar="FILE", help="CSV with the columns m,n,k,layout,dtype."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="PLAN", help="Measure this plan's products on the device."),
    ] = None,
    dtypes: Annotated[
        str | None,
        typer.Option("--dtypes", metavar="D,D,…", help="Only these precisions, e.g. bf16,tf32."),
    ] = None,
    exhaustive: Annotated[
        bool,
        typer.Option(
            "--exhaustive/--quick", help="All candidates, or only the selector's first ones."
        ),
    ] = True,
    top_k: TopK = 4,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=1, help="Stop after about so long.")
    ] = 600.0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", callback=output_file, help="Also write all figures (JSON)."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the chosen kernels against all candidates and the vendor's library on this GPU.

    In Python: trainers.kernels.bench.bench(device, shapes, timer).
    """
    require_triton()
    precisions = _precisions(dtypes)
    if plan is not None and shapes is not None:
        raise UsageError(
            "both say which products to measure",
            field="--plan, --shapes",
            fix="leave one of them out",
        )
    with stdout_for_results():
        from trainers.kernels.bench import bench as run
        from trainers.kernels.bench import device_at_hand
        from trainers.kernels.shapes import shapes_of
        from trainers.kernels.timing import Gpu

        profile = device_at_hand(device)
        wanted = shapes_of(shapes, plan, precisions, profile.name)
        with counting("measuring kernels") as progress:
            found = run(
                profile,
                wanted,
                Gpu(),
                top_k=top_k,
                exhaustive=exhaustive,
                seconds=seconds,
                progress=progress,
            )
    from planner.report.kernel_commands import render_bench
    from planner.specs.base import write_atomically

    facts: dict[str, Any] = found.model_dump(mode="json")
    if out is not None:
        write_atomically(out, json.dumps(facts, indent=1) + "\n")
    if as_json:
        write_json(facts)
    else:
        write_report(lambda console: render_bench(facts, console))


def _precisions(words: str | None) -> tuple[Dtype, ...] | None:
    """The precisions of a comma-separated list.

    Raises:
        UsageError: a word is none.
    """
    if words is None:
        return None
    try:
        return tuple(dict.fromkeys(Dtype(word.strip()) for word in words.split(",")))
    except ValueError:
        raise UsageError(
            "must be precisions with commas between them",
            field="--dtypes",
            value=words,
            fix=f"use some of {', '.join(Dtype)}",
        ) from None


def require_triton() -> None:
    """Whether Triton can be imported here.

    Raises:
        UsageError: it is not installed.
    """
    from importlib.util import find_spec

    if find_spec("triton") is None:
        raise UsageError(
            "Triton is not installed: kernels cannot be compiled",
            fix="install it: pip install 'hwplan[kernels]'",
        )
