"""Whether a saved plan is still the plan for what is here."""

from __future__ import annotations

from pathlib import Path

from planner.fingerprint import fingerprint_parts
from planner.specs.cluster import ClusterSpec
from planner.specs.errors import UsageError
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan

MEANING = {
    "cluster": "the cluster file differs from the one it was made for",
    "model": "the model file differs from the one it was made for",
    "profiles": "a device profile has changed since",
    "code": "it was made by another version of hwplan",
}


def check_fingerprint(plan: Plan, file: Path, cluster: ClusterSpec, model: ModelSpec) -> None:
    """Compare the plan's fingerprint, part by part, with the one of ``cluster`` and ``model``.

    Raises:
        UsageError: naming the parts that differ.
    """
    found = dict(fingerprint_parts(cluster, model))
    differing = [part for part, digest in plan.fingerprint_parts.items() if found[part] != digest]
    if differing:
        raise UsageError(
            "the plan does not fit: " + "; ".join(MEANING[part] for part in differing),
            file=file,
            field="fingerprint_parts." + differing[0],
            fix="plan again with hwplan plan --out, or add --ignore-fingerprint to run it anyway",
        )
