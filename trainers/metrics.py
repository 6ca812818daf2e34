"""Quality of predictions, exact, over all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchmetrics.functional.classification import binary_auroc


@dataclass(frozen=True)
class Quality:
    """Of a set of predictions; None where it is undefined."""

    samples: int
    loss: float | None
    auc: float | None
    ne: float | None
    calibration: float | None


def quality(logits: torch.Tensor, labels: torch.Tensor) -> Quality:
    """Loss (mean cross entropy), AUC, normalised entropy and calibration.

    Args:
        logits, labels: [samples]; labels 0 or 1.
    """
    count = len(labels)
    if count == 0:
        return Quality(0, None, None, None, None)
    logits, labels = logits.double(), labels.double()
    loss = float(torch.nn.functional.binary_cross_entropy_with_logits(logits, labels))
    rate = float(labels.mean())
    if rate in (0.0, 1.0):
        return Quality(count, loss, None, None, None)
    # Ranks of logits, not of sigmoids: those tie in float where logits still differ.
    order = torch.unique(logits, return_inverse=True)[1].double() / count
    entropy = -(rate * math.log(rate) + (1.0 - rate) * math.log(1.0 - rate))
    return Quality(
        samples=count,
        loss=loss,
        auc=float(binary_auroc(order, labels.long())),
        ne=loss / entropy,
        calibration=float(torch.sigmoid(logits).mean()) / rate,
    )


def gather(local: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Rows of all ranks in rank order, on every rank (host memory, gloo).

    Args:
        local: [own size, ...].
        sizes: every rank's number of rows.
    """
    longest = max(sizes)
    padded = torch.zeros((longest, *local.shape[1:]), dtype=local.dtype)
    padded[: len(local)] = local.cpu()
    received = torch.empty((len(sizes) * longest, *local.shape[1:]), dtype=local.dtype)
    dist.all_gather_into_tensor(received, padded, group=group)
    parts = received.view(len(sizes), longest, *local.shape[1:])
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
