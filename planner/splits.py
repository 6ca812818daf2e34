"""Batch splits: positive local batches b_p with sum over pools of n_p * b_p = B exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

Box = tuple[tuple[int, int], ...]
"""Lowest and highest local batch of each pool, both included."""


@dataclass(frozen=True)
class SplitSpace:
    """Splits of a global batch over pools of ``ranks`` ranks."""

    ranks: tuple[int, ...]
    global_batch: int

    @property
    def root(self) -> Box | None:
        """The smallest box around all splits; None if there is none."""
        return self.tighten(tuple((1, self.global_batch // n) for n in self.ranks))

    def tighten(self, box: Box) -> Box | None:
        """Shrink a box to what the sum allows; None if it holds no split."""
        if self.global_batch % math.gcd(*self.ranks):
            return None
        smaller: Box | None = box
        while smaller is not None:
            box, smaller = smaller, self._tighten_once(smaller)
            if smaller == box:
                return box if self.nearest(box, [float(low) for low, _ in box]) else None
        return None

    def _tighten_once(self, box: Box) -> Box | None:
        """What each pool may do if the others do their least or their most."""
        if any(low > high for low, high in box):
            return None
        least = sum(n * low for n, (low, _) in zip(self.ranks, box, strict=True))
        most = sum(n * high for n, (_, high) in zip(self.ranks, box, strict=True))
        result = []
        for n, (low, high) in zip(self.ranks, box, strict=True):
            rest_most, rest_least = most - n * high, least - n * low
            low = max(low, -(-(self.global_batch - rest_most) // n))
            high = min(high, (self.global_batch - rest_least) // n)
            if low > high:
                return None
            result.append((low, high))
        return tuple(result)

    def nearest(self, box: Box, target: list[float]) -> tuple[int, ...] | None:
        """A split in the box near ``target``: pool by pool, largest first, as close as the others
        still allow. None if the box holds no split."""
        order = sorted(range(len(self.ranks)), key=lambda p: (-self.ranks[p], p))
        found = self._complete(order, box, target, self.global_batch)
        return tuple(found[p] for p in range(len(self.ranks))) if found else None

    def _complete(
        self, order: list[int], box: Box, target: list[float], rest: int
    ) -> dict[int, int] | None:
        first, others = order[0], order[1:]
        n, (low, high) = self.ranks[first], box[first]
        if not others:
            batch, remainder = divmod(rest, n)
            return {first: batch} if remainder == 0 and low <= batch <= high else None
        step = math.gcd(*(self.ranks[p] for p in others))
        low = max(low, -(-(rest - sum(self.ranks[p] * box[p][1] for p in others)) // n))
        high = min(high, (rest - sum(self.ranks[p] * box[p][0] for p in others)) // n)
        for batch in _outwards(low, high, target[first]):
            if (rest - n * batch) % step:
                continue
            found = self._complete(others, box, target, rest - n * batch)
            if found is not None:
                return {first: batch, **found}
        return None

    def nearest_batches(self) -> tuple[int | None, int]:
        """The reachable global batches next below (None if there is none) and next above."""
        lower = range(self.global_batch - 1, sum(self.ranks) - 1, -1)
        return (
            next((batch for batch in lower if self._reaches(batch)), None),
            next(batch for batch in count(self.global_batch + 1) if self._reaches(batch)),
        )

    def _reaches(self, batch: int) -> bool:
        return SplitSpace(self.ranks, batch).root is not None

    def all(self) -> Iterator[tuple[int, ...]]:
        """Every split, for small batches."""

        def rest_of(pools: tuple[int, ...], rest: int) -> Iterator[tuple[int, ...]]:
            if len(pools) == 1:
                if rest > 0 and rest % pools[0] == 0:
                    yield (rest // pools[0],)
                return
            for batch in range(1, rest // pools[0] + 1):
                for others in rest_of(pools[1:], rest - pools[0] * batch):
                    yield (batch, *others)

        return rest_of(self.ranks, self.global_batch)


def _outwards(low: int, high: int, target: float) -> Iterator[int]:
    """Integers of [low, high], nearest to ``target`` first."""
    if low > high:
        return
    centre = min(max(round(target), low), high)
    yield centre
    for distance in range(1, max(centre - low, high - centre) + 1):
        if centre - distance >= low:
            yield centre - distance
        if centre + distance <= high:
            yield centre + distance


def equal_split(ranks: Mapping[str, int], global_batch: int) -> dict[str, int] | None:
    """The split nearest to the same local batch on every rank; None if there is no split.

    Where the batch divides evenly, that is the same for all. Otherwise the pool with most ranks is
    brought as close as possible to B / N first, then the next, the last taking what is left.
    """
    space = SplitSpace(tuple(ranks.values()), global_batch)
    box = space.root
    if box is None:
        return None
    target = global_batch / sum(ranks.values())
    found = space.nearest(box, [target] * len(ranks))
    return dict(zip(ranks, found, strict=True)) if found else None
