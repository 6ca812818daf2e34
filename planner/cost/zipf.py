"""Id popularity: p_i = i^-s / H(R, s) for rank i of R rows (Zipf; s = 0 is uniform).

Sums over ranks are exact for the first ``HEAD`` ranks and midpoint integrals over logarithmic
bins beyond, so a table of 1e10 rows costs as much as one of 1e4.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

HEAD = 64
BINS = 192

Array = NDArray[np.float64]


def _power_integral(low: Array, high: Array, exponent: float) -> Array:
    """Integral of x^-s from ``low`` to ``high``, stable near s = 1."""
    slope = 1.0 - exponent
    if abs(slope) < 1e-9:
        return np.log(high / low)
    return np.asarray(low**slope * np.expm1(slope * np.log(high / low)) / slope)


@lru_cache(maxsize=1024)
def popularity_bins(rows: float, exponent: float) -> tuple[Array, Array]:
    """Rows in each bin and the mean probability of one row of it, most popular first."""
    head = np.arange(1.0, min(HEAD, math.floor(rows)) + 1)
    counts, weights = np.ones_like(head), head**-exponent
    if rows > head[-1]:
        # Rank i stands for the interval (i - 1/2, i + 1/2).
        edges = np.geomspace(head[-1] + 0.5, rows + 0.5, BINS + 1)
        tail = np.diff(edges)
        mass = _power_integral(edges[:-1], edges[1:], exponent)
        counts, weights = np.append(counts, tail), np.append(weights, mass / tail)
    return counts, weights / float(counts @ weights)


def _share_of_bins(counts: Array, top_rows: float) -> Array:
    """How much of each bin lies among the ``top_rows`` most popular rows."""
    before = np.cumsum(counts) - counts
    return np.clip((top_rows - before) / counts, 0.0, 1.0)


@lru_cache(maxsize=65536)
def top_mass(rows: int, exponent: float, top_rows: float) -> float:
    """Share of all draws that go to the ``top_rows`` most popular rows."""
    if top_rows >= rows:
        return 1.0
    counts, probability = popularity_bins(float(rows), exponent)
    return float(_share_of_bins(counts, top_rows) @ (counts * probability))


@lru_cache(maxsize=65536)
def expected_distinct(rows: int, exponent: float, draws: float, top_rows: float = 0.0) -> float:
    """Expected number of distinct rows among ``draws`` draws.

    With ``top_rows``, only rows outside the ``top_rows`` most popular ones are counted (those a
    cache of that size does not hold).

    Sum over ranks of 1 - (1 - p_i)^n, with log1p so that tiny probabilities keep their digits.
    """
    if top_rows >= rows:
        return 0.0
    counts, probability = popularity_bins(float(rows), exponent)
    with np.errstate(divide="ignore"):
        seen = -np.expm1(draws * np.log1p(-np.minimum(probability, 1.0)))
    outside = counts * (1.0 - _share_of_bins(counts, top_rows))
    # A bin's mean probability overstates its distinct rows by less than a row per draw.
    return min(float(outside @ seen), draws)
