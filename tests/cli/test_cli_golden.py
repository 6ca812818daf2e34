"""Outputs equal the golden files (see cli_golden.py for how to write them anew)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_golden import CASES, GOLDEN, comparable, run


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Paths where plain data differ; numbers may differ in the seventh digit."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if list(found) != list(expected):
            return [f"{where}: fields {list(found)} instead of {list(expected)}"]
        return [d for k in expected for d in differences(found[k], expected[k], f"{where}.{k}")]
    if isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            return [f"{where}: {len(found)} entries instead of {len(expected)}"]
        pairs = enumerate(zip(found, expected, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{where}.{i}")]
    if isinstance(expected, float) and isinstance(found, float):
        equal = found == pytest.approx(expected, rel=1e-6)
    else:
        equal = type(found) is type(expected) and found == expected
    return [] if equal else [f"{where}: {found!r} instead of {expected!r}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize("name", CASES)
def test_output_is_as_recorded(name: str, folder: Path) -> None:
    found = comparable(name, run(name, folder))
    text = (GOLDEN / name).read_text(encoding="utf-8")
    expected = json.loads(text) if name.endswith(".json") else text.splitlines()
    assert differences(found, expected) == []


def test_differences_are_found() -> None:
    base = {"a": [1, 2.0], "b": "x"}
    assert differences(base, base) == []
    assert differences({"a": [1, 2.1], "b": "x"}, base) == [".a.1: 2.1 instead of 2.0"]
    assert differences({"a": [1, 2.0000001], "b": "x"}, base) == []
    assert len(differences({"b": "x", "a": [1, 2.0]}, base)) == 1
    assert len(differences({"a": [1.0, 2.0], "b": "x"}, base)) == 1
    assert len(differences({"a": [1], "b": "x"}, base)) == 1
