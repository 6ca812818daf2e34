"""Metrics against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from trainers.metrics import quality


def test_hand_worked() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0])
    found = quality(logits, labels)
    p = [1 / (1 + math.exp(-x)) for x in logits.tolist()]
    loss = -(math.log(p[0]) + math.log(1 - p[1]) + math.log(p[2]) + math.log(1 - p[3])) / 4
    assert found.loss == pytest.approx(loss)
    assert found.auc == pytest.approx(0.75)  # three of the four pairs are in order
    assert found.ne == pytest.approx(loss / math.log(2))
    assert found.calibration == pytest.approx(sum(p) / 4 / 0.5)


def test_ties_count_half_and_saturated_logits_still_rank() -> None:
    assert quality(torch.zeros(4), torch.tensor([1.0, 0.0, 1.0, 0.0])).auc == pytest.approx(0.5)
    logits = torch.tensor([60.0, 50.0, 70.0, 40.0])
    assert quality(logits, torch.tensor([1.0, 0.0, 1.0, 0.0])).auc == pytest.approx(1.0)


def test_undefined() -> None:
    one_class = quality(torch.zeros(3), torch.ones(3))
    assert one_class.auc is None and one_class.ne is None and one_class.loss is not None
    assert quality(torch.empty(0), torch.empty(0)).loss is None
