"""Built-in models: totals against the collected sources, shapes of groups and features."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from spec_samples import MODEL, changed

from planner.specs.base import validate
from planner.specs.load import MODELS, load_model, names_in
from planner.specs.model import ModelSpec, SparseOptimizer
from planner.specs.units import Dtype

COLLECTED = Path(__file__).parents[3] / "shared" / "data" / "models" / "models.yaml"
OWN = "dlrm_criteo_small"
IN_SOURCE = {"dlrm": "dlrm_dcnv2"}


@pytest.fixture(scope="module")
def collected() -> dict[str, Any]:
    if not COLLECTED.exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{COLLECTED} is missing")
        pytest.skip("the collected model numbers are not on this machine")
    data: dict[str, Any] = yaml.safe_load(COLLECTED.read_text())
    return data


def test_all_families_ship() -> None:
    assert names_in(MODELS) == [
        "de_jumbo", "de_large", "de_medium", "de_small", "de_tiny", "deepfm_criteo", "dlrm",
        "dlrm_1tb_10m", "dlrm_bench", "dlrm_criteo_small", "dlrm_kaggle", "dlrm_v1_1tb",
        "hugectr_180t_70b_hot80", "hugectr_200t_100b_hot20", "hugectr_510t_110b_hot5",
        "hugectr_7t_470b_hot20", "wukong_criteo",
    ]  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(names_in(MODELS)) - {OWN}))
def test_totals_match_the_source(name: str, collected: dict[str, Any]) -> None:
    model, source = load_model(name), collected[IN_SOURCE.get(name, name)]
    derived = source["derived"]
    assert model.name == name
    assert len(model.all_tables) == derived["tables"]
    assert model.embedding_parameters == derived["embedding_params"]
    assert sum(table.pooling for table in model.all_tables) == derived["lookups_per_sample"]
    read = sum(table.pooling * table.embedding_dim * Dtype.FP32.bytes for table in model.all_tables)
    assert read == derived["embedding_read_bytes_per_sample_fp32"]
    if "interaction_width" in derived:
        assert model.pooled_width + model.bottom_mlp[-1] == derived["interaction_width"]
    if "dense_params" in derived:
        assert dense_weights(model) == derived["dense_params"]
    options = source.get("batch", {}).get("global_options")
    assert options is None or model.global_batch in options


def dense_weights(model: ModelSpec) -> int:
    """Weight matrices of the MLPs and cross layers, counted by hand (no biases)."""

    def chain(widths: list[int]) -> int:
        return sum(a * b for a, b in pairwise(widths))

    total = chain([model.dense_features, *model.bottom_mlp])
    if model.interaction.type == "dcn_v2":
        width = model.pooled_width + model.bottom_mlp[-1]
        total += model.interaction.num_layers * 2 * width * model.interaction.low_rank
    else:
        vectors = len(model.all_tables) + 1
        width = vectors * (vectors - 1) // 2 + model.bottom_mlp[-1]
    return total + chain([width, *model.top_mlp])


@pytest.mark.parametrize("name", names_in(MODELS))
def test_precision_lists_start_with_the_recipe(name: str) -> None:
    model = load_model(name)
    assert model.source and model.description
    assert Dtype.FP8 not in model.precision.compute, "no recipe here was shown to train in fp8"
    if not name.startswith(("hugectr_", "de_")):
        assert model.precision.embeddings == (Dtype.FP32,), "quality was measured with fp32 tables"
    assert all(table.zipf_exponent <= 2 for table in model.all_tables)


def test_recipes_that_differ_between_vendors() -> None:
    assert load_model("dlrm").precision.compute[0] is Dtype.FP16
    assert load_model("dlrm_v1_1tb").precision.compute[0] is Dtype.TF32
    assert load_model("dlrm_kaggle").precision.compute[0] is Dtype.FP32


def test_only_two_cannot_be_trained_and_say_why() -> None:
    why_not = {name: load_model(name).why_not_trainable for name in names_in(MODELS)}
    assert {name: text for name, text in why_not.items() if text} == {
        "deepfm_criteo": "table cat_0 has embedding_dim 10, and FBGEMM's kernels train multiples "
        "of 4",
        "wukong_criteo": "architecture wukong",
    }


def test_groups_expand_and_features_get_names() -> None:
    model = validate(ModelSpec, MODEL, None)
    user, item_0, item_1 = model.all_tables
    assert (user.name, item_0.name, item_1.name) == ("user", "item_0", "item_1")
    assert user.feature_names == ("user.f0", "user.f1") and item_0.feature_names == ("item_0",)
    assert user.pooling == 3 and user.output_width == 32 and item_0.output_width == 16
    assert model.embedding_parameters == 100 * 16 + 2 * 50 * 16
    assert model.pooled_width == 64


def test_an_expanded_group_may_not_collide_with_another_table() -> None:
    with pytest.raises(ValueError, match="two tables are named 'item_1'"):
        ModelSpec.model_validate_json(json.dumps(changed(MODEL, "tables.0.name", "item_1")))


@pytest.mark.parametrize(
    ("optimizer", "floats"), [("sgd", 0), ("rowwise_adagrad", 1), ("adagrad", 128), ("adam", 256)]
)
def test_optimizer_state_per_row(optimizer: Any, floats: int) -> None:
    assert SparseOptimizer(name=optimizer, learning_rate=1.0).state_floats_per_row(128) == floats
