"""Dense networks: dense features and pooled embeddings in, one logit per sample out.

Every network takes its embeddings as a callable: it computes its bottom MLP first and only then
waits for the pooled rows, so that their exchange overlaps with the bottom MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from planner.specs.errors import UsageError
from planner.specs.model import (
    TRAINABLE,
    Architecture,
    DcnInteraction,
    ModelSpec,
    NoInteraction,
)
from trainers.recompute import Recomputable

Embeddings = Callable[[], torch.Tensor]
"""Waits for the pooled rows: [batch, pooled width], features in the model's order."""


class Mlp(Recomputable):
    """Linear layers with ReLU between them, and after the last one if ``activate_last``."""

    def __init__(self, inputs: int, widths: Sequence[int], activate_last: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index, width in enumerate(widths):
            layers.append(nn.Linear(inputs, width))
            if activate_last or index < len(widths) - 1:
                layers.append(nn.ReLU())
            inputs = width
        self.layers = nn.Sequential(*layers)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, inputs] to [batch, last width]."""
        output: torch.Tensor = self.layers(x)
        return output


class CrossTail(nn.Linear):
    """The second half of a cross layer, with its elementwise tail."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, x0: torch.Tensor, xl: torch.Tensor
    ) -> torch.Tensor:
        """x_0 * (W x + b) + x_l: [batch, rank] and twice [batch, width] to [batch, width]."""
        return torch.addcmul(xl, x0, super().forward(x))


class CrossNetwork(Recomputable):
    """Low-rank DCNv2: x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l."""

    def __init__(self, width: int, interaction: DcnInteraction) -> None:
        super().__init__()
        rank = interaction.low_rank
        self.down = nn.ModuleList(
            nn.Linear(width, rank, bias=False) for _ in range(interaction.num_layers)
        )
        self.up = nn.ModuleList(CrossTail(rank, width) for _ in range(interaction.num_layers))

    def run(self, x0: torch.Tensor) -> torch.Tensor:
        """[batch, width] to the same shape."""
        x = x0
        for down, up in zip(self.down, self.up, strict=True):
            x = up(down(x), x0, x)
        return x


def _dense_width(model: ModelSpec) -> int:
    """Columns that the dense features add: the bottom MLP's, or the features themselves."""
    return model.bottom_mlp[-1] if model.bottom_mlp else model.dense_features


def _bottom(model: ModelSpec) -> nn.Module:
    if not model.bottom_mlp:
        return nn.Identity()
    return Mlp(model.dense_features, model.bottom_mlp, activate_last=True)


