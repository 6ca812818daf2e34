"""Every unusable input is one SpecError that names file, field, value and fix."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from spec_samples import CLUSTER, MODEL, changed, without

from planner.specs.base import load_yaml, validate
from planner.specs.cluster import ClusterSpec
from planner.specs.errors import MOST_SHOWN, HwplanError, SpecError, SpecErrors, UsageError
from planner.specs.load import DEVICES, load_cluster, load_device, load_model, names_in
from planner.specs.model import ModelSpec

NAN, INF = float("nan"), float("inf")

CLUSTER_FAULTS = [
    # path, bad value, words that the message must hold
    ("pools.0.nodes", 0, ["pools.0.nodes", "got 0", "above 0"]),
    ("pools.0.nodes", -1, ["pools.0.nodes", "got -1", "above 0"]),
    ("pools.0.nodes", "4", ["pools.0.nodes", "'4'", "whole number"]),
    ("pools.0.nodes", 2.5, ["pools.0.nodes", "2.5", "whole number"]),
    ("pools.0.nodes", True, ["pools.0.nodes", "True", "whole number"]),
    ("pools.0.nodes", None, ["pools.0.nodes", "None", "whole number"]),
    ("pools.0.nodes", 10**30, ["pools.0.nodes", "at most 100000"]),
    ("pools.0.nods", 3, ["pools.0.nods", "unknown field", "did you mean nodes?"]),
    ("pools.0.nic_gbps_per_device", INF, ["nic_gbps_per_device", "inf", "at most 1e+06"]),
    ("pools.0.host_memory_gib_per_node", -2, ["host_memory_gib_per_node", "-2", "at least 0.001"]),
    ("pools.0.cpu_cores", [], ["pools.0.cpu_cores", "not be empty"]),
    ("pools.0.cpu_cores", [1, 1], ["pools.0", "cpu_cores [1, 1]", "twice"]),
    ("pools.0.cpu_cores", [-1], ["pools.0.cpu_cores.0", "-1", "at least 0"]),
    ("pools", [], ["pools", "not be empty", "list at least 1"]),
    ("pools", "amd", ["pools", "'amd'", "a list"]),
    ("pools.0", None, ["pools.0", "mapping of fields"]),
    ("pools.1.name", "amd", ["two pools are named 'amd'"]),
    ("name", "9 lives", ["name", "'9 lives'", "start with a letter"]),
    ("bridge", None, ["no bridge", "add bridge:"]),
    ("bridge.gbps", NAN, ["bridge.gbps", "nan", "at least 0.001 and of at most 1e+06"]),
    ("bridge.gbps", 0, ["bridge.gbps", "got 0", "at least 0.001"]),
    ("bridge.latency_us", -1, ["bridge.latency_us", "-1", "at least 0"]),
    ("bridge.rails", 0, ["bridge.rails", "above 0"]),
]

MODEL_FAULTS = [
    ("arch", "dlrm", ["arch", "'dlrm'", "'dlrm_dot'"]),
    ("global_batch", 0, ["global_batch", "got 0", "above 0"]),
    ("global_batch", -64, ["global_batch", "-64", "above 0"]),
    ("tables", [], ["tables", "not be empty"]),
    ("tables.0.num_embeddings", -5, ["tables.0.num_embeddings", "-5", "above 0"]),
    ("tables.0.embeding_dim", 16, ["tables.0.embeding_dim", "did you mean embedding_dim?"]),
    ("tables.0.embedding_dim", 15, ["tables.0", "embedding_dim 15 is odd", "even width"]),
    ("tables.0.embedding_dim", 8, ["[8, 16]", "make embedding_dim"]),
    ("tables.0.pooling_factors", [], ["pooling_factors", "not be empty"]),
    ("tables.0.pooling_factors", [0], ["tables.0.pooling_factors.0", "at least 1e-06"]),
    ("tables.0.pooling_factors", [NAN], ["tables.0.pooling_factors.0", "nan", "at most 1e+06"]),
    ("tables.0.zipf_exponent", -0.5, ["zipf_exponent", "-0.5", "at least 0"]),
    ("tables.1.count", 10**9, ["tables.1.count", "at most 100000"]),
    ("tables.1.name", "a b", ["tables.1.name", "'a b'", "start with a letter"]),
    ("tables.0.constraints", {"min_partition": 6}, ["min_partition", "multiple of 4"]),
    ("tables.0.constraints", {"sharding_types": []}, ["sharding_types allows nothing"]),
    (
        "tables.0.constraints",
        {"sharding_types": ["rowwise"]},
        ["constraints.sharding_types.0", "'rowwise'", "'row_wise'"],
    ),
    ("interaction", {"type": "dto"}, ["interaction", "'dto'", "'dot'"]),
    ("interaction", {}, ["interaction", "add type"]),
    (
        "interaction",
        {"type": "dcn_v2", "num_layers": 1, "low_rank": 0},
        ["interaction.low_rank", "above 0"],
    ),
    (
        "interaction",
        {"type": "dcn_v2", "num_layers": 1, "low_rank": 8, "lowrank": 8},
        ["interaction.lowrank", "did you mean low_rank?", "num_layers"],
    ),
    (
        "interaction",
        {"type": "dcn_v2", "num_layers": 1, "low_rank": 3},
        ["dlrm_dot has interaction dot", "set interaction.type to dot"],
    ),
    ("top_mlp", [8, 2], ["top_mlp ends with 2", "end top_mlp with 1"]),
    ("top_mlp", [], ["top_mlp", "not be empty"]),
    ("bottom_mlp", [], ["needs bottom_mlp"]),
    ("bottom_mlp", [8, 0], ["bottom_mlp.1", "above 0"]),
    ("dense_features", 0, ["dense_features is 0"]),
    ("optimizer.dense.name", "lamb", ["optimizer.dense.name", "'lamb'", "'adagrad'"]),
    ("optimizer.dense.learning_rate", 0, ["optimizer.dense.learning_rate", "at least 1e-12"]),
    ("precision", {"compute": ["int8"]}, ["precision.compute.0", "'int8'", "'bf16'"]),
    ("precision", {"compute": ["fp32", "fp32"]}, ["compute", "repeats", "once"]),
    ("precision", {"embeddings": ["fp8"]}, ["embeddings cannot be stored as fp8"]),
    ("precision", {"embedding": ["fp32"]}, ["precision.embedding", "did you mean embeddings?"]),
    ("wukong_layers", [{"lcb": 1, "fmb": 1, "compressed": 1, "fmb_mlp": [3]}], ["wukong"]),
    ("max_exchange_interval_steps", 0, ["max_exchange_interval_steps", "above 0"]),
]


def assert_explains(error: HwplanError, words: list[str]) -> None:
    text = str(error)
    assert text.startswith("my.yaml: "), text
    assert "\n  To fix: " in text
    assert "Traceback" not in text and "pydantic" not in text
    assert text.count("To fix") == 1, f"one cause, several errors: {text}"
    for word in words:
        assert word in text, f"{word!r} is not in {text!r}"
    assert error.exit_code == 2


@pytest.mark.parametrize(("path", "value", "words"), CLUSTER_FAULTS)
def test_cluster_fault_is_explained(path: str, value: object, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        validate(ClusterSpec, changed(CLUSTER, path, value), "my.yaml")
    assert_explains(caught.value, words)


@pytest.mark.parametrize(("path", "value", "words"), MODEL_FAULTS)
def test_model_fault_is_explained(path: str, value: object, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        validate(ModelSpec, changed(MODEL, path, value), "my.yaml")
    assert_explains(caught.value, words)


@pytest.mark.parametrize("path", ["name", "arch", "tables", "optimizer.sparse", "tables.0.name"])
def test_a_missing_field_is_named(path: str) -> None:
    with pytest.raises(SpecError) as caught:
        validate(ModelSpec, without(MODEL, path), "my.yaml")
    assert_explains(caught.value, [f"my.yaml: {path}: this field is missing"])


def test_every_device_field_is_required_or_typed() -> None:
    """Breaking any single number of a real profile is noticed at that very place."""
    # Through JSON, because a YAML alias would be changed in both places.
    profile = json.loads(json.dumps(load_yaml(DEVICES / "b200.yaml", "device profile")))

    def constants(node: dict, prefix: tuple[str, ...] = ()):
        for key, value in node.items():
            if isinstance(value, dict):
                if "provenance" in value:
                    yield (*prefix, key)
                else:
                    yield from constants(value, (*prefix, key))

    from planner.specs.device import DeviceProfile

    paths = list(constants(profile))
    assert len(paths) > 30
    for path in paths:
        for bad in (-1.0, NAN, "fast", None):
            broken = changed(profile, ".".join((*path, "value")), bad)
            with pytest.raises(SpecError) as caught:
                validate(DeviceProfile, broken, "my.yaml")
            assert caught.value.field == ".".join((*path, "value"))
        with pytest.raises(SpecError, match="provenance"):
            validate(
                DeviceProfile, changed(profile, ".".join((*path, "provenance")), "heard"), "my.yaml"
            )
        with pytest.raises(SpecError, match="did you mean"):
            validate(DeviceProfile, changed(profile, ".".join((*path, "valu")), 1.0), "my.yaml")


def test_several_problems_are_reported_together_on_one_screen() -> None:
    broken = copy.deepcopy(MODEL)
    broken["tables"] = [
        {"name": f"t{index}", "num_embeddings": 0, "embedding_dim": 0} for index in range(100)
    ]
    with pytest.raises(SpecErrors) as caught:
        validate(ModelSpec, broken, "my.yaml")
    text = str(caught.value)
    assert len(caught.value.errors) == 200
    assert len(text.splitlines()) == 2 * MOST_SHOWN + 1
    assert text.endswith(f"and {200 - MOST_SHOWN} more problems in this file")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: a\nname: b\n", ["line 2", "'name' appears twice"]),
        ("pools:\n  - {name: a, name: b}\n", ["line 2", "'name' appears twice"]),
        ("name: [1, 2\n", ["not valid YAML", "line 2"]),
        ("a: \tb:\n\t- c", ["not valid YAML", "line"]),
        ("- a\n- b\n", ["mapping of fields", "list"]),
        ("", ["mapping of fields", "NoneType"]),
        ("just words\n", ["mapping of fields", "str"]),
        ("name: !!python/object/apply:os.system ['true']\n", ["not valid YAML"]),
        ("{a: 1}: 2\n", ["not valid YAML"]),
        ("a: &x [*x]\n", ["my.yaml"]),
        ("when: 2026-01-01\n", ["my.yaml"]),
        ("? !!set {a}\n", ["not valid YAML"]),
        ("a: 0o9x\nb: .nan\n", ["my.yaml", "unknown field"]),
        ("1: 2\n", ["the key 1 is not text", "line 1"]),
        ("on: 2\n", ["the key True is not text"]),
        ("a: !!binary aGk=\n", ["my.yaml"]),
    ],
)
def test_yaml_that_is_no_spec(
    text: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        validate(ClusterSpec, load_yaml("my.yaml", "cluster file"), "my.yaml")
    message = str(caught.value)
    assert message.startswith("my.yaml: ") and "To fix: " in message
    for word in words:
        assert word in message, message


def test_yaml_numbers_in_exponent_form_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: 8e12\nb: 1E-3\nc: -2e+3\nd: 8.5e3\ne: 1_000\nf: '8e12'\ng: e12\n")
    assert load_yaml(path, "file") == {
        "a": 8e12, "b": 1e-3, "c": -2e3, "d": 8.5e3, "e": 1000, "f": "8e12", "g": "e12",
    }  # fmt: skip


@pytest.mark.parametrize("content", [b"\xff\xfe\x00n", b"\x00\x01\x02", b"name: \x80"])
def test_binary_is_no_spec(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load_cluster(str(path))
    assert "To fix: " in str(caught.value)


def test_missing_file_folder_and_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        load_cluster(str(tmp_path / "no.yaml"))
    with pytest.raises(SpecError, match="folder"):
        load_model(f"{tmp_path}/")
    with pytest.raises(
        UsageError, match=r"unknown model \(got 'nope'\)\n  To fix: use one of .*dlrm"
    ):
        load_model("nope")
    with pytest.raises(UsageError, match="unknown model"):
        load_model("")
    with pytest.raises(UsageError, match="unknown device"):
        load_device("b201")
    with pytest.raises(UsageError, match="unknown cluster"):
        load_cluster("..")


def _cluster_file(tmp_path: Path, path: str, value: object) -> str:
    target = tmp_path / "cluster.yaml"
    target.write_text(json.dumps(changed(CLUSTER, path, value)))
    return str(target)


def test_unknown_device_names_pool_and_known_devices(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_cluster(_cluster_file(tmp_path, "pools.1.device", "b2000"))
    text = str(caught.value)
    assert "cluster.yaml: pools.1.device: unknown device (got 'b2000')" in text
    assert all(name in text for name in names_in(DEVICES))
    with pytest.raises(UsageError, match="reference_device: unknown device"):
        load_cluster(_cluster_file(tmp_path, "reference_device", "tpu"))


def test_cpu_cores_belong_to_cpu_pools_and_only_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pools\.0\.cpu_cores: cpu_cores is for CPU pools"):
        load_cluster(_cluster_file(tmp_path, "pools.0.cpu_cores", [0]))
    with pytest.raises(UsageError, match=r"pools\.0\.cpu_cores: a CPU pool needs cpu_cores"):
        load_cluster(_cluster_file(tmp_path, "pools.0.device", "cpu"))


def test_a_device_profile_beside_the_cluster_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text((DEVICES / "b200.yaml").read_text())
    cluster = load_cluster(_cluster_file(tmp_path, "pools.1.device", "mine.yaml"))
    assert cluster.pools[1].device == str(tmp_path / "mine.yaml")
    assert cluster.pools[0].device == "mi350x"
    assert load_device(cluster.pools[1].device).name == "b200"


def test_aliases_of_aliases_are_refused_before_they_are_written_out(tmp_path: Path) -> None:
    rows = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(rows))
    with pytest.raises(SpecError, match="aliases"):
        load_cluster(str(path))
    path.write_text("a: &a [*a]")
    with pytest.raises(SpecError):
        load_cluster(str(path))


def test_files_without_end_and_names_too_long_are_errors() -> None:
    with pytest.raises(SpecError, match="more than"):
        load_cluster("/dev/zero")
    with pytest.raises(SpecError, match="too long"):
        load_cluster("a" * 300 + ".yaml")
    with pytest.raises(UsageError, match="unknown cluster"):
        load_cluster("a" * 300)


def test_a_device_path_is_looked_up_beside_the_cluster_file_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = (DEVICES / "h200.yaml").read_text()
    for folder, name in (("here", "mine_here"), ("beside", "mine_beside")):
        (tmp_path / folder).mkdir()
        profile = shipped.replace("name: h200", f"name: {name}", 1)
        (tmp_path / folder / "mine.yaml").write_text(profile)
    cluster = tmp_path / "beside" / "cluster.yaml"
    cluster.write_text(
        "name: one\nreference_device: h200\n"
        "pools: [{name: p, device: mine.yaml, nodes: 1, devices_per_node: 1}]\n"
    )
    monkeypatch.chdir(tmp_path / "here")
    found = load_device(load_cluster(str(cluster)).pools[0].device)
    assert found.name == "mine_beside"
