"""TorchRec's own planner on a pool, and its cost model for anybody's placements."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torchrec")

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

from planner.baselines.league import OtherCost, Placed, Standing, leagues
from planner.cost.context import PoolContext
from planner.evaluate import evaluate
from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.errors import InfeasibleError
from planner.specs.load import load_device, load_model
from planner.specs.model import (
    Architecture,
    ComputeKernel,
    ModelSpec,
    ShardingType,
    TableConstraints,
    TableGroup,
)
from planner.specs.plan import MemoryPolicy, Placement, PoolPlan
from planner.specs.units import Dtype
from runtime.torchrec_planner import MODULE, _Pool, torchrec_cost, torchrec_placements

LIMIT_S = 60.0
TABLES = (
    TableGroup(name="user", num_embeddings=2_000_000, embedding_dim=128, pooling_factors=(30.0,)),
    TableGroup(name="item", num_embeddings=500_000, embedding_dim=128, pooling_factors=(10.0, 2.0)),
    TableGroup(name="kind", num_embeddings=3, embedding_dim=128),
    TableGroup(name="other", num_embeddings=40_000, embedding_dim=64, count=3),
)


def model_with(*groups: TableGroup) -> ModelSpec:
    small = load_model("dlrm_criteo_small").model_dump()
    changes = {"arch": Architecture.MLP_CONCAT, "interaction": {"type": "none"}}
    tables = tuple(group.model_dump() for group in groups)
    return ModelSpec.model_validate(small | changes | {"tables": tables})


def context(
    groups: tuple[TableGroup, ...] = TABLES, nodes: int = 1, per_node: int = 4, device: str = "h100"
) -> PoolContext:
    pool = PoolSpec(name="pool", device=device, nodes=nodes, devices_per_node=per_node)
    model = model_with(*groups)
    job = model.model_copy(update={"global_batch": 1024 * pool.devices})
    policy = MemoryPolicy(compute_precision=Dtype.FP32)
    return PoolContext(pool, load_device(device), job, 1024, policy)


def pool_plan(ctx: PoolContext, placements: dict[str, Placement]) -> PoolPlan:
    return evaluate({"pool": ctx}, {"pool": placements}).pools["pool"]


def on_rank(ctx: PoolContext, rank: int) -> dict[str, Placement]:
    return {
        table.name: Placement(
            sharding_type=ShardingType.TABLE_WISE,
            compute_kernel=ComputeKernel.FUSED,
            data_type=Dtype.FP32,
            ranks=(rank,),
        )
        for table in ctx.model.all_tables
    }


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 2)])
def test_its_plan_under_our_model_and_ours_under_its(nodes: int, per_node: int) -> None:
    pool = PoolSpec(name="pool", device="h100", nodes=nodes, devices_per_node=per_node)
    cluster = ClusterSpec(name="c", pools=(pool,), reference_device="h100")
    (found,) = leagues(
        cluster,
        model_with(*TABLES),
        4 * 16384,
        placers={"torchrec": lambda ctx: torchrec_placements(ctx, LIMIT_S)},
        rate=torchrec_cost,
    )
    ours = found.standings[0]
    theirs = next(one for one in found.standings if one.planner == "torchrec")
    assert theirs.fits and theirs.step_ms is not None
    assert theirs.step_ms >= found.lower_bound_ms * (1 - 1e-9)
    assert all(_rated(standing).step_ms > 0 for standing in found.standings)
    # Its planner looks at its own costs: nobody in turn or by rows does better there.
    for name in ("table_wise", "row_wise", "size_balanced"):
        other = next(one for one in found.standings if one.planner == name)
        assert _rated(theirs).step_ms <= _rated(other).step_ms * (1 + 1e-9)
    assert _rated(ours).fits and _rated(theirs).fits


def _rated(standing: Standing) -> OtherCost:
    assert standing.other is not None
    return standing.other


def test_cost_of_its_own_plan_is_its_enumerators() -> None:
    """The shards that we make of a converted plan cost what TorchRec's own shards cost."""
    ctx = context(nodes=2, per_node=2)
    placed = torchrec_placements(ctx, LIMIT_S)
    assert isinstance(placed, Placed) and not placed.note
    ours = torchrec_cost(ctx, pool_plan(ctx, dict(placed.placements)))
    pool = _Pool(ctx)
    holder = torch.nn.Module()
    holder.add_module(MODULE, pool.module)
    options = EmbeddingEnumerator(pool.topology, ctx.local_batch, pool.constraints).enumerate(
        holder, [EmbeddingBagCollectionSharder()]
    )
    times = [0.0] * ctx.ranks
    for name, placement in placed.placements.items():
        option = next(
            option
            for option in options
            if option.name == name
            and option.sharding_type == placement.sharding_type.value
            and option.compute_kernel == placement.compute_kernel.value
        )
        assert len(option.shards) == len(placement.ranks)
        for rank, shard in zip(placement.ranks, option.shards, strict=True):
            times[rank] += shard.perf.total
    assert ours.step_ms == pytest.approx(max(times), rel=1e-12)


