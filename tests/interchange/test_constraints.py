"""Constraints in TorchEasyRec's words: read, joined with the model's, obeyed, exported again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.interchange.constraints import (
    ConstraintsFile,
    constrained,
    constraints_of_plan,
    constraints_yaml,
    load_constraints,
)
from planner.search import SearchOptions, plan_job
from planner.specs.base import load_yaml, validate
from planner.specs.cluster import ClusterSpec
from planner.specs.errors import InfeasibleError, SpecError, UsageError
from planner.specs.model import ModelSpec, TableConstraints
from planner.specs.plan import Plan
from tests.interchange.export_jobs import every_sharding

MODEL: dict[str, Any] = {
    "name": "toy",
    "description": "five tables",
    "source": "made up",
    "arch": "mlp_concat",
    "global_batch": 4096,
    "top_mlp": [64, 1],
    "tables": [
        {"name": "user", "num_embeddings": 4_000_000, "embedding_dim": 64},
        {"name": "item", "count": 3, "num_embeddings": 1_000_000, "embedding_dim": 64},
        {
            "name": "kind",
            "num_embeddings": 50,
            "embedding_dim": 64,
            "constraints": {"sharding_types": ["table_wise", "data_parallel"]},
        },
    ],
    "optimizer": {
        "dense": {"name": "sgd", "learning_rate": 0.1},
        "sparse": {"name": "rowwise_adagrad", "learning_rate": 0.1},
    },
}
CLUSTER: dict[str, Any] = {
    "name": "one",
    "pools": [{"name": "nvidia", "device": "b200", "nodes": 1, "devices_per_node": 4}],
    "bridge": {"gbps": 40, "latency_us": 50},
}
FAST = SearchOptions(mip_gap=0.05, time_limit_s=20.0)


def toy() -> ModelSpec:
    return validate(ModelSpec, MODEL, None)


def written(folder: Path, content: str, name: str = "c.yaml") -> Path:
    (folder / name).write_text(content)
    return folder / name


def allowing(**lists: tuple[str, ...]) -> TableConstraints:
    return validate(TableConstraints, {name: list(words) for name, words in lists.items()}, None)


def by_table(model: ModelSpec) -> dict[str, TableConstraints]:
    return {table.name: table.constraints for table in model.all_tables}


def planned(model: ModelSpec) -> Plan:
    return plan_job(validate(ClusterSpec, CLUSTER, None), model, None, FAST)


def test_own_constraints_replace_global_ones_and_split_groups(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "global_embedding_constraints: {sharding_types: [table_wise, row_wise]}\n"
        "embedding_constraints:\n"
        "  user: {compute_kernels: [fused, fused_uvm]}\n"
        "  item_1: {sharding_types: [column_wise], min_partition: 16}\n",
    )
    model = constrained(toy(), load_constraints(file), file)
    found = by_table(model)
    assert [*found] == ["user", "item_0", "item_1", "item_2", "kind"]
    assert found["user"] == allowing(compute_kernels=("fused", "fused_uvm"))
    assert found["item_0"].sharding_types == found["item_2"].sharding_types
    assert found["item_0"].sharding_types == ("table_wise", "row_wise")
    assert (found["item_1"].sharding_types, found["item_1"].min_partition) == (("column_wise",), 16)
    # The model's own constraints are never widened.
    assert found["kind"].sharding_types == ("table_wise",)


def test_a_group_stands_for_its_tables_and_stays_whole(tmp_path: Path) -> None:
    file = written(tmp_path, "embedding_constraints: {item: {sharding_types: [row_wise]}}")
    model = constrained(toy(), load_constraints(file))
    assert [(group.name, group.count) for group in model.tables] == [
        ("user", 1),
        ("item", 3),
        ("kind", 1),
    ]
    assert by_table(model)["item_2"].sharding_types == ("row_wise",)
    assert by_table(model)["user"] == TableConstraints()


def test_plans_obey_and_carry_constraints(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "global_embedding_constraints: {sharding_types: [row_wise], compute_kernels: [fused]}\n"
        "embedding_constraints:\n"
        "  item_0: {sharding_types: [column_wise], min_partition: 32}\n"
        "  kind: {sharding_types: [data_parallel]}\n",
    )
    model = constrained(toy(), load_constraints(file))
    free, plan = planned(toy()), planned(model)
    placements = plan.pools["nvidia"].placements
    kinds = {name: str(placement.sharding_type) for name, placement in placements.items()}
    assert kinds == {
        "user": "row_wise",
        "item_0": "column_wise",
        "item_1": "row_wise",
        "item_2": "row_wise",
        "kind": "data_parallel",
    }
    assert placements["item_0"].column_widths == (32, 32)
    assert plan.model == model
    assert plan.fingerprint != free.fingerprint
    assert plan.predicted.step_ms >= free.predicted.lower_bound_ms


def test_exported_constraints_give_the_same_placements_again(tmp_path: Path) -> None:
    first = planned(toy())
    file = written(tmp_path, constraints_yaml(constraints_of_plan(first), "made by a test"))
    again = planned(constrained(toy(), load_constraints(file), file))
    for name, placement in first.pools["nvidia"].placements.items():
        found = again.pools["nvidia"].placements[name]
        assert (found.sharding_type, found.compute_kernel, found.data_type) == (
            placement.sharding_type,
            placement.compute_kernel,
            placement.data_type,
        )
        if placement.column_widths:
            assert min(found.column_widths) >= min(placement.column_widths)
    assert constraints_of_plan(again).embedding_constraints.keys() == by_table(toy()).keys()


def test_export_of_every_sharding_type_round_trips(tmp_path: Path) -> None:
    found = constraints_of_plan(every_sharding())
    assert found.embedding_constraints["grid"].min_partition == 4
    assert [str(t) for t in found.embedding_constraints["replica"].compute_kernels or ()] == [
        "dense"
    ]
    file = written(tmp_path, constraints_yaml(found))
    assert load_constraints(file) == found
    assert load_constraints(written(tmp_path, json.dumps(load_yaml(file, "x")), "c.json")) == found
    with pytest.raises(UsageError, match=r"--pool.*other"):
        constraints_of_plan(every_sharding(), "other")


PIPELINE = {
    "train_config": {"global_embedding_constraints": {"sharding_types": ["table_wise"]}},
    "feature_configs": [
        {
            "id_feature": {
                "feature_name": "user_id",
                "embedding_name": "user",
                "embedding_constraints": {
                    "sharding_types": ["row_wise", "table_column_wise"],
                    "compute_kernels": ["fused", "key_value"],
                },
            }
        },
        {"raw_feature": {"feature_name": "price"}},
        {
            "sequence_feature": {
                "sequence_name": "clicks",
                "features": [
                    {
                        "id_feature": {
                            "feature_name": "id",
                            "embedding_constraints": {"compute_kernels": ["fused"]},
                        }
                    }
                ],
            }
        },
    ],
}


@pytest.mark.parametrize("camel", [False, True])
def test_a_torcheasyrec_pipeline_config(tmp_path: Path, camel: bool) -> None:
    text = json.dumps(PIPELINE, indent="\t")
    if camel:
        for word in ("train_config", "global_embedding_constraints", "sharding_types",
                     "feature_configs", "feature_name", "embedding_name"):  # fmt: skip
            head, *tail = word.split("_")
            text = text.replace(f'"{word}"', f'"{head}{"".join(map(str.title, tail))}"')
    found = load_constraints(written(tmp_path, text, "pipeline.json"))
    assert found == ConstraintsFile(
        global_embedding_constraints=allowing(sharding_types=("table_wise",)),
        embedding_constraints={
            # Words that hwplan never plans add nothing to what is allowed.
            "user": allowing(sharding_types=("row_wise",), compute_kernels=("fused",)),
            "clicks__id_emb": allowing(compute_kernels=("fused",)),
        },
    )


def test_features_of_one_table_must_agree(tmp_path: Path) -> None:
    feature = PIPELINE["feature_configs"][0]["id_feature"]
    other = feature | {"embedding_constraints": {"sharding_types": ["table_wise"]}}
    config = {"feature_configs": [{"id_feature": feature}, {"combo_feature": other}]}
    file = written(tmp_path, json.dumps(config), "p.json")
    with pytest.raises(SpecError, match=r"feature_configs\.1\.combo_feature\.embedding_constr"):
        load_constraints(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("embedding_constraints: {user: {sharding_types: [diagonal]}}", ["user.sharding_types"]),
        ("embedding_constraints: {user: {sharding_type: [row_wise]}}", ["user.sharding_type"]),
        ("embedding_constraints: {user: {sharding_types: []}}", ["user", "allows nothing"]),
        ("embedding_constraints: {user: {min_partition: 6}}", ["user", "multiple of 4"]),
        ("embedding_constraints: [user]", ["embedding_constraints"]),
        ("constraints: {}", ["constraints"]),
        (
            "embedding_constraints: {user: {sharding_types: [table_column_wise]}}",
            ["embedding_constraints.user.sharding_types", "never plans"],
        ),
        ("embedding_constraints: {usr: {sharding_types: [row_wise]}}", ["usr", "no such table"]),
        (
            "embedding_constraints: {kind: {sharding_types: [row_wise, grid_shard]}}",
            ["embedding_constraints.kind.sharding_types", "allow one of table_wise"],
        ),
    ],
)
def test_unusable_constraints_are_named(tmp_path: Path, content: str, words: list[str]) -> None:
    file = written(tmp_path, content)
    with pytest.raises((SpecError, UsageError)) as raised:
        constrained(toy(), load_constraints(file), file)
    for word in ("c.yaml", "To fix", *words):
        assert word in str(raised.value), raised.value
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    "content",
    [
        # data_parallel has one kernel, and it is not this one.
        "{user: {sharding_types: [data_parallel], compute_kernels: [fused]}}",
        # No two shards of at least 64 columns.
        "{user: {sharding_types: [column_wise], min_partition: 64}}",
    ],
)
def test_constraints_that_no_placement_meets(tmp_path: Path, content: str) -> None:
    file = written(tmp_path, f"embedding_constraints: {content}")
    with pytest.raises(InfeasibleError, match=r"table user.*\n.*To fix") as raised:
        planned(constrained(toy(), load_constraints(file), file))
    assert raised.value.exit_code == 3
