"""Networks against their formulas, policies, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.shards import check_placements, extents
from planner.specs.errors import SpecError, UsageError
from planner.specs.load import load_model
from planner.specs.model import DcnInteraction, ModelSpec, NoInteraction, TableGroup
from planner.specs.plan import MemoryPolicy, Placement
from planner.specs.units import Dtype
from tests.trainers.jobs import model_of, place, plan_of, rank_env, whole_on_rank_0
from trainers.data.source import Slice, open_source
from trainers.loop import Stepper
from trainers.models.build import initialise_dense
from trainers.models.networks import build_network
from trainers.policy import FP16_LOSS_SCALE, ComputePolicy, communication_codecs
from trainers.setup import set_up
from trainers.task import TrainTask

MODEL = model_of()
BATCH = 6


def variant(**changes: object) -> ModelSpec:
    return MODEL.model_copy(update=changes)


def run(model: ModelSpec) -> tuple[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A network, its inputs and its logits."""
    torch.manual_seed(0)
    network = build_network(model)
    initialise_dense(network, seed=1)
    dense = torch.randn(BATCH, model.dense_features)
    pooled = torch.randn(BATCH, model.pooled_width)
    return network, dense, pooled, network(dense, lambda: pooled)


def test_dlrm_dot() -> None:
    network, dense, pooled, logits = run(MODEL)
    bottom = network.bottom.layers(dense)
    vectors = torch.cat([bottom, pooled], 1).view(BATCH, -1, 16)
    pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(5) for j in range(i)]
    expected = network.top.layers(torch.cat([bottom, torch.stack(pairs, 1)], 1)).squeeze(1)
    torch.testing.assert_close(logits, expected)


def test_dlrm_dcn() -> None:
    cross = DcnInteraction(type="dcn_v2", num_layers=2, low_rank=3)
    network, dense, pooled, logits = run(variant(arch="dlrm_dcn", interaction=cross))
    x0 = x = torch.cat([network.bottom.layers(dense), pooled], 1)
    for down, up in zip(network.cross.down, network.cross.up, strict=True):
        x = x0 * (x @ down.weight.T @ up.weight.T + up.bias) + x
    torch.testing.assert_close(logits, network.top.layers(x).squeeze(1))


def test_deepfm() -> None:
    model = variant(arch="deepfm", interaction=NoInteraction(), bottom_mlp=())
    network, dense, pooled, logits = run(model)
    fields = pooled.view(BATCH, -1, 16)
    pairs = [(fields[:, i] * fields[:, j]).sum(1) for i in range(4) for j in range(i)]
    expected = (
        network.linear(dense).squeeze(1)
        + torch.stack(pairs).sum(0)
        + network.top.layers(torch.cat([dense, pooled], 1)).squeeze(1)
    )
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stride", [None, 10, 16])
def test_mlp_concat(stride: int | None) -> None:
    model = variant(arch="mlp_concat", interaction=NoInteraction(stride=stride), bottom_mlp=())
    network, dense, pooled, logits = run(model)
    if stride is not None:
        pooled = torch.stack([part.mean(1) for part in pooled.split(stride, 1)], 1)
    expected = network.top.layers(torch.cat([dense, pooled], 1)).squeeze(1)
    torch.testing.assert_close(logits, expected)


def test_embeddings_are_awaited_after_the_bottom_mlp() -> None:
    network, events = build_network(MODEL), []
    network.bottom.register_forward_hook(lambda *_: events.append("bottom"))

    def embeddings() -> torch.Tensor:
        events.append("embeddings")
        return torch.zeros(2, MODEL.pooled_width)

    network(torch.zeros(2, MODEL.dense_features), embeddings)
    assert events == ["bottom", "embeddings"]


def test_an_untrainable_architecture_is_refused() -> None:
    with pytest.raises(UsageError, match="planned but not trained") as error:
        build_network(load_model("wukong_criteo"))
    assert "dlrm_dcn" in error.value.fix


def train(policy: MemoryPolicy, model: ModelSpec = MODEL, **placements: Placement) -> torch.Tensor:
    """All weights after three steps on one rank."""
    placed = {**whole_on_rank_0(model), **placements}
    plan = plan_of({"p": (1, 64, placed)}, model, policy=policy)
    rank = rank_env(plan, 0)
    trainable = set_up(plan, rank, seed=0)
    source = open_source(TrainTask(plan, steps=3))
    stepper = Stepper(trainable, rank, source.train_batches(Slice(0, 64)))
    trainable.model.train()
    for _ in range(3):
        stepper.step()
    dense = [p.detach().view(-1) for p in trainable.model.module.head.parameters()]
    return torch.cat([*dense, *(s.weight.float().reshape(-1) for s in trainable.shards)])