def test_cost_of_one_table_by_hand() -> None:
    """Table-wise on 4 ranks of one node: its formula, bandwidths as the profile has them."""
    ids, rows, dim = 7.0, 100_000, 128
    group = TableGroup(name="t", num_embeddings=rows, embedding_dim=dim, pooling_factors=(ids,))
    ctx = context((group,))
    samples = 4 * 1024
    hbm_per_ms = ctx.device.memory.hbm_bytes_per_s.value / 1e3
    link_per_ms = ctx.device.scale_up.bytes_per_s.value / 1e3
    looked_up = 8 * ids * samples + ids * samples * dim * 4
    pooled = samples * dim * 4
    compute_ms = 3 * (looked_up + pooled) / hbm_per_ms  # the backward pass counts twice
    cost = torchrec_cost(ctx, pool_plan(ctx, on_rank(ctx, 2)))
    assert cost.step_ms == pytest.approx(compute_ms + 2 * pooled / link_per_ms, rel=1e-6)
    assert cost.fits


def test_memory_counts_weights_of_every_precision() -> None:
    group = TableGroup(name="t", num_embeddings=120_000_000, embedding_dim=128, count=1)
    ctx = context((group,))
    whole = on_rank(ctx, 0)
    half = {"t": whole["t"].model_copy(update={"data_type": Dtype.FP16})}
    # 61 GB of fp32 weights fit an H100; with a second table they do not, halved they do.
    assert torchrec_cost(ctx, pool_plan(ctx, whole)).fits
    two = context((group.model_copy(update={"count": 2}),))
    both = on_rank(two, 0)
    halves = {n: p.model_copy(update={"data_type": Dtype.FP16}) for n, p in both.items()}
    assert not torchrec_cost(two, pool_plan(two, both)).fits
    assert torchrec_cost(two, pool_plan(two, halves)).fits
    assert torchrec_cost(ctx, pool_plan(ctx, half)).fits


def test_every_sharding_of_a_plan_has_a_cost() -> None:
    group = TableGroup(name="t", num_embeddings=10_000, embedding_dim=128)
    ctx = context((group,), nodes=2, per_node=2)
    ways: dict[ShardingType, dict[str, object]] = {
        ShardingType.TABLE_WISE: {"ranks": (3,)},
        ShardingType.COLUMN_WISE: {"ranks": (3, 0, 3), "column_widths": (48, 40, 40)},
        ShardingType.ROW_WISE: {"ranks": (0, 1, 2, 3)},
        ShardingType.TABLE_ROW_WISE: {"ranks": (2, 3)},
        ShardingType.GRID_SHARD: {"ranks": (0, 1, 2, 3), "column_widths": (64, 64)},
        ShardingType.DATA_PARALLEL: {
            "ranks": (0, 1, 2, 3),
            "compute_kernel": ComputeKernel.DENSE,
        },
    }
    base = on_rank(ctx, 0)["t"].model_dump()
    costs = {}
    for kind, changes in ways.items():
        placement = Placement.model_validate(base | {"sharding_type": kind} | changes)
        costs[kind] = torchrec_cost(ctx, pool_plan(ctx, {"t": placement})).step_ms
    assert len({round(cost, 9) for cost in costs.values()}) == len(ways)


def test_constraints_reach_its_planner_and_its_words_are_ours() -> None:
    def only(*kinds: ShardingType, least: int | None = None) -> TableConstraints:
        return TableConstraints(sharding_types=kinds, min_partition=least)

    groups = (
        TableGroup(
            name="columns",
            num_embeddings=1000,
            embedding_dim=128,
            constraints=only(ShardingType.COLUMN_WISE, least=32),
        ),
        TableGroup(
            name="one_column",
            num_embeddings=1000,
            embedding_dim=128,
            constraints=only(ShardingType.COLUMN_WISE),
        ),
        TableGroup(
            name="grid",
            num_embeddings=1000,
            embedding_dim=128,
            constraints=only(ShardingType.GRID_SHARD, least=64),
        ),
        TableGroup(
            name="host",
            num_embeddings=1000,
            embedding_dim=128,
            constraints=TableConstraints(compute_kernels=(ComputeKernel.FUSED_UVM_CACHING,)),
        ),
    )
    ctx = context(groups, nodes=2, per_node=2)
    found = torchrec_placements(ctx, LIMIT_S).placements
    assert found["columns"].sharding_type is ShardingType.COLUMN_WISE
    assert found["columns"].column_widths == (32, 32, 32, 32)
    assert found["one_column"].sharding_type is ShardingType.TABLE_WISE
    assert found["grid"].sharding_type is ShardingType.GRID_SHARD
    assert found["grid"].column_widths == (64, 64) and len(found["grid"].ranks) == 4
    assert found["host"].compute_kernel is ComputeKernel.FUSED_UVM_CACHING
    assert found["host"].cache_load_factor == 0.2
    assert pool_plan(ctx, dict(found)).placements == found


def test_what_it_cannot_place_is_a_typed_error() -> None:
    huge = TableGroup(name="huge", num_embeddings=3_000_000_000, embedding_dim=128, count=4)
    with pytest.raises(InfeasibleError, match="insufficient storage"):
        torchrec_placements(context((huge,), per_node=2), LIMIT_S)
    rows = TableConstraints(sharding_types=(ShardingType.ROW_WISE,))
    on_cpu = TableGroup(name="t", num_embeddings=100, embedding_dim=64, constraints=rows)
    with pytest.raises(InfeasibleError, match="No available sharding type"):
        torchrec_placements(context((on_cpu,), device="cpu"), LIMIT_S)


def test_cpu_pool() -> None:
    ctx = context(TABLES[2:], device="cpu")
    ctx = replace(ctx, pool=ctx.pool.model_copy(update={"cpu_cores": (0, 1)}))
    found = torchrec_placements(ctx, LIMIT_S).placements
    assert set(found) == {table.name for table in ctx.model.all_tables}
    assert torchrec_cost(ctx, pool_plan(ctx, dict(found))).fits
