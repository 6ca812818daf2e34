"""The memory policy of a pool, applied: compute precision, recompute, communication precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)

from planner.specs.errors import UsageError
from planner.specs.plan import MemoryPolicy
from planner.specs.units import Dtype

FP16_LOSS_SCALE = 1024.0
"""Static: the fused embedding optimizers run inside backward, before a dynamic scale could tell."""

_AUTOCAST = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}


class _ScaleGradient(torch.autograd.Function):
    """Identity forward; the gradient times ``factor`` backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


@dataclass(frozen=True)
class ComputePolicy:
    """How the dense network computes."""

    precision: Dtype = Dtype.FP32
    recompute: tuple[str, ...] = ()
    """Blocks of the network whose activations are computed again."""

    @classmethod
    def of(cls, policy: MemoryPolicy) -> ComputePolicy:
        """From a pool's plan.

        Raises:
            UsageError: a precision that no trainer offers.
        """
        if policy.compute_precision not in (Dtype.FP32, Dtype.TF32, *_AUTOCAST):
            raise UsageError(
                "this compute precision can be planned but not trained",
                field="policy.compute_precision",
                value=policy.compute_precision.value,
                fix="leave it out of the model's precision.compute and plan again",
            )
        return cls(policy.compute_precision, policy.recompute)

    @property
    def loss_scale(self) -> float:
        """fp16 gradients underflow unscaled; the other formats have fp32's range."""
        return FP16_LOSS_SCALE if self.precision is Dtype.FP16 else 1.0

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Context of the network's forward pass."""
        if self.precision not in _AUTOCAST:
            return nullcontext()
        return torch.autocast(device.type, dtype=_AUTOCAST[self.precision])

    def unscale_gradient(self, pooled: torch.Tensor) -> torch.Tensor:
        """Takes the loss scale off the embeddings' gradient: fused optimizers use it as it is."""
        if self.loss_scale == 1.0:
            return pooled
        scaled: torch.Tensor = _ScaleGradient.apply(pooled, 1.0 / self.loss_scale)
        return scaled

    def apply_matmul_precision(self) -> None:
        """TF32 only where it was planned (process-wide: one rank is one process)."""
        torch.set_float32_matmul_precision("high" if self.precision is Dtype.TF32 else "highest")


def communication_codecs(policy: MemoryPolicy, device: torch.device) -> dict[str, Any] | None:
    """TorchRec's codecs for pooled rows and their gradients inside the pool; None for fp32."""
    if policy.communication_precision is Dtype.FP32:
        return None
    precision = {Dtype.FP16: CommType.FP16, Dtype.BF16: CommType.BF16}[
        policy.communication_precision
    ]
    codecs: dict[str, Any] | None = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=precision, backward_precision=precision), device=device
    )
    return codecs
