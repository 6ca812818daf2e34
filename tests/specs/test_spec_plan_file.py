"""plan.json: round trips, digest, damage, atomic writing; random specs survive a round trip."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_samples import CLUSTER, MODEL, PLAN, changed, without

from planner.specs.base import canonical_json, rounded, sha256, validate, write_atomically
from planner.specs.cluster import ClusterSpec
from planner.specs.errors import SpecError
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan, load_plan, plan_json, save_plan


@pytest.fixture
def plan() -> Plan:
    return validate(Plan, PLAN, None)


@pytest.fixture
def saved(plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    return path


def test_round_trip_is_exact_and_saving_again_gives_equal_bytes(saved: Path) -> None:
    again = saved.with_name("again.json")
    loaded = load_plan(saved)
    save_plan(loaded, again)
    assert again.read_bytes() == saved.read_bytes()
    assert plan_json(loaded)["digest"] == loaded.digest != ""


def test_order_of_pools_survives(plan: Plan, tmp_path: Path) -> None:
    swapped = plan.model_copy(update={"pools": dict(reversed(plan.pools.items()))})
    save_plan(swapped, tmp_path / "p.json")
    loaded = load_plan(tmp_path / "p.json")
    assert list(loaded.pools) == ["nvidia", "amd"]
    assert [loaded.pool_of_rank(rank) for rank in range(3)] == [
        ("nvidia", 0), ("amd", 0), ("amd", 1),
    ]  # fmt: skip
    with pytest.raises(IndexError):
        loaded.pool_of_rank(3)


def test_a_plan_from_before_kernel_preselection_means_the_vendors_kernels(tmp_path: Path) -> None:
    # What that version wrote: no field of kernels at all.
    old = changed(PLAN, "digest", sha256(PLAN))
    (tmp_path / "old.json").write_text(json.dumps(old))
    for pool in load_plan(tmp_path / "old.json").pools.values():
        assert pool.policy.kernels == "vendor" and pool.kernels == pool.own_kernels == ()


def test_shares_add_up(plan: Plan) -> None:
    assert plan.share("amd") == plan.share("nvidia") == 0.5
    assert plan.world_size == 3


def test_truncation_anywhere_is_noticed(saved: Path) -> None:
    text = saved.read_text()
    for length in range(0, len(text) - 2, max(1, len(text) // 60)):
        saved.write_text(text[:length])
        with pytest.raises(SpecError) as caught:
            load_plan(saved)
        message = str(caught.value)
        assert str(saved) in message and "hwplan plan --out" in message


def _numbers(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all numbers and texts in plain data."""
    if isinstance(node, dict):
        return [found for key, value in node.items() for found in _numbers(value, (*path, key))]
    if isinstance(node, list):
        return [found for i, value in enumerate(node) for found in _numbers(value, (*path, i))]
    return [path]


def test_an_edit_of_any_leaf_is_noticed(saved: Path) -> None:
    original = saved.read_text()
    paths = _numbers(json.loads(original))
    assert len(paths) > 100
    for path in paths:
        data = json.loads(original)
        here = data
        for part in path[:-1]:
            here = here[part]
        value = here[path[-1]]
        here[path[-1]] = (not value) if isinstance(value, bool) else "edited" if (
            isinstance(value, str) or value is None
        ) else value + 1  # fmt: skip
        saved.write_text(json.dumps(data))
        with pytest.raises(SpecError) as caught:
            load_plan(saved)
        assert "To fix: make" in str(caught.value), path


def test_an_added_or_removed_field_is_noticed(saved: Path) -> None:
    data = json.loads(saved.read_text())
    for broken in (changed(data, "pools.amd.note", "hi"), without(data, "solver.evaluated")):
        saved.write_text(json.dumps(broken))
        with pytest.raises(SpecError, match="edited or damaged"):
            load_plan(saved)


def test_a_resealed_plan_is_still_checked_field_by_field(saved: Path) -> None:
    data = changed(json.loads(saved.read_text()), "pools.amd.local_batches", 3)
    data.pop("digest")
    data["digest"] = sha256(data)
    saved.write_text(json.dumps(data))
    with pytest.raises(
        SpecError, match=r"pools\.amd\.local_batches: unknown field .*\n.*mean local"
    ):
        load_plan(saved)


@pytest.mark.parametrize("text", ["[]", "{}", '"plan"', "null", "3", '{"name": "x"}'])
def test_other_json_is_no_plan(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(SpecError, match="this is not a plan"):
        load_plan(path)


@pytest.mark.parametrize("version", [0, 1, 3, "2", None, True, 1.0])
def test_another_schema_version_is_refused(version: Any, saved: Path) -> None:
    data = json.loads(saved.read_text()) | {"schema_version": version}
    saved.write_text(json.dumps(data))
    with pytest.raises(SpecError):
        load_plan(saved)


def test_nan_in_a_plan_is_refused(saved: Path) -> None:
    saved.write_text(saved.read_text().replace('"gap":0.0714', '"gap":NaN'))
    with pytest.raises(SpecError, match="plan"):
        load_plan(saved)


def test_writing_is_all_or_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_text()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SpecError, match="No space left on device"):
        write_atomically(saved, "half")
    assert saved.read_text() == before
    assert [path.name for path in saved.parent.iterdir()] == ["plan.json"]


