"""JSON has no NaN and no infinity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite(data: Any) -> Any:
    """``data`` with None for NaN and infinity."""
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, Mapping):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return data
