"""CMA-ES: minimise a function of a few variables without its derivatives.

Candidates are drawn from a normal distribution; its mean moves to the better half of them, its
covariance follows the moves that helped, and its spread the length of the path. Standard constants
(N. Hansen, "The CMA Evolution Strategy: A Tutorial").
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def minimise(
    loss: Callable[[Array], float], start: Array, spread: float, steps: int, seed: int
) -> Array:
    """The best point seen, from ``start`` with standard deviation ``spread``."""
    random = np.random.default_rng(seed)
    size = len(start)
    drawn = 10 + int(3 * np.log(size))
    kept = drawn // 2
    weights = np.log(kept + 0.5) - np.log(np.arange(1, kept + 1))
    weights /= weights.sum()
    effective = 1 / (weights**2).sum()
    path_rate = (effective + 2) / (size + effective + 5)
    damping = 1 + path_rate + 2 * max(0.0, np.sqrt((effective - 1) / (size + 1)) - 1)
    covariance_path_rate = (4 + effective / size) / (size + 4 + 2 * effective / size)
    rank_one = 2 / ((size + 1.3) ** 2 + effective)
    rank_many = min(
        1 - rank_one, 2 * (effective - 2 + 1 / effective) / ((size + 2) ** 2 + effective)
    )
    expected_length = np.sqrt(size) * (1 - 1 / (4 * size) + 1 / (21 * size**2))

    mean, covariance = start.astype(np.float64), np.eye(size)
    path, covariance_path = np.zeros(size), np.zeros(size)
    best, best_loss = mean.copy(), loss(mean)
    for _ in range(steps):
        variances, axes = np.linalg.eigh(covariance)
        lengths = np.sqrt(np.maximum(variances, 1e-12))
        moves = (random.standard_normal((drawn, size)) * lengths) @ axes.T
        losses = np.array([loss(mean + spread * move) for move in moves])
        order = np.argsort(losses)
        if losses[order[0]] < best_loss:
            best, best_loss = mean + spread * moves[order[0]], float(losses[order[0]])
        good = moves[order[:kept]]
        move = weights @ good
        mean = mean + spread * move
        path = (1 - path_rate) * path + np.sqrt(path_rate * (2 - path_rate) * effective) * (
            axes @ ((axes.T @ move) / lengths)
        )
        steady = np.linalg.norm(path) < 2 * expected_length
        covariance_path = (1 - covariance_path_rate) * covariance_path + steady * np.sqrt(
            covariance_path_rate * (2 - covariance_path_rate) * effective
        ) * move
        covariance = (
            (1 - rank_one - rank_many) * covariance
            + rank_one * np.outer(covariance_path, covariance_path)
            + rank_many * (good.T * weights) @ good
        )
        spread *= np.exp(path_rate / damping * (np.linalg.norm(path) / expected_length - 1))
    return best
