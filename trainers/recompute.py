"""Parts of a network that can compute their activations twice instead of keeping them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.specs.errors import SpecError


class Recomputable(nn.Module, ABC):
    """Drops its activations and computes them again in the backward pass if ``recompute``.

    A network's attribute of this kind bears the name of its block in the cost model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recompute = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``run``, its activations kept or not."""
        if self.recompute and self.training:
            # Nothing in it is random, and to read a GPU's random state is to wait for the GPU.
            output: torch.Tensor = checkpoint(
                self.run, x, use_reentrant=False, preserve_rng_state=False
            )
            return output
        return self.run(x)

    @abstractmethod
    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The part itself."""


def switch_recompute(network: nn.Module, names: Sequence[str]) -> None:
    """Have the children ``names`` of ``network`` recompute, and no others.

    Raises:
        SpecError: the network has no such block.
    """
    blocks = {name: m for name, m in network.named_children() if isinstance(m, Recomputable)}
    for name in names:
        if name not in blocks:
            raise SpecError(
                f"the network has no such block: it has {', '.join(blocks)}",
                field="policy.recompute",
                value=name,
                fix="make the plan again with hwplan plan --out",
            )
    for name, block in blocks.items():
        block.recompute = name in names
