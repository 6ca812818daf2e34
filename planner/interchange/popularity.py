"""The Zipf exponent that explains how often ids repeat in NeuroShard's batches.

``bin_j`` is the share, among the distinct ids of a batch of ``BATCH`` samples, of those that occur
``2^(j-1) < count <= 2^j`` times (``bin_0``: once; the last bin: more than 2^15 times). Under a Zipf
law with exponent s, rank i of R rows is drawn ``lambda_i = BATCH * pooling * i^-s / H(R, s)`` times
on average, and its count is Poisson. The expected bins are

    b_j(s) ~ sum_i P(2^(j-1) < Poisson(lambda_i) <= 2^j)

normalised to sum 1. The exponent is the one of ``EXPONENTS`` with the smallest cross entropy
``-sum_j bin_j log b_j(s)``, that is the most likely one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.cost.zipf import popularity_bins

BATCH = 65_536
"""Samples of the batch that the bins were counted in (fbgemm_t856_bs65536.pt)."""
BINS = 17
EXPONENTS = tuple(round(0.05 * step, 2) for step in range(41))
"""0 (uniform) to 2, where the other models' fits are capped too."""

_GRID = np.geomspace(1e-9, 1e9, 1025)
"""Means at which the Poisson law is tabulated."""
_FLOOR = 1e-9
"""Share of a bin that a law gives no chance at all: keeps the logarithm finite."""

Array = NDArray[np.float64]


def exponent_of_bins(rows: int, pooling: float, bins: Sequence[float]) -> float:
    """Zipf exponent of a table; 0 where the bins are empty.

    Args:
        rows: of the table.
        pooling: ids per sample.
        bins: ``BINS`` shares.
    """
    if not any(bins):
        return 0.0
    shares = np.asarray(bins, dtype=np.float64)

    def cross_entropy(exponent: float) -> float:
        expected = expected_bins(rows, BATCH * pooling, exponent)
        return float(-shares @ np.log(expected + _FLOOR))

    return min(EXPONENTS, key=cross_entropy)


def expected_bins(rows: int, draws: float, exponent: float) -> Array:
    """Expected share of each bin among the distinct ids of ``draws`` draws."""
    counts, probability = popularity_bins(rows, exponent)
    means = np.log(np.clip(draws * probability, _GRID[0], _GRID[-1]))
    table, grid = _poisson_bins(), np.log(_GRID)
    ids = np.array([counts @ np.interp(means, grid, column) for column in table])
    return np.asarray(ids / ids.sum())


@lru_cache(maxsize=1)
def _poisson_bins() -> Array:
    """[BINS, grid]: chance that a count of each mean falls into each bin."""
    zero = np.exp(-_GRID)
    below = [_at_most(2**j) for j in range(BINS - 1)]
    edges = np.array([zero, *below, np.ones_like(_GRID)])
    return np.asarray(np.clip(np.diff(edges, axis=0), 0.0, 1.0))


def _at_most(count: int) -> Array:
    """P(Poisson(m) <= count) at the grid's means: summed up to 64, beyond by Wilson and Hilferty.

    P(Poisson(m) <= c) = P(chi2 with 2(c+1) degrees > 2m), whose cube root is nearly normal
    (Wilson & Hilferty 1931; error below 1e-4 at these degrees).
    """
    if count <= 64:
        terms = [k * np.log(_GRID) - _GRID - math.lgamma(k + 1) for k in range(count + 1)]
        return np.asarray(np.minimum(np.exp(terms).sum(axis=0), 1.0))
    spread = 1.0 / (9.0 * (count + 1))
    z = (np.cbrt(_GRID / (count + 1)) - (1.0 - spread)) / math.sqrt(spread)
    return np.array([0.5 * math.erfc(value / math.sqrt(2.0)) for value in z])
