"""Pydantic's findings as hwplan errors: file, field, value, what is wrong and what to change."""

from __future__ import annotations

import difflib
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from planner.specs.errors import SpecError, SpecErrors

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a mapping of fields",
}
_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}


def spec_error(
    error: ValidationError, spec: type[BaseModel], data: Any, file: str | Path | None
) -> SpecError:
    """One error, or ``SpecErrors`` where there are several problems."""
    items = error.errors(include_url=False)
    broken = [item["loc"] for item in items]
    found = [
        _translate(item, spec, data, file)
        for item in items
        # A list whose entries were refused is also reported as too short: only the cause helps.
        if not (item["type"] == "too_short" and any(_inside(loc, item["loc"]) for loc in broken))
    ]
    return found[0] if len(found) == 1 else SpecErrors(found)


def _inside(location: tuple[Any, ...], parent: tuple[Any, ...]) -> bool:
    return len(location) > len(parent) and location[: len(parent)] == parent


def _translate(item: Any, spec: type[BaseModel], data: Any, file: str | Path | None) -> SpecError:
    problem, _, fix = item["msg"].removeprefix("Value error, ").partition(" || ")
    # Checks of a whole mapping name the values themselves; showing all of it would only hide them.
    shown = {} if fix or item["type"] == "missing" else {"value": item["input"]}
    if not fix:
        problem, fix = _problem_and_fix(item, spec)
    return SpecError(problem, file=file, field=_field(item["loc"], data), fix=fix, **shown)


def _problem_and_fix(item: Any, spec: type[BaseModel]) -> tuple[str, str]:
    kind, context = item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        known = _fields_at(spec, item["loc"][:-1])
        close = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        guess = f"did you mean {close[0]}? " if close else "remove it; "
        return "unknown field", f"{guess}known fields here: {', '.join(known)}"
    if kind == "missing":
        return "this field is missing", "add it"
    bounds = _range(context) and (_range(_limits_at(spec, item["loc"])) or _range(context))
    if bounds:
        return f"must be a number {bounds}", f"give a number {bounds}"
    if kind == "finite_number":
        bounds = _range(_limits_at(spec, item["loc"]))
        return "must be a finite number", f"give a number {bounds}" if bounds else "give a number"
    if kind == "too_short":
        return "must not be empty", f"list at least {context['min_length']}"
    if kind == "string_pattern_mismatch":
        return (
            "not a usable name",
            "start with a letter, go on with letters, digits, '_', '-' or '.'",
        )
    if kind == "union_tag_not_found":
        return "does not say which type it is", f"add {context['discriminator'].strip(chr(39))}: …"
    expected = context.get("expected_tags") or context.get("expected")
    if expected:
        return "not one of the known values", f"use one of {expected}"
    wanted = _TYPES.get(kind.removesuffix("_type").removesuffix("_parsing"))
    if wanted:
        return f"must be {wanted}", f"write {wanted} here"
    problem = item["msg"]
    return problem[:1].lower() + problem[1:], "correct this value"


def _field(location: tuple[Any, ...], data: Any) -> str:
    """The location as the user's file spells it: pydantic adds the tags of unions."""
    parts: list[str] = []
    here = data
    for index, part in enumerate(location):
        within = (isinstance(here, dict) and part in here) or (
            isinstance(here, list) and isinstance(part, int) and part < len(here)
        )
        if within:
            here = here[part]
        if within or index == len(location) - 1:
            parts.append(str(part))
    return ".".join(parts)


def _fields_at(spec: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Field names of the model that ``location`` points to, sorted."""
    annotation: Any = spec
    for part in location:
        annotation = _child(annotation, part)
    return sorted(getattr(_plain(annotation), "model_fields", {}))


def _limits_at(spec: type[BaseModel], location: tuple[Any, ...]) -> dict[str, float]:
    """All bounds of a number, of which the finding names only the one that it breaks."""
    annotation: Any = spec
    for part in location[:-1]:
        annotation = _child(annotation, part)
    field = getattr(_plain(annotation), "model_fields", {}).get(location[-1])
    limits = field.metadata if field is not None else ()
    return {key: getattr(limit, key) for limit in limits for key in _BOUNDS if hasattr(limit, key)}


def _range(limits: dict[str, Any]) -> str:
    return " and ".join(f"{_BOUNDS[key]} {limits[key]:g}" for key in limits if key in _BOUNDS)


def _plain(annotation: Any) -> Any:
    """Without ``Annotated`` and ``| None``."""
    while True:
        members = [item for item in get_args(annotation) if item is not types.NoneType]
        optional = get_origin(annotation) in (Union, types.UnionType) and len(members) == 1
        if not optional and get_origin(annotation) is not Annotated:
            return annotation
        annotation = members[0]


def _child(annotation: Any, part: str | int) -> Any:
    """Type of the entry ``part`` of a value of type ``annotation``."""
    annotation = _plain(annotation)
    origin, members = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return next((item for item in members if _tag(item) == part), None)
    if origin is dict:
        return members[1]
    if origin in (tuple, list):
        return members[0]
    field = getattr(annotation, "model_fields", {}).get(part)
    return field.annotation if field else None


def _tag(model: Any) -> str | None:
    """The value of a tagged union member's ``type`` field."""
    field = getattr(model, "model_fields", {}).get("type")
    if field is None or get_origin(field.annotation) is not Literal:
        return None
    tag: str = get_args(field.annotation)[0]
    return tag
