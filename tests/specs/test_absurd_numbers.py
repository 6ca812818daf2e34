"""Absurd numbers in profiles, clusters and models: a typed error, or a plan with finite numbers."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.search import SearchOptions, plan_job
from planner.specs.base import load_yaml
from planner.specs.errors import InfeasibleError, SpecError, UsageError
from planner.specs.load import CLUSTERS, DEVICES, MODELS, load_cluster, load_model, names_in
from planner.specs.plan import plan_json

ABSURD = ["0", "-1", "1e-300", "1e300", "1e400", ".nan", ".inf", "true", '"x"', "null", "[]"]
"""As a user writes them."""
MARK = "__here__"
QUICK = SearchOptions(mip_gap=0.5, time_limit_s=2.0, cures=False)
SAMPLES = 8
"""Of a file: which leaves and values is decided by the file's name."""

Path_ = tuple[str | int, ...]


def numeric_leaves(node: Any, path: Path_ = ()) -> Iterator[Path_]:
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from numeric_leaves(value, (*path, key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*path, key)


def spoiled(data: dict[str, Any], path: Path_, text: str) -> str:
    """The YAML with one leaf replaced by this text."""
    data = copy.deepcopy(json.loads(json.dumps(data)))
    node: Any = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = MARK
    return yaml.safe_dump(data, sort_keys=False).replace(MARK, text)


def cases(folder: Path) -> list[tuple[str, Path_, str]]:
    found = []
    for name in names_in(folder):
        data = load_yaml(folder / f"{name}.yaml", "file")
        every = [(name, path, text) for path in numeric_leaves(data) for text in ABSURD]
        found += random.Random(name).sample(every, SAMPLES)
    return found


def finite(data: Any) -> bool:
    if isinstance(data, dict | list):
        return all(map(finite, data.values() if isinstance(data, dict) else data))
    return not isinstance(data, float) or math.isfinite(data)


def typed_or_finite(cluster: str, model: str, spoiled_file: Path) -> None:
    try:
        plan = plan_job(load_cluster(cluster), load_model(model), options=QUICK)
    except SpecError as error:
        assert str(error).startswith(str(spoiled_file)) and "To fix: " in str(error)
        return
    except (UsageError, InfeasibleError):
        return
    assert finite(plan_json(plan)) and 0 < plan.predicted.step_ms < 1e12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = load_yaml(MODELS / "dlrm_criteo_small.yaml", "model")
    model["tables"], model["global_batch"] = model["tables"][:3], 64
    file = tmp_path_factory.mktemp("tiny") / "model.yaml"
    file.write_text(yaml.safe_dump(model))
    return str(file)


@pytest.mark.parametrize(("name", "path", "text"), cases(DEVICES))
def test_device_profiles(name: str, path: Path_, text: str, tiny: str, tmp_path: Path) -> None:
    device = tmp_path / "device.yaml"
    device.write_text(spoiled(load_yaml(DEVICES / f"{name}.yaml", "profile"), path, text))
    pool: dict[str, Any] = {
        "name": "p", "device": "device.yaml", "nodes": 2, "devices_per_node": 2,
    }  # fmt: skip
    if name == "cpu":
        pool |= {"cpu_cores": [0, 1], "host_memory_gib_per_node": 4}
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(yaml.safe_dump({"name": "c", "pools": [pool]}))
    typed_or_finite(str(cluster), tiny, device)


@pytest.mark.parametrize(("name", "path", "text"), cases(CLUSTERS))
def test_clusters(name: str, path: Path_, text: str, tiny: str, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(spoiled(load_yaml(CLUSTERS / f"{name}.yaml", "cluster"), path, text))
    typed_or_finite(str(cluster), tiny, cluster)


SMALL = ("dlrm_criteo_small", "dlrm_kaggle", "deepfm_criteo")


@pytest.mark.parametrize(
    ("name", "path", "text"), [case for case in cases(MODELS) if case[0] in SMALL]
)
def test_models(name: str, path: Path_, text: str, tmp_path: Path) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(spoiled(load_yaml(MODELS / f"{name}.yaml", "model"), path, text))
    typed_or_finite("h200_1x2", str(model), model)


def test_a_number_out_of_range_names_file_field_value_and_range(tmp_path: Path) -> None:
    device = tmp_path / "device.yaml"
    profile = load_yaml(DEVICES / "b200.yaml", "profile")
    device.write_text(spoiled(profile, ("memory", "hbm_bytes_per_s", "value"), "8.0"))
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "name: c\npools: [{name: p, device: device.yaml, nodes: 1, devices_per_node: 8}]\n"
    )
    with pytest.raises(SpecError) as caught:
        load_cluster(str(cluster))
    assert str(caught.value) == (
        f"{device}: memory.hbm_bytes_per_s.value: must be a number of at least 1e+06 and of at "
        "most 1e+15 (got 8.0)\n  To fix: give a number of at least 1e+06 and of at most 1e+15"
    )


def test_pools_that_share_cores_are_refused(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    local = load_yaml(CLUSTERS / "local.yaml", "cluster")
    local["pools"][0]["cpu_cores"] = [0, 2]
    local["pools"][1]["cpu_cores"] = [1, 2, 0]
    cluster.write_text(yaml.safe_dump(local))
    with pytest.raises(SpecError, match="pools fast and slow are both pinned to cores 2, 0"):
        load_cluster(str(cluster))
