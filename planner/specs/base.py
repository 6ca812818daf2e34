"""Strict pydantic base, YAML loading and error translation shared by every spec."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from planner.specs.errors import SpecError
from planner.specs.messages import spec_error

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LARGEST_FILE_BYTES = 128 << 20
"""Of a spec or plan; plans of a thousand tables on hundreds of ranks have a few million."""
LARGEST_DOCUMENT = 1_000_000
"""Values of a YAML document with its aliases written out."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$", max_length=128)]
Size = Annotated[int, Field(gt=0, le=10**15)]
"""Rows, samples: far more than any job has, and few enough for exact products in a float."""
Width = Annotated[int, Field(gt=0, le=1_000_000)]
"""Columns, layers."""
LearningRate = Annotated[float, Field(ge=1e-12, le=1e3)]
Gbps = Annotated[float, Field(ge=1e-3, le=1e6)]
"""Network gigabits per second."""
PoolName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.+-]*$", max_length=1_024)]
"""Of a pool, or of pools that work as one: ``a+b``."""


class Spec(BaseModel):
    """Immutable, and unknown fields are refused: a typo never becomes a silent default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


SpecT = TypeVar("SpecT", bound=Spec)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and reads ``8e12`` as the number it is."""


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    mapping: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is not text", key_node.start_mark
            )
        if key in mapping:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} appears twice", key_node.start_mark
            )
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)
# YAML 1.1 (PyYAML) needs a dot and a signed exponent in floats; YAML 1.2 does not.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_text(path: str | Path, what: str) -> str:
    """File content as UTF-8.

    Raises:
        SpecError: if it does not exist, is a folder or too large, or cannot be read or decoded.
    """
    try:
        # Of a pipe or device the size is not known before.
        with Path(path).open("rb") as stream:
            content = stream.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise SpecError(
                f"this {what} has more than {LARGEST_FILE_BYTES:,} bytes",
                file=path,
                fix="check that the path names the right file",
            )
        return content.decode("utf-8")
    except FileNotFoundError:
        raise SpecError(
            f"this {what} does not exist", file=path, fix="check the path, or give another one"
        ) from None
    except IsADirectoryError:
        raise SpecError(
            f"this is a folder, not a {what}", file=path, fix="name a file inside it"
        ) from None
    except UnicodeDecodeError as error:
        raise SpecError(
            f"this {what} is not UTF-8 text (byte {error.start})",
            file=path,
            fix="save it as UTF-8",
        ) from None
    except OSError as error:
        raise SpecError(
            f"this {what} cannot be read: {error.strerror}",
            file=path,
            fix="check the path and its permissions",
        ) from None


def load_yaml(path: str | Path, what: str) -> dict[str, Any]:
    """Parse a YAML mapping safely.

    Raises:
        SpecError: naming the line and column of a syntax error, or a document that is no mapping.
    """
    text = read_text(path, what)
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SpecError(
            f"not valid YAML: {error.problem or error.context}",
            file=path,
            field=line,
            fix="correct the syntax at that line",
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise SpecError(f"not valid YAML: {error}", file=path, fix="correct the syntax") from None
    if not isinstance(data, dict):
        raise SpecError(
            f"a {what} is a mapping of fields, this is a {type(data).__name__}",
            file=path,
            fix=f"start from one of the {what}s that hwplan ships",
        )
    if _written_out(data, {}) > LARGEST_DOCUMENT:
        raise SpecError(
            f"its aliases make it a {what} of more than {LARGEST_DOCUMENT:,} values",
            file=path,
            fix="write the values out, or use fewer aliases of aliases",
        )
    return data


def _written_out(data: Any, known: dict[int, float]) -> float:
    """Values in ``data`` if every alias were written out; infinite if it contains itself."""
    if not isinstance(data, dict | list):
        return 1
    if id(data) not in known:
        known[id(data)] = math.inf
        children = data.values() if isinstance(data, dict) else data
        known[id(data)] = 1 + sum(_written_out(child, known) for child in children)
    return known[id(data)]


def validate(spec: type[SpecT], data: Any, file: str | Path | None) -> SpecT:
    """Build ``spec`` from plain data (lists stand for tuples, strings for enums).

    Raises:
        SpecError: naming file, field, value and fix; ``SpecErrors`` if there are several.
    """
    try:
        # YAML and JSON have no tuples or enums: JSON mode accepts their plain spelling while
        # numbers and strings stay strict.
        return spec.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise spec_error(error, spec, data, file) from None
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"holds a value that is neither text, number nor list: {error}",
            file=file,
            fix="use plain YAML values",
        ) from None


def problem(what: str, fix: str) -> ValueError:
    """For validators: an error whose text carries its own fix (see ``validate``)."""
    return ValueError(f"{what} || {fix}")


def canonical_json(data: Any) -> str:
    """One spelling per value: sorted keys, no spaces, no NaN. The input of every digest."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256(data: Any) -> str:
    """Hex SHA-256 of the canonical JSON of ``data``."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()


def rounded(value: float, digits: int = 9) -> float:
    """``value`` to ``digits`` significant digits, so that plans do not differ by rounding noise."""
    if value == 0 or not math.isfinite(value):
        return value
    return float(f"{value:.{digits}g}")


def write_atomically(path: str | Path, text: str) -> None:
    """Write ``text`` whole or not at all (temporary file in the same folder, then rename).

    A symbolic link stays one: the file that it points to is replaced.

    Raises:
        SpecError: if the folder does not exist or is not writable, or ``path`` is no regular file.
    """
    target = Path(os.path.realpath(path))
    if os.path.exists(target) and not os.path.isfile(target):
        raise SpecError(
            "this is no regular file: it cannot be replaced by a new one",
            file=path,
            fix="name a file (results go to stdout without an output option)",
        )
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SpecError(
            f"cannot be written: {error.strerror}",
            file=path,
            fix="check that the folder exists and is writable",
        ) from None
