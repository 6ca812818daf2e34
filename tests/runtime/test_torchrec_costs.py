"""TorchRec's formulas without TorchRec, against the installed torchrec's estimators; and the best
placement under them against its planner's."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torchrec")

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption

from planner.baselines.torchrec_costs import (
    TorchRecTable,
    TorchRecWay,
    shard_bytes,
    shard_seconds,
    torchrec_topology,
)
from planner.baselines.torchrec_ilp import column_shard_width, torchrec_optimum, torchrec_program
from planner.cost.context import PoolContext
from planner.evaluate import evaluate
from planner.ilp.solve import SolverOptions
from planner.specs.cluster import PoolSpec
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
EVERY_SHARDING = TableConstraints(sharding_types=tuple(ShardingType), min_partition=32)
GROUPS = (
    TableGroup(name="wide", num_embeddings=1_000_003, embedding_dim=256, pooling_factors=(30.0,)),
    TableGroup(name="two", num_embeddings=5_001, embedding_dim=128, pooling_factors=(10.0, 0.3)),
    TableGroup(name="middle", num_embeddings=70_001, embedding_dim=64, pooling_factors=(1.5,)),
    TableGroup(name="narrow", num_embeddings=997, embedding_dim=16),
    TableGroup(name="tiny", num_embeddings=3, embedding_dim=128),
    TableGroup(
        name="grid",
        num_embeddings=4_099,
        embedding_dim=128,
        pooling_factors=(7.0,),
        constraints=EVERY_SHARDING,
    ),
)


def model_with(groups: tuple[TableGroup, ...], optimizer: str, weights: Dtype) -> ModelSpec:
    small = load_model("dlrm_criteo_small").model_dump()
    small["optimizer"]["sparse"]["name"] = optimizer
    small["precision"]["embeddings"] = (weights,)
    changes = {"arch": Architecture.MLP_CONCAT, "interaction": {"type": "none"}}
    tables = tuple(group.model_dump() for group in groups)
    return ModelSpec.model_validate(small | changes | {"tables": tables})


def context(
    nodes: int,
    per_node: int,
    groups: tuple[TableGroup, ...] = GROUPS,
    optimizer: str = "rowwise_adagrad",
    weights: Dtype = Dtype.FP32,
    device: str = "h100",
) -> PoolContext:
    pool = PoolSpec(name="pool", device=device, nodes=nodes, devices_per_node=per_node)
    job = model_with(groups, optimizer, weights).model_copy(
        update={"global_batch": 1000 * pool.devices}
    )
    policy = MemoryPolicy(compute_precision=Dtype.FP32)
    return PoolContext(pool, load_device(device), job, 1000, policy)


def its_options(ctx: PoolContext) -> list[ShardingOption]:
    pool = _Pool(ctx)
    holder = torch.nn.Module()
    holder.add_module(MODULE, pool.module)
    enumerator = EmbeddingEnumerator(pool.topology, ctx.local_batch, pool.constraints)
    return enumerator.enumerate(holder, [EmbeddingBagCollectionSharder()])


@pytest.mark.parametrize(
    ("nodes", "per_node", "optimizer", "weights", "device"),
    [
        (1, 4, "rowwise_adagrad", Dtype.FP32, "h100"),
        (2, 4, "adagrad", Dtype.FP32, "h100"),
        (3, 2, "adam", Dtype.FP16, "mi350x"),
        (1, 2, "sgd", Dtype.FP32, "cpu"),
    ],
)
def test_every_shard_costs_what_its_estimators_say(
    nodes: int, per_node: int, optimizer: str, weights: Dtype, device: str
) -> None:
    groups = GROUPS if device != "cpu" else GROUPS[:-1]
    ctx = context(nodes, per_node, groups, optimizer, weights, device)
    topology = torchrec_topology(ctx)
    tables = {table.name: table for table in ctx.model.all_tables}
    seen: set[tuple[str, str]] = set()
    for option in its_options(ctx):
        kind = option.sharding_type.replace("table_column_wise", "column_wise")
        table = TorchRecTable(tables[option.name], weights.bytes, optimizer, ctx.local_batch)
        kernel = ComputeKernel(option.compute_kernel)
        seen.add((kind, option.compute_kernel))
        for shard in option.shards:
            way = TorchRecWay(ShardingType(kind), kernel, *shard.size)
            ours_ms = shard_seconds(topology, table, way) * 1e3
            assert ours_ms == pytest.approx(shard.perf.total, rel=1e-9)
            storage = shard.storage
            assert shard_bytes(topology, table, way) == (storage.hbm, storage.ddr)
    if device != "cpu":
        uvm = (ComputeKernel.FUSED, ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING)
        cut = [kind for kind in ShardingType if kind is not ShardingType.DATA_PARALLEL]
        every = {(kind.value, kernel.value) for kind in cut for kernel in uvm}
        assert seen == every | {("data_parallel", "dense")}


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 4)])
def test_the_program_holds_all_its_options(nodes: int, per_node: int) -> None:
    """Each of its options has a counterpart with equal times and the largest shard's memory."""
    ctx = context(nodes, per_node)
    program = torchrec_program(ctx)
    ours = {
        (name, option.sharding_type.value, option.compute_kernel.value): [
            (piece.owner.lookup_forward_s * 1e3, piece.owner.hbm_bytes, piece.owner.host_bytes)
            for piece in option.pieces
        ]
        for group in program.classes
        for name in group.tables
        for option in group.options
    }
    for option in its_options(ctx):
        kind = option.sharding_type.replace("table_column_wise", "column_wise")
        if kind == "column_wise" and len(option.shards) == 1:
            kind = "table_wise"
        if kind == "table_row_wise" and nodes == 1 and option.name != "grid":
            kind = "row_wise"
        pieces = ours[option.name, kind, option.compute_kernel]
        assert pieces[0][0] == pytest.approx(max(s.perf.total for s in option.shards), rel=1e-9)
        assert pieces[0][1] == max(shard.storage.hbm for shard in option.shards)
        assert pieces[0][2] == max(shard.storage.ddr for shard in option.shards)
        if kind in ("table_wise", "column_wise"):
            assert len(pieces) == len(option.shards)


