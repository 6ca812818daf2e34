"""Which of several alternatives are worth having: those that no other one dominates."""

from __future__ import annotations

from collections.abc import Sequence


def non_dominated(costs: Sequence[Sequence[float]]) -> list[bool]:
    """Whether each alternative is on the Pareto front; less is better in every criterion.

    One dominates another if it is no worse in any criterion and better in one. Equal ones do not
    dominate each other.

    Args:
        costs: shape [alternatives, criteria].
    """
    # In lexicographic order nothing is dominated by what comes later, and whatever dominates
    # something is itself on the front or dominated by something on it: only that is compared.
    order = sorted(range(len(costs)), key=lambda index: tuple(costs[index]))
    front: list[int] = []
    on_front = [False] * len(costs)
    for index in order:
        mine = tuple(costs[index])
        if not any(_dominates(costs[other], mine) for other in front):
            front.append(index)
            on_front[index] = True
    return on_front


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    no_worse = all(a <= b for a, b in zip(one, other, strict=True))
    return no_worse and any(a < b for a, b in zip(one, other, strict=True))
