"""Constraints inside a TorchEasyRec pipeline config in JSON (protobuf's JSON mapping).

    {"train_config": {"global_embedding_constraints": {…}},
     "feature_configs": [{"id_feature": {"feature_name": "user", "embedding_name": "user_emb",
                                         "embedding_constraints": {…}}}, …]}

Field names in snake or in lower camel case, as protobuf accepts both. A feature's table is named
``embedding_name``, or the feature with ``_emb`` behind it (inside a sequence feature with
``<sequence_name>__`` before it); features may share a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.specs.errors import SpecError

PIPELINE_FIELDS = {"feature_configs", "train_config", "model_config", "data_config"}
SUB_FEATURES = "features"
"""Of a sequence feature: the features inside it."""


def is_pipeline_config(data: dict[str, Any]) -> bool:
    """Whether a document is a pipeline config and no constraints file."""
    return bool(PIPELINE_FIELDS & {_snake(key) for key in data})


def pipeline_constraints(data: dict[str, Any], file: str | Path) -> dict[str, Any]:
    """The constraints of a pipeline config, as the content of a constraints file.

    Raises:
        SpecError: two features of one table contradict each other, or the layout is another.
    """
    config = _snake_keys(data)
    result: dict[str, Any] = {"embedding_constraints": {}}
    train = config.get("train_config")
    if isinstance(train, dict) and "global_embedding_constraints" in train:
        result["global_embedding_constraints"] = train["global_embedding_constraints"]
    by_table = result["embedding_constraints"]
    for field, prefix, feature in _features(config.get("feature_configs", []), file):
        if "embedding_constraints" not in feature:
            continue
        name = feature.get("feature_name")
        table = feature.get("embedding_name") or f"{prefix}{name}_emb"
        if not isinstance(name, str):
            raise SpecError(
                "the feature has no feature_name", file=file, field=field, fix="give it one"
            )
        given = feature["embedding_constraints"]
        if by_table.setdefault(table, given) != given:
            raise SpecError(
                f"two features of table {table} have different embedding_constraints",
                file=file,
                field=f"{field}.embedding_constraints",
                value=given,
                fix="give both the same, or only one of them any",
            )
    return result


def _features(configs: Any, file: str | Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(place in the file, prefix of its name, feature), features of sequences included."""
    if not isinstance(configs, list):
        raise SpecError(
            "must be a list", file=file, field="feature_configs", fix="see TorchEasyRec's configs"
        )
    for index, config in enumerate(configs):
        for kind, feature in config.items() if isinstance(config, dict) else ():
            field = f"feature_configs.{index}.{kind}"
            if not isinstance(feature, dict):
                continue
            yield field, "", feature
            sequence = feature.get("sequence_name", "")
            for deeper, _, inner in _features(feature.get(SUB_FEATURES, []), file):
                place = deeper.removeprefix("feature_configs")
                yield f"{field}.{SUB_FEATURES}{place}", f"{sequence}__", inner


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda match: f"_{match[1].lower()}", name)


def _snake_keys(data: Any) -> Any:
    if isinstance(data, dict):
        return {_snake(key): _snake_keys(value) for key, value in data.items()}
    return [_snake_keys(item) for item in data] if isinstance(data, list) else data
