"""Model files of imported tables: the dense part of a known model around them, as YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from planner.specs.base import validate, write_atomically
from planner.specs.model import ModelSpec, TableGroup

LINE_WIDTH = 100


def model_of_tables(
    base: ModelSpec,
    tables: Sequence[TableGroup],
    *,
    name: str,
    source: str,
    global_batch: int | None = None,
    dense_features: int | None = None,
    bottom_mlp: Sequence[int] | None = None,
    top_mlp: Sequence[int] | None = None,
) -> ModelSpec:
    """``base`` with other tables; what is not given stays as it is there.

    Args:
        source: where the tables come from.

    Raises:
        SpecError: the dense part does not fit the tables (``dlrm_dot`` wants one width, say).
    """
    changes: dict[str, Any] = {
        "name": name,
        "description": f"{sum(group.count for group in tables)} imported tables, dense part of "
        f"{base.name}",
        "source": source,
        "tables": [group.model_dump(mode="json") for group in tables],
        "global_batch": global_batch,
        "dense_features": dense_features,
        "bottom_mlp": None if bottom_mlp is None else list(bottom_mlp),
        "top_mlp": None if top_mlp is None else list(top_mlp),
    }
    given = {field: value for field, value in changes.items() if value is not None}
    return validate(ModelSpec, base.model_dump(mode="json") | given, None)


def with_popularity(tables: Sequence[TableGroup], exponent: float) -> tuple[TableGroup, ...]:
    """The tables with one Zipf exponent for all."""
    return tuple(group.model_copy(update={"zipf_exponent": exponent}) for group in tables)


def model_yaml(model: ModelSpec) -> str:
    """The model as a model file: one line per table, defaults left out."""
    data = model.model_dump(mode="json", exclude_defaults=True)
    tables = data.pop("tables")
    head = yaml.safe_dump(
        data, sort_keys=False, default_flow_style=None, width=LINE_WIDTH, allow_unicode=True
    )
    rows = [
        yaml.safe_dump(
            table, sort_keys=False, default_flow_style=True, width=10**9, allow_unicode=True
        ).strip()
        for table in tables
    ]
    return head + "tables:\n" + "".join(f"  - {row}\n" for row in rows)


def save_model(model: ModelSpec, path: str | Path) -> None:
    """Write a model file, whole or not at all.

    Raises:
        SpecError: if the folder does not exist or is not writable.
    """
    write_atomically(path, model_yaml(model))