def test_column_shards_are_its_own() -> None:
    assert column_shard_width(256, 128) == 128
    assert column_shard_width(128, 128) == 128
    assert column_shard_width(96, 20) == 24
    assert column_shard_width(100, 28) == 100


@pytest.mark.parametrize(("nodes", "room"), [(1, 1.0), (2, 1.0), (2, 0.009)])
def test_never_rated_worse_than_its_planner_and_above_the_bound(nodes: int, room: float) -> None:
    """Also where memory is short: ``room`` scales an H100's 80 GB to 0.7 GB, with the context."""
    groups = (
        *GROUPS[:5],
        TableGroup(name="big", num_embeddings=2_000_000, embedding_dim=128, count=5),
    )
    ctx = context(nodes, 4, groups)
    memory = ctx.device.memory
    changes = {
        name: getattr(memory, name).model_copy(update={"value": getattr(memory, name).value * room})
        for name in ("hbm_bytes", "context_bytes")
    }
    device = ctx.device.model_copy(update={"memory": memory.model_copy(update=changes)})
    ctx = replace(ctx, device=device)
    theirs = torchrec_cost(ctx, _plan(ctx, dict(torchrec_placements(ctx, LIMIT_S).placements)))
    found = torchrec_optimum(ctx, SolverOptions(mip_gap=0.005, time_limit_s=20.0))
    assert found.placements is not None
    ours = torchrec_cost(ctx, _plan(ctx, found.placements))
    assert ours.fits
    assert ours.step_ms == pytest.approx(found.rating_s * 1e3, rel=1e-9)
    assert ours.step_ms <= theirs.step_ms * (1 + 1e-9)
    assert found.bound_s * 1e3 <= ours.step_ms * (1 + 1e-9)
    assert found.gap <= 0.05
    if room < 1:
        kernels = {placement.compute_kernel for placement in found.placements.values()}
        assert kernels > {ComputeKernel.FUSED}, "the room is short enough to matter"


def _plan(ctx: PoolContext, placements: dict[str, Placement]) -> PoolPlan:
    return evaluate({"pool": ctx}, {"pool": placements}).pools["pool"]
