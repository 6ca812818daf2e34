"""A knapsack by dynamic programming over the room in time, cut into equal buckets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.ilp.program import Floats

BUCKETS = 256
"""Parts into which the room in time is cut."""


@dataclass(frozen=True)
class Stack:
    """For every number of buckets: the worth and memory of the pieces that fill at most so many,
    and what they are."""

    worth: Floats
    """[BUCKETS + 1]"""
    memory: Floats
    """[BUCKETS + 1, 2]"""
    pieces: Floats
    """Of each kind; [BUCKETS + 1, J]"""

    def pattern(self, buckets: int) -> Floats:
        """What was found for so many buckets."""
        found: Floats = self.pieces[buckets].copy()
        return found


def doublings(count: int) -> Iterator[int]:
    """Parts of a count that add up to every number up to it: 1, 2, 4, ... and the rest."""
    part = 1
    while count > 0:
        yield min(part, count)
        count -= part
        part *= 2


def stack(
    kinds: int,
    items: list[tuple[int, int]],
    buckets: NDArray[np.int64],
    memory: Floats,
    worth: Floats,
    room: Floats,
) -> Stack:
    """Dynamic program over items (kind, pieces of it); the memory of each state is that of its own
    pieces, so the result is good, not best, where memory is short."""
    best, held = np.zeros(BUCKETS + 1), np.zeros((BUCKETS + 1, 2))
    pieces = np.zeros((BUCKETS + 1, kinds))
    for j, many in items:
        size = int(buckets[j]) * many
        if size > BUCKETS:
            continue
        gained = best[: BUCKETS + 1 - size] + worth[j] * many
        grown = held[: BUCKETS + 1 - size] + memory[j] * many
        better = (gained > best[size:]) & (grown <= room).all(axis=1)
        at = np.flatnonzero(better)
        pieces[at + size] = pieces[at]
        pieces[at + size, j] += many
        held[at + size] = grown[at]
        best[at + size] = gained[at]
    return Stack(best, held, pieces)
