"""Fit positive constants without a solver library: multiplicative pattern search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parent.parent.parent / "shared" / "data"


def pattern_search(
    loss: Callable[[NDArray[np.float64]], float],
    start: NDArray[np.float64],
    first_step: float = 1.5,
    last_step: float = 1.005,
    random_directions: int = 0,
    tolerance: float = 0.0,
) -> NDArray[np.float64]:
    """Local minimum of ``loss`` over positive constants, by ever smaller factors.

    Tries one constant at a time, and in each round as many random directions as asked for (always
    the same ones), which find valleys that lie across the axes. The factor shrinks after a round
    that lowers the loss by no more than the share ``tolerance``.
    """
    random = np.random.default_rng(0)
    best, best_loss, step = start.copy(), loss(start), first_step
    while step > last_step:
        before = best_loss
        directions = [*np.eye(len(start)), *random.normal(size=(random_directions, len(start)))]
        for direction in directions:
            for sign in (1, -1):
                trial = best * step ** (sign * direction)
                trial_loss = loss(trial)
                if trial_loss < best_loss:
                    best, best_loss = trial, trial_loss
        if best_loss >= (1 - tolerance) * before:
            step = step**0.5
    return best


def mean_relative_error(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    """MAPE: mean of |predicted - measured| / measured."""
    return float(np.mean(np.abs(predicted - measured) / measured))
