"""Golden outputs of the command line. To write them anew: python tests/cli/cli_golden.py

They are read in a diff: a change that nobody wanted shows up there.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
TOY = ("--cluster", str(HERE / "toy_cluster.yaml"), "--model", str(HERE / "toy_model.yaml"))
GAP = ("--mip-gap", "0.05")
"""Wide enough to be proven in about a second: the outcome must not depend on the time limit."""

CASES: dict[str, tuple[str, ...]] = {
    "models.txt": ("models",),
    "models.json": ("models", "--json"),
    "devices.txt": ("devices",),
    "devices.json": ("devices", "--json"),
    "plan.txt": ("plan", *TOY),
    "plan.json": ("plan", *TOY, "--json"),
    "compare.txt": ("compare", *TOY, *GAP),
    "compare.json": ("compare", *TOY, *GAP, "--json"),
    "show.txt": ("show", "PLAN"),
    "show.json": ("show", "PLAN", "--json"),
}
"""File name: command. PLAN stands for the toy plan, saved before."""

VOLATILE = ("fingerprint", "fingerprint_parts", "digest", "hwplan_version")
"""They follow every change of profiles and versions and say nothing about the result."""


SHOWN_KERNELS = 3
"""Of a pool's list: the others look alike, and would bury the rest of a diff."""


def without_volatile(data: Any) -> Any:
    """Plain data less what says nothing here."""
    if isinstance(data, dict):
        return {
            k: without_volatile(v[:SHOWN_KERNELS] if k == "kernels" and isinstance(v, list) else v)
            for k, v in data.items()
            if k not in VOLATILE
        }
    if isinstance(data, list):
        return [without_volatile(item) for item in data]
    return data


def comparable(name: str, output: str) -> Any:
    """What is compared: plain data for JSON, lines for text."""
    if name.endswith(".json"):
        return without_volatile(json.loads(output))
    return re.sub(r"fingerprint: \w+", "fingerprint: …", output).splitlines()


def run(name: str, folder: Path) -> str:
    """Output of a case. ``folder`` is for the toy plan."""
    from cli_run import hwplan

    plan = folder / "plan.json"
    arguments = CASES[name]
    if "PLAN" in arguments and not plan.exists():
        saving = hwplan("plan", *TOY, "--out", str(plan))
        assert saving.code == 0, saving.err
    result = hwplan(*(str(plan) if item == "PLAN" else item for item in arguments))
    assert result.code == 0, result.err
    return result.out


def main() -> None:
    sys.path.insert(0, str(HERE))
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            kept = comparable(name, run(name, Path(folder)))
            text = json.dumps(kept, indent=1) if name.endswith(".json") else "\n".join(kept)
            (GOLDEN / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