def test_a_plan_is_readable_by_others_and_a_missing_folder_is_an_error(saved: Path) -> None:
    assert stat.S_IMODE(saved.stat().st_mode) == 0o644
    with pytest.raises(SpecError, match="folder exists"):
        write_atomically(saved.parent / "no" / "plan.json", "{}")


NAMES = st.from_regex(r"\A[A-Za-z][A-Za-z0-9_.-]{0,20}\Z")
POSITIVE = st.floats(min_value=1e-3, max_value=1e6)

POOLS = st.fixed_dictionaries(
    {
        "name": NAMES,
        "device": st.sampled_from(["b200", "mi350x", "h200"]),
        "nodes": st.integers(1, 100),
        "devices_per_node": st.integers(1, 16),
    },
    optional={
        "nic_gbps_per_device": POSITIVE,
        "host_memory_gib_per_node": POSITIVE,
        "cpu_cores": st.lists(st.integers(0, 255), min_size=1, max_size=8, unique=True),
    },
)
CLUSTERS = st.fixed_dictionaries(
    {
        "name": NAMES,
        "description": st.text(max_size=30),
        "pools": st.lists(POOLS, min_size=1, max_size=4, unique_by=lambda pool: pool["name"]),
        "bridge": st.fixed_dictionaries(
            {"gbps": POSITIVE, "latency_us": POSITIVE, "rails": st.integers(1, 64)}
        ),
    }
)
GROUPS = st.fixed_dictionaries(
    {
        "num_embeddings": st.integers(1, 10**10),
        "embedding_dim": st.just(16),
        "count": st.integers(1, 5),
        "pooling_factors": st.lists(POSITIVE, min_size=1, max_size=3),
        "zipf_exponent": st.floats(0, 4),
    }
)


@given(CLUSTERS)
@settings(max_examples=100, deadline=None)
def test_cluster_round_trip(data: dict[str, Any]) -> None:
    cluster = validate(ClusterSpec, data, None)
    assert validate(ClusterSpec, cluster.model_dump(mode="json"), None) == cluster
    assert [pool.name for pool in cluster.pools] == [pool["name"] for pool in data["pools"]]


@given(st.lists(GROUPS, min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_model_round_trip_and_totals(groups: list[dict[str, Any]]) -> None:
    named = [group | {"name": f"g{index}"} for index, group in enumerate(groups)]
    model = validate(ModelSpec, changed(MODEL, "tables", named), None)
    assert validate(ModelSpec, model.model_dump(mode="json"), None) == model
    assert len(model.all_tables) == sum(group["count"] for group in groups)
    assert model.embedding_parameters == sum(
        group["count"] * group["num_embeddings"] * 16 for group in groups
    )


@given(st.floats(allow_nan=False))
def test_rounding_is_idempotent_and_close(value: float) -> None:
    assert rounded(rounded(value)) == rounded(value)
    assert rounded(value) == pytest.approx(value, rel=1e-8, abs=0)


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=6))
def test_canonical_json_ignores_key_order(data: dict[str, Any]) -> None:
    assert canonical_json(dict(reversed(data.items()))) == canonical_json(data)


def test_canonical_json_has_no_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})


def test_clusters_with_one_pool_need_no_bridge() -> None:
    alone = without(changed(CLUSTER, "pools", CLUSTER["pools"][:1]), "bridge")
    assert validate(ClusterSpec, alone, None).bridge is None


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("global_batch", 95, ["pools", "96 samples", "95"]),
        ("pools.amd.ranks", 3, ["pools.amd.ranks", "3 ranks are not 1 nodes of 2 devices"]),
        ("pools.amd.nodes", 2, ["pools.amd.nodes", "more than the cluster's 1"]),
        ("pools.amd.placements.user.ranks", [0, 2], ["placements.user.ranks", "rank 2", "has 2"]),
        ("pools.amd.memory_bytes", [], ["pools.amd.memory_bytes", "0 entries for 2 ranks"]),
        ("pools.amd.memory_bytes.1", {"weights": 1}, ["memory_bytes.1", "does not say total"]),
    ],
)
def test_an_edited_plan_with_a_digest_of_its_own_must_still_fit_together(
    path: str, value: Any, words: list[str], tmp_path: Path
) -> None:
    edited = changed(PLAN, path, value)
    edited["digest"] = sha256(edited)
    file = tmp_path / "p.json"
    file.write_text(json.dumps(edited))
    with pytest.raises(SpecError) as caught:
        load_plan(file)
    message = str(caught.value)
    assert all(word in message for word in (*words, str(file), "hwplan plan --out")), message


def test_placements_and_tables_are_the_same(tmp_path: Path) -> None:
    edited = without(PLAN, "pools.amd.placements.item_1")
    edited["pools"]["nvidia"]["placements"]["ghost"] = PLAN["pools"]["amd"]["placements"]["user"]
    edited["digest"] = sha256(edited)
    (tmp_path / "p.json").write_text(json.dumps(edited))
    with pytest.raises(SpecError, match="item_1 has no placement") as caught:
        load_plan(tmp_path / "p.json")
    assert "placements.ghost: the plan's model has no such table" in str(caught.value)


def test_a_number_beyond_floats_is_refused(saved: Path) -> None:
    saved.write_text(saved.read_text().replace('"gap":0.0714', '"gap":1e999'))
    with pytest.raises(SpecError, match="not valid JSON"):
        load_plan(saved)


def test_writing_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink() and target.read_text() == "new"


def test_pipes_and_devices_are_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SpecError, match="no regular file"):
        write_atomically(pipe, "new")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
