"""Table groups from other systems' numbers, with errors in those systems' words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.specs.base import validate
from planner.specs.errors import SpecError, SpecErrors
from planner.specs.model import TableGroup


def table_group(
    data: Mapping[str, Any], words: Mapping[str, str], index: int, file: str | Path | None
) -> TableGroup:
    """A table group, checked.

    Args:
        data: fields of ``TableGroup``.
        words: how the source calls each of them.
        index: which entry of the source's lists this is, from 0.

    Raises:
        SpecError: naming the source's word and entry.
    """
    try:
        return validate(TableGroup, dict(data), file)
    except SpecErrors as several:
        raise SpecErrors([_renamed(error, words, index) for error in several.errors]) from None
    except SpecError as error:
        raise _renamed(error, words, index) from None


def _renamed(error: SpecError, words: Mapping[str, str], index: int) -> SpecError:
    # A rule about the table as a whole has no field, but its text says which number it is about.
    names = [name for name in words if name in (error.field or error.problem)]
    word = words[names[0]] if names else error.field
    return SpecError(
        error.problem,
        file=error.file,
        field=f"{word}.{index}",
        fix=error.fix,
        **({} if error.value is None else {"value": error.value}),
    )
