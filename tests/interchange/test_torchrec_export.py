"""Exported sharding plans against the trainer's own, and training under them without hwplan."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.types import EmbeddingModuleShardingPlan

from planner.interchange.torchrec_plan import (
    pool_to_export,
    sharding_plan_data,
    sharding_plan_json,
    sharding_plan_module,
)
from planner.specs.errors import SpecError, UsageError
from planner.specs.model import ComputeKernel
from planner.specs.plan import Plan
from tests.interchange.export_jobs import (
    PLACEMENTS,
    every_sharding,
    executed,
    model_with,
    train_exported,
    train_plainly,
)
from tests.trainers.jobs import place, plan_of, run_on_processes
from trainers.models.build import EMBEDDINGS
from trainers.placement import sharding_plan


def as_data(plan: EmbeddingModuleShardingPlan) -> dict[str, Any]:
    """TorchRec's objects in the words of the JSON."""
    return {
        name: {
            "sharding_type": sharding.sharding_type,
            "compute_kernel": sharding.compute_kernel,
            "ranks": sharding.ranks,
            "sharding_spec": sharding.sharding_spec
            and {
                "shards": [
                    asdict(shard) | {"placement": str(shard.placement)}
                    for shard in sharding.sharding_spec.shards
                ]
            },
            "cache_params": sharding.cache_params
            and {"load_factor": sharding.cache_params.load_factor},
            "bounds_check_mode": sharding.bounds_check_mode.name,
        }
        for name, sharding in plan.items()
    }


def with_cache() -> Plan:
    """A plan with a cached and a host table on GPUs of a second pool."""
    cached = place("table_wise", 1).model_copy(
        update={
            "compute_kernel": ComputeKernel.FUSED_UVM_CACHING,
            "cache_load_factor": 0.2,
        }
    )
    hosted = place("row_wise", 0, 1).model_copy(update={"compute_kernel": ComputeKernel.FUSED_UVM})
    tables = {"cached": cached, "hosted": hosted}
    first = {name: place("table_wise", 0) for name in tables}
    return plan_of({"first": (3, 4, first), "second": (2, 2, tables)}, model_with(tables))


def test_json_and_module_are_the_trainers_plan_for_every_sharding_type() -> None:
    plan = every_sharding()
    assert {str(p.sharding_type) for p in PLACEMENTS.values()} == {
        "table_wise", "row_wise", "column_wise", "table_row_wise", "grid_shard", "data_parallel"
    }  # fmt: skip
    theirs = sharding_plan(plan, "p", 1, torch.device("cpu"))
    data = sharding_plan_data(plan, "p", module=EMBEDDINGS, device_type="cpu")
    assert json.loads(sharding_plan_json(data))["plan"][EMBEDDINGS] == as_data(
        theirs.plan[EMBEDDINGS]
    )
    module = executed(sharding_plan_module(plan, "p", module=EMBEDDINGS, device_type="cpu"))
    assert module["sharding_plan"]().plan == theirs.plan
    assert (module["RANKS"], module["DEVICES_PER_NODE"], module["LOCAL_BATCH"]) == (4, 2, 3)


def test_ranks_and_devices_of_a_second_pool() -> None:
    plan = with_cache()
    theirs = sharding_plan(plan, "second", 4, torch.device("cuda:1"))
    module = executed(sharding_plan_module(plan, "second"))
    assert module["sharding_plan"](EMBEDDINGS, first_rank=3).plan == theirs.plan
    data = sharding_plan_data(plan, "second", module="ebc", first_rank=3)
    assert data["plan"]["ebc"] == as_data(theirs.plan[EMBEDDINGS])
    assert data["plan"]["ebc"]["cached"]["cache_params"] == {"load_factor": 0.2}
    # By default the pool is the world; with one visible device per process all are index 0.
    alone = module["sharding_plan"](devices_per_node=1).plan[""]["cached"].sharding_spec.shards
    assert str(alone[0].placement) == "rank:1/cuda:0"


def test_bag_configs_carry_shapes_features_and_precision() -> None:
    plan = every_sharding()
    placements = dict(plan.pools["p"].placements)
    placements["rows"] = placements["rows"].model_copy(update={"data_type": "fp16"})
    pool = plan.pools["p"].model_copy(update={"placements": placements})
    plan = plan.model_copy(update={"pools": {"p": pool}})
    configs = executed(sharding_plan_module(plan, "p"))["embedding_bag_configs"]()
    by_name = {config.name: config for config in configs}
    assert [config.name for config in configs] == [t.name for t in plan.model.all_tables]
    assert by_name["rows"].feature_names == ["rows.f0", "rows.f1"]
    assert by_name["rows"].data_type.name == "FP16" and by_name["whole"].data_type.name == "FP32"
    assert (by_name["grid"].num_embeddings, by_name["grid"].embedding_dim) == (22, 16)


def test_an_exported_plan_trains_exactly_without_the_trainer() -> None:
    plan = every_sharding()
    source = sharding_plan_module(plan, "p")
    expected = train_plainly(source, plan)
    results = run_on_processes(4, train_exported, source, plan)
    assert all(same for same, _ in results)
    for step, whole in enumerate(expected):
        sharded = torch.cat([outputs[step] for _, outputs in results])
        torch.testing.assert_close(sharded, whole, rtol=1e-5, atol=1e-5)
    assert float((expected[0] - expected[1]).abs().max()) > 0.1


def test_the_module_imports_nothing_of_hwplan(tmp_path: Path) -> None:
    (tmp_path / "exported.py").write_text(sharding_plan_module(every_sharding(), "p"))
    check = (
        "import sys, exported as e; e.sharding_plan('ebc'); "
        "assert not {'planner', 'trainers', 'runtime'} & {m.split('.')[0] for m in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", check], cwd=tmp_path, check=True, timeout=120)


def test_the_exporter_needs_no_torch() -> None:
    check = (
        "import sys, planner.interchange.torchrec_plan; "
        "assert not {'torch', 'torchrec', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_one_pool_is_exported_at_a_time() -> None:
    assert pool_to_export(every_sharding(), None) == "p"
    assert pool_to_export(with_cache(), "second") == "second"
    with pytest.raises(UsageError, match=r"--pool: which.*\n.*first, second"):
        pool_to_export(with_cache(), None)
    with pytest.raises(UsageError, match=r"no such pool.*third"):
        pool_to_export(with_cache(), "third")


def test_placements_that_would_train_wrongly_are_not_exported() -> None:
    plan = plan_of({"p": (4, 2, {"a": place("row_wise", 0, 1)})}, model_with(["a"]))
    for export in (sharding_plan_data, sharding_plan_module):
        with pytest.raises(SpecError, match=r"pools\.p\.placements\.a"):
            export(plan, "p")


def test_text_of_the_plan_file_cannot_become_code() -> None:
    plan = every_sharding()
    name = '"""\nraise SystemExit\n"""'
    pool = plan.pools["p"].model_copy(update={"device": name})
    plan = plan.model_copy(update={"hwplan_version": name, "pools": {"p": pool}})
    found = executed(sharding_plan_module(plan, "p", module=name))
    assert {"embedding_bag_configs", "sharding_plan"} <= found.keys()
