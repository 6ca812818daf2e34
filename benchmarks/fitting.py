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
) -> NDArray[np.float64]:
    """Local minimum of ``loss`` over positive constants, one at a time, by ever smaller factors."""
    best, best_loss, step = start.copy(), loss(start), first_step
    while step > last_step:
        improved = False
        for index in range(len(best)):
            for factor in (step, 1 / step):
                trial = best.copy()
                trial[index] *= factor
                trial_loss = loss(trial)
                if trial_loss < best_loss:
                    best, best_loss, improved = trial, trial_loss, True
        if not improved:
            step = step**0.5
    return best


def mean_relative_error(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    """MAPE: mean of |predicted - measured| / measured."""
    return float(np.mean(np.abs(predicted - measured) / measured))
