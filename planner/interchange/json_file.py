"""Reading the JSON files of other systems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner.specs.base import read_text
from planner.specs.errors import SpecError


def load_json(path: str | Path, what: str) -> Any:
    """Parse a JSON file.

    Args:
        what: what the file is meant to be, for the error.

    Raises:
        SpecError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(read_text(path, what))
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f"not valid JSON: {error}", file=path, fix="correct the syntax there"
        ) from None
