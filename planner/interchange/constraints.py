"""Constraints on tables in TorchEasyRec's words, onto a model and out of a plan.

TorchEasyRec (alibaba/TorchEasyRec, tzrec/protos/feature.proto and train.proto) has two fields of
one type: ``embedding_constraints`` of a feature and ``global_embedding_constraints`` of the job,
each with ``sharding_types`` and ``compute_kernels``; a table with constraints of its own does not
see the global ones. A file here has the same two words:

    global_embedding_constraints: {sharding_types: [table_wise, row_wise]}
    embedding_constraints:
      user: {sharding_types: [row_wise], compute_kernels: [fused]}

keyed by table, or by table group, which stands for all its tables. Two more fields may stand
beside them: TorchRec's ``min_partition`` and hwplan's ``data_types``. TorchEasyRec's own pipeline
config is read too, as JSON (``planner.interchange.torcheasyrec``).

What the model file itself allows is never widened: a table gets what both allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import Field

from planner.interchange.json_file import load_json
from planner.interchange.torcheasyrec import is_pipeline_config, pipeline_constraints
from planner.specs.base import Spec, load_yaml, validate
from planner.specs.errors import SpecError, UsageError
from planner.specs.model import ModelSpec, TableConstraints, TableGroup
from planner.specs.plan import Plan

NEVER_PLANNED = {
    "sharding_types": ("table_column_wise",),
    "compute_kernels": ("key_value",),
}
"""Words of TorchEasyRec that no plan of hwplan uses: allowing them allows nothing more here."""
LISTS = ("sharding_types", "compute_kernels", "data_types")

Item = TypeVar("Item")


class ConstraintsFile(Spec):
    """What a constraints file holds."""

    global_embedding_constraints: TableConstraints | None = None
    embedding_constraints: dict[str, TableConstraints] = Field(default_factory=dict)


def load_constraints(path: str | Path) -> ConstraintsFile:
    """Read a constraints file (YAML or JSON), or a TorchEasyRec pipeline config (JSON).

    Raises:
        SpecError: naming the field and what to write instead.
    """
    # JSON may be indented with tabs, which YAML does not allow.
    is_json = Path(path).suffix == ".json"
    data = load_json(path, "constraints file") if is_json else load_yaml(path, "constraints file")
    if not isinstance(data, dict):
        raise SpecError(
            f"a constraints file is an object of fields, this is a {type(data).__name__}",
            file=path,
            fix="start from hwplan export PLAN --as constraints",
        )
    if is_pipeline_config(data):
        data = pipeline_constraints(data, path)
    return validate(ConstraintsFile, _without_foreign_words(data, path), path)


def _without_foreign_words(data: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The file without sharding types and kernels that hwplan never plans.

    Raises:
        SpecError: a list that has nothing else.
    """

    def cleaned(constraints: Any, field: str) -> Any:
        if not isinstance(constraints, dict):
            return constraints
        result = dict(constraints)
        for name, foreign in NEVER_PLANNED.items():
            allowed = constraints.get(name)
            if not isinstance(allowed, list):
                continue
            result[name] = [word for word in allowed if word not in foreign]
            if allowed and not result[name]:
                raise SpecError(
                    "hwplan never plans this, and nothing else is allowed",
                    file=path,
                    field=f"{field}.{name}",
                    value=allowed,
                    fix=f"allow another one too, or leave {name} out",
                )
        return result

    cleaned_file = dict(data)
    if "global_embedding_constraints" in data:
        cleaned_file["global_embedding_constraints"] = cleaned(
            data["global_embedding_constraints"], "global_embedding_constraints"
        )
    by_table = data.get("embedding_constraints")
    if isinstance(by_table, dict):
        cleaned_file["embedding_constraints"] = {
            name: cleaned(value, f"embedding_constraints.{name}")
            for name, value in by_table.items()
        }
    return cleaned_file