class PairwiseDots(torch.autograd.Function):
    """Dot products of the pairs of each sample's vectors.

    With V [vectors, dim], a sample's products are pairs of V V^T. Their gradient is S V, S the
    symmetric matrix with each pair's gradient in both of its places: one product, where autograd's
    own rule makes two (for V and for V^T) and adds them.
    """

    @staticmethod
    def forward(
        ctx: Any, vectors: torch.Tensor, pairs: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """[batch, vectors, dim] to [batch, pairs].

        Args:
            pairs: [pairs], each one's place in the flattened vectors x vectors matrix.
            places: [vectors * vectors], the pair in each place (on the diagonal, their number).
        """
        ctx.save_for_backward(vectors, places)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return products.index_select(1, pairs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        vectors, places = ctx.saved_tensors
        count = vectors.shape[1]
        none_on_diagonal = nn.functional.pad(gradient, (0, 1))
        symmetric = none_on_diagonal.index_select(1, places).view(-1, count, count)
        return torch.bmm(symmetric, vectors), None, None


class DlrmDot(nn.Module):
    """DLRM: dot products of all pairs of {bottom output, embeddings}, then the top MLP."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.dim = model.bottom_mlp[-1]
        vectors = model.pooled_width // self.dim + 1
        rows, columns = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", rows * vectors + columns, persistent=False)
        places = torch.full((vectors, vectors), len(rows))
        places[rows, columns] = places[columns, rows] = torch.arange(len(rows))
        self.register_buffer("places", places.view(-1), persistent=False)
        self.bottom = _bottom(model)
        self.top = Mlp(self.dim + len(rows), model.top_mlp, activate_last=False)

    def forward(self, dense: torch.Tensor, embeddings: Embeddings) -> torch.Tensor:
        """[batch, dense features] and pooled rows to [batch] logits."""
        bottom = self.bottom(dense)
        pooled = embeddings().to(bottom.dtype)
        vectors = torch.cat([bottom, pooled], dim=1).view(len(bottom), -1, self.dim)
        pairs = PairwiseDots.apply(vectors, self.pairs, self.places)
        return self.top(torch.cat([bottom, pairs], dim=1)).squeeze(1)


class DlrmDcn(nn.Module):
    """DLRM-DCNv2: cross layers over {bottom output, embeddings}, then the top MLP."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        width = _dense_width(model) + model.pooled_width
        assert isinstance(model.interaction, DcnInteraction)  # the spec's validator checked it
        self.bottom = _bottom(model)
        self.cross = CrossNetwork(width, model.interaction)
        self.top = Mlp(width, model.top_mlp, activate_last=False)

    def forward(self, dense: torch.Tensor, embeddings: Embeddings) -> torch.Tensor:
        """[batch, dense features] and pooled rows to [batch] logits."""
        bottom = self.bottom(dense)
        x0 = torch.cat([bottom, embeddings().to(bottom.dtype)], dim=1)
        return self.top(self.cross(x0)).squeeze(1)


class DeepFm(nn.Module):
    """DeepFM: linear in the dense features, plus second-order FM, plus an MLP over everything.

    The fields of the FM are the embeddings and, with a bottom MLP, its output.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.dim = model.all_tables[0].embedding_dim
        self.bottom = _bottom(model)
        self.dense_is_a_field = bool(model.bottom_mlp)
        self.linear = nn.Linear(model.dense_features, 1) if model.dense_features else None
        self.top = Mlp(_dense_width(model) + model.pooled_width, model.top_mlp, activate_last=False)

    def forward(self, dense: torch.Tensor, embeddings: Embeddings) -> torch.Tensor:
        """[batch, dense features] and pooled rows to [batch] logits."""
        bottom = self.bottom(dense)
        pooled = embeddings().to(bottom.dtype)
        everything = torch.cat([bottom, pooled], dim=1)
        fields = (everything if self.dense_is_a_field else pooled).view(len(pooled), -1, self.dim)
        # sum over pairs of <v_i, v_j> = (|sum v|^2 - sum |v|^2) / 2
        pair_sum = (fields.sum(1).square() - fields.square().sum(1)).sum(1) / 2
        logit = self.top(everything).squeeze(1) + pair_sum
        return logit if self.linear is None else logit + self.linear(dense).squeeze(1)


class MlpConcat(nn.Module):
    """An MLP over dense features and embeddings, these mean-pooled over windows of ``stride``."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        assert isinstance(model.interaction, NoInteraction)  # the spec's validator checked it
        self.stride = model.interaction.stride
        width = model.pooled_width
        if self.stride is not None:
            width = -(-width // self.stride)
        self.bottom = _bottom(model)
        self.top = Mlp(_dense_width(model) + width, model.top_mlp, activate_last=False)

    def forward(self, dense: torch.Tensor, embeddings: Embeddings) -> torch.Tensor:
        """[batch, dense features] and pooled rows to [batch] logits."""
        bottom = self.bottom(dense)
        pooled = embeddings().to(bottom.dtype)
        if self.stride is not None:
            pooled = nn.functional.avg_pool1d(
                pooled.unsqueeze(1), self.stride, ceil_mode=True
            ).squeeze(1)
        return self.top(torch.cat([bottom, pooled], dim=1)).squeeze(1)


_NETWORKS: dict[Architecture, type[nn.Module]] = {
    Architecture.DLRM_DOT: DlrmDot,
    Architecture.DLRM_DCN: DlrmDcn,
    Architecture.DEEPFM: DeepFm,
    Architecture.MLP_CONCAT: MlpConcat,
}


def build_network(model: ModelSpec) -> nn.Module:
    """The dense network of ``model``, uninitialised.

    Raises:
        UsageError: the architecture can only be planned.
    """
    if model.arch not in _NETWORKS:
        raise UsageError(
            f"model {model.name} can be planned but not trained",
            field="arch",
            value=model.arch.value,
            fix=f"train a model whose arch is one of {', '.join(sorted(TRAINABLE))}",
        )
    return _NETWORKS[model.arch](model)
