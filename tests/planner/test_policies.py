"""Which memory policies are considered, and which are taken where memory is short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cost.context import PoolContext
from planner.cost.dense import recomputable
from planner.cost.memory import base_memory_bytes
from planner.policies import kinds_beside, quick_policies, recompute_choices
from planner.search import SearchOptions, plan_job
from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.load import load_device, standing_in
from planner.specs.model import (
    Architecture,
    ComputeKernel,
    DenseOptimizer,
    ModelSpec,
    Optimizers,
    SparseOptimizer,
    TableConstraints,
    TableGroup,
    WukongLayer,
)
from planner.specs.plan import DenseParallelism, MemoryPolicy, PoolPlan
from planner.specs.units import Dtype
from tests.planner.small_jobs import ROOMY_BYTES, Job

POOL = PoolSpec(name="p", device="little_h100", nodes=1, devices_per_node=4)
CLUSTER = ClusterSpec(name="one", pools=(POOL,))
FIELDS = 4


def wukong(hidden: int, layers: int, batch: int) -> ModelSpec:
    """Layers that are all alike: as many fields come out as go in."""
    return ModelSpec(
        name=f"wukong_{hidden}_{layers}_{batch}",
        description="",
        source="made up",
        arch=Architecture.WUKONG,
        global_batch=batch,
        dense_features=4,
        bottom_mlp=(8,),
        top_mlp=(8, 1),
        wukong_layers=(WukongLayer(lcb=2, fmb=2, compressed=2, fmb_mlp=(hidden, hidden)),) * layers,
        tables=tuple(
            TableGroup(name=f"t{index}", num_embeddings=100, embedding_dim=8)
            for index in range(FIELDS - 1)
        ),
        optimizer=Optimizers(
            dense=DenseOptimizer(name="adam", learning_rate=0.1),
            sparse=SparseOptimizer(name="sgd", learning_rate=0.1),
        ),
    )


def context(model: ModelSpec, way: DenseParallelism = "data_parallel") -> PoolContext:
    policy = MemoryPolicy(compute_precision=Dtype.FP32, dense_parallelism=way)
    device = Job(CLUSTER, model, ROOMY_BYTES).profiles[POOL.device]
    return PoolContext(POOL, device, model, model.global_batch // POOL.devices, policy)


def kept_bytes(ctx: PoolContext, **policy: object) -> int:
    changed = replace(ctx, policy=ctx.policy.model_copy(update=policy))
    return sum(base_memory_bytes(changed).values())


def planned(model: ModelSpec, device_bytes: int) -> PoolPlan:
    with standing_in(Job(CLUSTER, model, device_bytes).profiles):
        options = SearchOptions(mip_gap=0.0, kernels="vendor", matched=True)
        return plan_job(CLUSTER, model, options=options).pools["p"]


def test_of_equal_blocks_the_first_are_recomputed() -> None:
    choices = recompute_choices(context(wukong(64, 3, 64)))
    layers = {tuple(name for name in names if name.startswith("layer")) for names in choices}
    assert layers >= {(), ("layer_0",), ("layer_0", "layer_1")}
    assert layers <= {(), ("layer_0",), ("layer_0", "layer_1"), ("layer_0", "layer_1", "layer_2")}


def test_blocks_gathered_one_by_one_are_recomputed_in_any_subset() -> None:
    model = wukong(512, 3, 64)
    ctx = context(model, "fully_sharded")
    layers = {
        tuple(name for name in names if name.startswith("layer"))
        for names in recompute_choices(ctx)
    }
    first_alone = {(), ("layer_0",), ("layer_0", "layer_1"), ("layer_0", "layer_1", "layer_2")}
    assert layers - first_alone


def test_no_choice_is_dominated() -> None:
    ctx = context(wukong(64, 2, 64))
    kept = [kept_bytes(ctx, recompute=names) for names in recompute_choices(ctx)]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)


def test_a_few_parameters_are_not_worth_broadcasts() -> None:
    ctx = context(wukong(8, 1, 64))
    quick = quick_policies(ctx)
    assert {one.dense_parallelism for one in quick} == {"data_parallel", "fully_sharded"}
    plain = next(one for one in quick if one.dense_parallelism == "data_parallel")
    beside = {(one.dense_parallelism, one.prefetch_depth) for one in kinds_beside(ctx, plain)}
    ways = ("data_parallel", "sharded_optimizer")
    assert beside == {(way, depth) for way in ways for depth in (1, 2, 3)}


def test_depths_are_kinds_of_their_own_where_a_table_must_be_cached() -> None:
    model = wukong(8, 1, 64)
    cached = TableConstraints(compute_kernels=(ComputeKernel.FUSED_UVM_CACHING,))
    tables = (model.tables[0].model_copy(update={"constraints": cached}), *model.tables[1:])
    given = {name: getattr(model, name) for name in ModelSpec.model_fields}
    ctx = context(ModelSpec(**{**given, "name": "cached", "tables": tables}))
    assert {one.prefetch_depth for one in quick_policies(ctx)} == {2, 3}


def test_short_memory_shards_the_optimizer_then_everything() -> None:
    model = wukong(512, 4, 32)
    ctx = context(model)
    least = {"recompute": recomputable(model), "prefetch_depth": 1}
    whole, state, everything = (
        kept_bytes(ctx, dense_parallelism=way, **least)
        for way in ("data_parallel", "sharded_optimizer", "fully_sharded")
    )
    assert whole > state > everything
    tables_bytes = 100_000
    pool = planned(model, whole - 1)
    assert pool.policy.dense_parallelism != "data_parallel"
    pool = planned(model, everything + tables_bytes)
    assert state > everything + tables_bytes
    assert pool.policy.dense_parallelism == "fully_sharded"
    assert pool.memory_bytes[0]["total"] <= everything + tables_bytes


def test_short_memory_recomputes_no_more_than_it_must() -> None:
    model = wukong(64, 2, 4096)
    ctx = context(model)
    assert planned(model, ROOMY_BYTES).policy.recompute == ()
    ways: tuple[DenseParallelism, ...] = ("data_parallel", "sharded_optimizer", "fully_sharded")
    least = min(kept_bytes(ctx, dense_parallelism=way, prefetch_depth=1) for way in ways)
    policy = planned(model, least - 1).policy
    assert policy.recompute
    fewer = policy.recompute[1:]
    kept = policy.model_dump(include={"dense_parallelism", "prefetch_depth"})
    assert kept_bytes(ctx, recompute=fewer, **kept) > least - 1 or not fewer


@pytest.mark.parametrize("device", ["h200", "mi350x"])
def test_shipped_devices_are_faster_than_their_host(device: str) -> None:
    ctx = replace(context(wukong(8, 1, 64)), device=load_device(device))
    assert {one.prefetch_depth for one in quick_policies(ctx)} == {2}