def constrained(
    model: ModelSpec, constraints: ConstraintsFile, file: str | Path | None = None
) -> ModelSpec:
    """The model under the constraints, which become part of it, of its plans and fingerprints.

    A group whose tables are constrained differently is split; tables keep their names.

    Raises:
        UsageError: a constraint for a table that the model has not.
        SpecError: the model and the file together allow nothing for a table.
    """
    own = constraints.embedding_constraints
    groups = {group.name for group in model.tables}
    unknown = sorted(own.keys() - groups - {table.name for table in model.all_tables})
    if unknown:
        examples = ", ".join([group.name for group in model.tables][:8])
        raise UsageError(
            f"{model.name} has no such table",
            file=file,
            field="embedding_constraints",
            value=unknown[0],
            fix=f"name a table, or a group of them: {examples}, …",
        )
    tables: list[TableGroup] = []
    for group in model.tables:
        names = _table_names(group)
        of_table = [
            own.get(name) or own.get(group.name) or constraints.global_embedding_constraints
            for name in names
        ]
        parts = [(group.name, group.count, of_table[0])]
        if any(given != of_table[0] for given in of_table):
            parts = [(name, 1, given) for name, given in zip(names, of_table, strict=True)]
        tables += [
            group.model_copy(
                update={
                    "name": name,
                    "count": count,
                    "constraints": _both(group.constraints, given, name, file),
                }
            )
            for name, count, given in parts
        ]
    data = model.model_dump(mode="json")
    data["tables"] = [group.model_dump(mode="json") for group in tables]
    return validate(ModelSpec, data, file)


def _table_names(group: TableGroup) -> list[str]:
    if group.count == 1:
        return [group.name]
    return [f"{group.name}_{index}" for index in range(group.count)]


def _both(
    one: TableConstraints, other: TableConstraints | None, name: str, file: str | Path | None
) -> TableConstraints:
    """What both constraints allow."""
    if other is None:
        return one
    allowed: dict[str, Any] = {}
    for field in LISTS:
        allowed[field] = _common(getattr(one, field), getattr(other, field))
        if allowed[field] == ():
            raise SpecError(
                f"the model allows none of these for table {name}",
                file=file,
                field=f"embedding_constraints.{name}.{field}",
                value=[str(item) for item in getattr(other, field)],
                fix=f"allow one of {', '.join(map(str, getattr(one, field)))}, or change the "
                "table's constraints in the model file",
            )
    widths = [part.min_partition for part in (one, other) if part.min_partition is not None]
    return TableConstraints(**allowed, min_partition=max(widths, default=None))


def _common(
    one: tuple[Item, ...] | None, other: tuple[Item, ...] | None
) -> tuple[Item, ...] | None:
    if one is None or other is None:
        return other if one is None else one
    return tuple(item for item in one if item in other)


def constraints_of_plan(plan: Plan, pool: str | None = None) -> ConstraintsFile:
    """Constraints that leave each table the sharding type, kernel and precision of a plan.

    Args:
        pool: whose placements; None: a table may be as in any pool.

    Raises:
        UsageError: the plan has no such pool.
    """
    if pool is not None and pool not in plan.pools:
        raise UsageError(
            "the plan has no such pool",
            field="--pool",
            value=pool,
            fix=f"use one of {', '.join(plan.pools)}",
        )
    pools = [plan.pools[name] for name in plan.pools if pool in (None, name)]
    by_table = {}
    for table in plan.model.all_tables:
        placements = [part.placements[table.name] for part in pools]
        # Sharding types whose plans have column shards; the narrowest is the smallest partition.
        widths = [width for placement in placements for width in placement.column_widths]
        by_table[table.name] = TableConstraints(
            sharding_types=_in_order(placement.sharding_type for placement in placements),
            compute_kernels=_in_order(placement.compute_kernel for placement in placements),
            data_types=_in_order(placement.data_type for placement in placements),
            min_partition=min(widths, default=None),
        )
    return ConstraintsFile(embedding_constraints=by_table)


def _in_order(items: Any) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(items))


def constraints_data(constraints: ConstraintsFile) -> Mapping[str, Any]:
    """The constraints as plain data."""
    data: Mapping[str, Any] = constraints.model_dump(mode="json", exclude_none=True)
    return data


def constraints_yaml(constraints: ConstraintsFile, comment: str = "") -> str:
    """The constraints as a file, one table a line."""
    data = constraints_data(constraints)
    lines = [f"# {line}" for line in comment.splitlines()]
    everywhere = data.get("global_embedding_constraints")
    if everywhere is not None:
        lines.append(f"global_embedding_constraints: {_flow(everywhere)}")
    lines.append("embedding_constraints:" if data["embedding_constraints"] else "")
    lines += [
        f"  {_flow(name)}: {_flow(item)}" for name, item in data["embedding_constraints"].items()
    ]
    return "\n".join(lines).rstrip() + "\n"


def _flow(data: Any) -> str:
    text = yaml.safe_dump(data, default_flow_style=True, sort_keys=False, width=10**9)
    return text.removesuffix("...\n").strip()
