"""A crew: the pools that work on a job, each with the nodes it uses, and its batch splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.groups import GroupedStudy
from planner.pool_ways import Waits
from planner.splits import Box, SplitSpace


@dataclass(frozen=True)
class Crew:
    """Working pools, each with the nodes it uses."""

    studies: tuple[GroupedStudy, ...]
    space: SplitSpace

    @property
    def devices(self) -> int:
        """Working devices of all pools."""
        return sum(study.ranks for study in self.studies)

    @property
    def label(self) -> str:
        return " + ".join(
            f"{s.pool.name} {s.pool.nodes}x{s.pool.devices_per_node} {s.device.name}"
            for s in self.studies
        )

    def waits(self, batches: Sequence[int], with_tables: bool = True) -> Waits:
        """When the last pool reaches each operation on the bridge, at the earliest."""
        if len(self.studies) == 1:
            return ()
        starts = [
            study.bridge_starts(batch, with_tables)
            for study, batch in zip(self.studies, batches, strict=True)
        ]
        return tuple((name, max(one[name] for one in starts)) for name in starts[0])

    def bound_s(self, box: Box) -> float:
        """Lower bound of every split in the box."""
        corner = [low for low, _ in box]
        waits = self.waits(corner)
        return max(s.bound_s(batch, waits) for s, batch in zip(self.studies, corner, strict=True))

    def dense_s(self, box: Box) -> float:
        """A cheaper one: without any table."""
        corner = [low for low, _ in box]
        waits = self.waits(corner, with_tables=False)
        return max(s.dense_s(batch, waits) for s, batch in zip(self.studies, corner, strict=True))

    def balanced(self, box: Box) -> tuple[int, ...]:
        """A split of the box at which the pools reach the last exchange at about the same time."""
        low_s, high_s = (
            0.0,
            max(s.ready_s(high) for s, (_, high) in zip(self.studies, box, strict=True)),
        )
        for _ in range(30):
            middle_s = (low_s + high_s) / 2
            batches = [
                _largest(study.ready_s, middle_s, low, high)
                for study, (low, high) in zip(self.studies, box, strict=True)
            ]
            total = sum(s.ranks * b for s, b in zip(self.studies, batches, strict=True))
            if total < self.space.global_batch:
                low_s = middle_s
            else:
                high_s = middle_s
        found = self.space.nearest(box, batches)
        assert found is not None, "boxes are tightened: they hold a split"
        return found


def _largest(ready_s: Callable[[float], float], limit_s: float, low: float, high: float) -> float:
    """The largest batch in [low, high] that is ready within the limit."""
    if ready_s(high) <= limit_s:
        return high
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (middle, high) if ready_s(middle) <= limit_s else (low, middle)
    return low