def test_policies_change_precision_and_nothing_else(world_of_one: None) -> None:
    plain = train(MemoryPolicy(compute_precision=Dtype.FP32))
    again = train(MemoryPolicy(compute_precision=Dtype.FP32, recompute=("bottom", "top")))
    assert torch.equal(plain, again)
    for precision in (Dtype.BF16, Dtype.FP16):
        low = train(MemoryPolicy(compute_precision=precision))
        error = float((low - plain).abs().max())
        assert 0 < error < 5e-3, precision
    half = train(
        MemoryPolicy(compute_precision=Dtype.FP32), c=place("table_wise", 0, dtype=Dtype.FP16)
    )
    assert 0 < float((half - plain).abs().max()) < 1e-3


def test_loss_scale_is_for_fp16_alone() -> None:
    assert ComputePolicy(Dtype.FP16).loss_scale == FP16_LOSS_SCALE
    assert ComputePolicy(Dtype.BF16).loss_scale == ComputePolicy().loss_scale == 1.0
    x = torch.ones(2, requires_grad=True)
    ComputePolicy(Dtype.FP16).unscale_gradient(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1 / FP16_LOSS_SCALE] * 2


def test_fp8_is_refused() -> None:
    with pytest.raises(UsageError, match="planned but not trained"):
        ComputePolicy.of(MemoryPolicy(compute_precision=Dtype.FP8))


def test_communication_codecs() -> None:
    cpu = torch.device("cpu")
    fp32 = MemoryPolicy(compute_precision=Dtype.FP32)
    assert communication_codecs(fp32, cpu) is None
    half = fp32.model_copy(update={"communication_precision": Dtype.FP16})
    assert communication_codecs(half, cpu)


def test_adam_on_cpu_is_refused(world_of_one: None) -> None:
    with pytest.raises(UsageError, match="no such optimizer") as error:
        train(MemoryPolicy(compute_precision=Dtype.FP32), model_of(sparse="adam"))
    assert "rowwise_adagrad" in error.value.fix


def test_dense_adam(world_of_one: None) -> None:
    policy = MemoryPolicy(compute_precision=Dtype.FP32)
    weights = train(policy, model_of("adagrad", "adam", rate=0.001))
    assert bool(weights.isfinite().all())


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (place("table_wise", 4), "not in a pool of 4"),
        (place("table_wise", 0, 1), "lives on one rank"),
        (place("column_wise", 0, 1, widths=(11, 5)), "multiples of 4"),
        (place("column_wise", 0, 1, widths=(8, 4)), "do not add up to 16"),
        (place("column_wise", 0, widths=(8, 8)), "one rank per column shard"),
        (place("row_wise", 0, 1), "all ranks of the pool"),
        (place("row_wise", 0, 1, 2, 3, widths=(16,)), "only to them"),
        (place("table_row_wise", 1, 2), "whole nodes"),
        (place("grid_shard", 0, 1, widths=(8, 8)), "one node per column shard"),
    ],
)
def test_placement_rules(placement: Placement, message: str) -> None:
    placements = {**whole_on_rank_0(MODEL), "c": placement}
    plan = plan_of({"p": (4, 64, placements)}, MODEL, node_size=2)
    with pytest.raises(SpecError, match=message) as error:
        check_placements(plan, "p")
    assert error.value.field == "pools.p.placements.c"


def test_missing_and_empty_placements() -> None:
    placements = whole_on_rank_0(MODEL)
    missing = plan_of({"p": (1, 64, {k: v for k, v in placements.items() if k != "a"})}, MODEL)
    with pytest.raises(SpecError, match="table a has no placement"):
        check_placements(missing, "p")
    table = TableGroup(name="t", num_embeddings=3, embedding_dim=16)
    # model_copy would keep the cached expansion of the old tables.
    tiny = ModelSpec(
        **{n: getattr(MODEL, n) for n in ModelSpec.model_fields} | {"tables": (table,)}
    )
    plan = plan_of({"p": (4, 64, {"t": place("row_wise", 0, 1, 2, 3)})}, tiny)
    with pytest.raises(SpecError, match="no row of any row-wise table"):
        check_placements(plan, "p")


def test_extents_tile_every_table() -> None:
    cases = [
        place("table_wise", 2),
        place("row_wise", 0, 1, 2, 3),
        place("column_wise", 1, 1, 0, widths=(4, 8, 4)),
        place("table_row_wise", 2, 3),
        place("grid_shard", 2, 3, 0, 1, widths=(4, 12)),
    ]
    for table in MODEL.all_tables:
        for placement in cases:
            plan = plan_of({"p": (4, 64, {table.name: placement})}, MODEL, node_size=2)
            covered = torch.zeros(table.num_embeddings, table.embedding_dim)
            for e in extents(table, placement, plan.pools["p"]):
                covered[e.row : e.row + e.rows, e.column : e.column + e.columns] += 1
            assert bool((covered == 1).all()), placement
