"""Recompute per block: the same loss and gradients from fewer kept bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.cost.dense import recomputable
from planner.specs.errors import SpecError
from planner.specs.model import (
    TRAINABLE,
    Architecture,
    DcnInteraction,
    ModelSpec,
    NoInteraction,
)
from tests.trainers.jobs import model_of
from trainers.models.build import initialise_dense
from trainers.models.networks import build_network
from trainers.recompute import Recomputable, switch_recompute

BATCH = 8
_INTERACTION = {
    Architecture.DLRM_DCN: DcnInteraction(type="dcn_v2", num_layers=3, low_rank=4),
    Architecture.MLP_CONCAT: NoInteraction(type="none", stride=4),
}


def variant(arch: Architecture) -> ModelSpec:
    model = model_of()
    return model.model_copy(
        update={"arch": arch, "interaction": _INTERACTION.get(arch, model.interaction)}
    )


def switches(arch: Architecture) -> list[str]:
    children = build_network(variant(arch)).named_children()
    return [name for name, module in children if isinstance(module, Recomputable)]


BLOCKS = [(arch, name) for arch in sorted(TRAINABLE) for name in switches(arch)]


def step(network: nn.Module, model: ModelSpec) -> tuple[list[torch.Tensor], int]:
    """Loss, gradients of parameters and of the pooled rows; bytes kept for the backward pass."""
    torch.manual_seed(0)
    dense = torch.randn(BATCH, model.dense_features)
    pooled = torch.randn(BATCH, model.pooled_width, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = network(dense, lambda: pooled).square().mean()
    network.zero_grad()
    loss.backward()
    assert pooled.grad is not None
    gradients = [parameter.grad.clone() for parameter in network.parameters()]
    return [loss.detach(), pooled.grad, *gradients], sum(kept.values())


@pytest.mark.parametrize(("arch", "name"), BLOCKS)
def test_a_recomputed_block_computes_the_same_and_keeps_less(arch: Architecture, name: str) -> None:
    model = variant(arch)
    network = build_network(model).train()
    initialise_dense(network, seed=1)
    plain, kept = step(network, model)
    switch_recompute(network, (name,))
    again, kept_less = step(network, model)
    assert [x for x, m in network.named_children() if getattr(m, "recompute", False)] == [name]
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert kept_less < kept


@pytest.mark.parametrize("arch", sorted(TRAINABLE))
def test_the_cost_model_names_blocks_that_have_a_switch(arch: Architecture) -> None:
    named = recomputable(variant(arch))
    assert {"bottom", "top"} <= set(named) <= set(switches(arch))


def test_a_switch_goes_off_again() -> None:
    network = build_network(model_of())
    switch_recompute(network, ("bottom", "top"))
    switch_recompute(network, ("top",))
    assert (network.bottom.recompute, network.top.recompute) == (False, True)


def test_an_unknown_block_is_refused() -> None:
    with pytest.raises(SpecError, match="it has bottom, top") as error:
        switch_recompute(build_network(model_of()), ("top", "cross"))
    assert (error.value.field, error.value.value) == ("policy.recompute", "cross")
