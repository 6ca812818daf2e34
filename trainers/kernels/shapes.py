"""Which products ``hwplan kernels bench`` measures: the models' own, a plan's, or a file's."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from planner.cost.dense import Linear, dense_network, step_gemms
from planner.specs.base import read_text
from planner.specs.errors import SpecError, UsageError
from planner.specs.kernels import Gemm, Layout
from planner.specs.load import load_model
from planner.specs.plan import Plan, load_plan
from planner.specs.units import Dtype

BATCHES = (512, 2048, 8192, 27648, 65536)
MODELS = ("dlrm", "dlrm_v1_1tb", "wukong_criteo")
DLRMV4_LAYERS = ((1536, 512), (512, 512), (512, 2048), (512, 1))
"""(inputs, outputs) of MLPerf recommendation_v4: item MLP, HSTU projections, head."""
DTYPES = (Dtype.BF16, Dtype.TF32)
PER_GROUP = 14
"""Products of each layout and precision."""
LARGEST_BYTES = 4e9
COLUMNS = ("m", "n", "k", "layout", "dtype")


class Shape(NamedTuple):
    """A product in one precision."""

    dtype: Dtype
    gemm: Gemm


def shapes_of(
    file: Path | None, plan: Path | None, dtypes: Sequence[Dtype] | None, device: str
) -> tuple[Shape, ...]:
    """Products of a list, or of a plan on ``device``, or the models'; only those in ``dtypes``.

    Raises:
        UsageError: there are none. SpecError: an unusable file.
    """
    if file is not None:
        found = read_shapes(file)
    elif plan is not None:
        found = plan_shapes(load_plan(plan), device)
    else:
        return default_shapes(dtypes=dtypes or DTYPES)
    return of_dtypes(found, dtypes) if dtypes else found


def default_shapes(seed: int = 0, dtypes: Sequence[Dtype] = DTYPES) -> tuple[Shape, ...]:
    """Products of dlrm, dlrm_v1_1tb, wukong_criteo and dlrmv4 layers at several local batches: as
    many of each layout and precision, in turns, so that the first ones are of all kinds."""
    pool = sorted({Gemm(*gemm[:3], layout=gemm.layout) for gemm in model_gemms()})
    choose = random.Random(seed)
    groups = []
    for dtype in dtypes:
        for layout in Layout:
            group = [gemm for gemm in pool if gemm.layout is layout]
            groups.append([Shape(dtype, gemm) for gemm in choose.sample(group, PER_GROUP)])
    return tuple(chain.from_iterable(zip(*groups, strict=True)))


def model_gemms() -> Iterator[Gemm]:
    """Products of the models' steps at all ``BATCHES``."""
    for batch in BATCHES:
        for name in MODELS:
            counts = step_gemms(dense_network(load_model(name)).blocks, batch)
            yield from (gemm for gemm in counts if gemm.batch == 1 and _bytes(gemm) < LARGEST_BYTES)
        for inputs, outputs in DLRMV4_LAYERS:
            linear = Linear(inputs, outputs)
            yield linear.forward(batch)
            yield from linear.backward(batch)


def _bytes(gemm: Gemm) -> float:
    return 4.0 * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)


def plan_shapes(plan: Plan, device: str) -> tuple[Shape, ...]:
    """Products that the plan names kernels for on ``device``, without what follows them.

    Raises:
        UsageError: no pool of that device has any.
    """
    found = {
        Shape(item.dtype, Gemm(item.m, item.n, item.k, layout=item.layout)): None
        for pool in plan.pools.values()
        if pool.device == device
        for item in pool.kernels
        if item.batch == 1
    }
    if not found:
        have = sorted({pool.device for pool in plan.pools.values() if pool.kernels})
        raise UsageError(
            "the plan names no kernels for this device",
            field="--plan",
            value=device,
            fix=f"it has kernels for {', '.join(have) or 'no device'}: choose one with --device, "
            "or leave --plan out",
        )
    return tuple(found)


def of_dtypes(shapes: Sequence[Shape], dtypes: Sequence[Dtype]) -> tuple[Shape, ...]:
    """Those in ``dtypes``.

    Raises:
        UsageError: there are none.
    """
    found = tuple(shape for shape in shapes if shape.dtype in dtypes)
    if not found:
        raise UsageError(
            "no product has this precision",
            field="--dtypes",
            value=",".join(dtypes),
            fix=f"use some of {', '.join(sorted({shape.dtype.value for shape in shapes}))}",
        )
    return found


def read_shapes(path: str | Path) -> tuple[Shape, ...]:
    """Products from a CSV file with the columns m, n, k, layout, dtype.

    Raises:
        SpecError: naming the line and what to change.
    """
    rows = csv.DictReader(io.StringIO(read_text(path, "list of shapes")))
    missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise SpecError(
            f"the column {missing[0]} is missing",
            file=path,
            field="line 1",
            fix=f"begin with the line {','.join(COLUMNS)}",
        )
    found = []
    for row in rows:
        try:
            m, n, k = (int(row[name]) for name in ("m", "n", "k"))
            shape = Shape(Dtype(row["dtype"]), Gemm(m, n, k, layout=Layout(row["layout"])))
        except (TypeError, ValueError) as error:
            raise SpecError(
                f"not a product: {error}",
                file=path,
                field=f"line {rows.line_num}",
                fix="write three whole numbers, a layout (nt, nn, tn) and a dtype (bf16, tf32, …)",
            ) from None
        found.append(shape)
    if not found:
        raise SpecError(
            "no product in it", file=path, fix="add a line such as 8192,512,256,nt,bf16"
        )
    return tuple(found)
