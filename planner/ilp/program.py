"""The placement problem of one pool as numbers: options, step graph, room for tables.

Pure: knows nothing of the cost model, so that it can be made by hand and solved by enumeration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cost.load import COMPONENTS, TIME_COMPONENTS, Piece, PlacementOption, RankLoad, Scope
from planner.cost.step import StepGraph

Floats = NDArray[np.float64]

HBM = COMPONENTS.index("hbm_bytes")
HOST = COMPONENTS.index("host_bytes")
TIMES = [COMPONENTS.index(name) for name in TIME_COMPONENTS]


_values = attrgetter(*COMPONENTS)


def vector(load: RankLoad) -> Floats:
    """A rank load as a row in the order of ``COMPONENTS``."""
    return np.array(_values(load))


@dataclass(frozen=True)
class ShardClass:
    """Equal pieces of one option, each of which lands on some rank or some node."""

    pieces: tuple[int, ...]
    """Their positions in the option's ``pieces``."""
    scope: Scope
    load: Floats
    """On the rank, or on every rank of the node, that one piece lands on; shape [C]."""


@dataclass(frozen=True)
class OptionLoads:
    """What an option costs, in the order of ``COMPONENTS``."""

    everywhere: Floats
    """On every rank, wherever the pieces land; shape [C]."""
    shards: tuple[ShardClass, ...]
    mean: Floats
    """Averaged over the ranks of the pool; shape [C]."""


def option_loads(option: PlacementOption, nodes: int, devices_per_node: int) -> OptionLoads:
    """Loads of an option, its equal pieces grouped."""
    everywhere = np.zeros(len(COMPONENTS))
    equal: dict[Piece, list[int]] = {}
    for index, piece in enumerate(option.pieces):
        equal.setdefault(piece, []).append(index)
    groups: dict[tuple[Scope, RankLoad], list[int]] = {}
    for piece, indexes in equal.items():
        everywhere += vector(piece.everyone) * len(indexes)
        if piece.scope is Scope.POOL:
            everywhere += vector(piece.owner) * len(indexes)
        else:
            groups.setdefault((piece.scope, piece.owner), []).extend(indexes)
    mean = everywhere.copy()
    shards = []
    for (scope, owner), indexes in groups.items():
        load = vector(owner)
        ranks_share = 1 / (nodes if scope is Scope.NODE else nodes * devices_per_node)
        mean += load * len(indexes) * ranks_share
        shards.append(ShardClass(tuple(sorted(indexes)), scope, load))
    return OptionLoads(everywhere, tuple(shards), mean)


@dataclass(frozen=True)
class TableClass:
    """Equal tables (same shape, lookups and constraints), hence with the same options."""

    tables: tuple[str, ...]
    options: tuple[PlacementOption, ...]


@dataclass(frozen=True)
class Choice:
    """Of one table: an option, and for each of its pieces the rank or node (0 for the pool)."""

    option: int
    places: tuple[int, ...]


Assignment = tuple[tuple[Choice, ...], ...]
"""Choices by table class and table."""


@dataclass(frozen=True)
class PoolProgram:
    """Choose one option per table and a place for each piece, so that the step is shortest."""

    graph: StepGraph
    nodes: int
    devices_per_node: int
    classes: tuple[TableClass, ...]
    hbm_room_bytes: float
    """Device memory of a rank that tables may fill."""
    host_room_bytes: float
    not_before: Mapping[str, float] = field(default_factory=dict)
    """Earliest start of some operations, seconds."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices_per_node

    @cached_property
    def loads(self) -> tuple[tuple[OptionLoads, ...], ...]:
        """By table class and option."""
        return tuple(
            tuple(
                option_loads(option, self.nodes, self.devices_per_node) for option in group.options
            )
            for group in self.classes
        )

    @cached_property
    def times(self) -> StepTimes:
        return StepTimes(self.graph, self.not_before)

    @property
    def room(self) -> Floats:
        """Device and host bytes that tables may fill on one rank; shape [2]."""
        return np.array([self.hbm_room_bytes, self.host_room_bytes])

    def keep(self, kept: Sequence[Sequence[int]]) -> PoolProgram:
        """The same program with only these options of each class."""
        classes = tuple(
            TableClass(group.tables, tuple(group.options[index] for index in indexes))
            for group, indexes in zip(self.classes, kept, strict=True)
        )
        program = replace(self, classes=classes)
        program.__dict__["loads"] = tuple(
            tuple(loads[index] for index in indexes)
            for loads, indexes in zip(self.loads, kept, strict=True)
        )
        return program

    def with_room(self, share: float) -> PoolProgram:
        """The same program with only a share of the room."""
        return self._changed(
            hbm_room_bytes=self.hbm_room_bytes * share,
            host_room_bytes=self.host_room_bytes * share,
        )

    def with_hbm_room(self, room_bytes: float) -> PoolProgram:
        """The same program with other room in device memory."""
        return self._changed(hbm_room_bytes=room_bytes)

    def waiting(self, not_before: Mapping[str, float]) -> PoolProgram:
        """The same program, some operations of which wait for other pools."""
        return self._changed(not_before=not_before) if not_before else self

    def under(self, graph: StepGraph, not_before: Mapping[str, float]) -> PoolProgram:
        """The same program with another step graph."""
        return self._changed(graph=graph, not_before=not_before)

    def _changed(self, **changes: Any) -> PoolProgram:
        program = replace(self, **changes)
        program.__dict__["loads"] = self.loads
        return program

    def rank_loads(self, assignment: Assignment) -> Floats:
        """Load of every rank under an assignment; shape [ranks, C]."""
        result = np.zeros((self.ranks, len(COMPONENTS)))
        for loads, choices in zip(self.loads, assignment, strict=True):
            for choice in choices:
                option = loads[choice.option]
                result += option.everywhere
                for shard in option.shards:
                    for piece in shard.pieces:
                        result[self.landing(shard.scope, choice.places[piece])] += shard.load
        return result

    def landing(self, scope: Scope, place: int) -> slice:
        """Ranks that a piece placed there lands on."""
        if scope is Scope.NODE:
            return slice(place * self.devices_per_node, (place + 1) * self.devices_per_node)
        return slice(place, place + 1)

    def fits(self, loads: Floats) -> bool:
        """Whether every rank has room for its tables. ``loads``: [ranks, C]."""
        return bool((loads[:, [HBM, HOST]] <= self.room).all())

    def step_s(self, loads: Floats) -> float:
        """The step under these rank loads, seconds. ``loads``: [ranks, C]."""
        return float(self.times.step_s(loads.max(axis=0)))


class StepTimes:
    """A step graph compiled for many evaluations at once."""

    def __init__(self, graph: StepGraph, not_before: Mapping[str, float]) -> None:
        position = {operation.name: i for i, operation in enumerate(graph.operations)}
        predecessors = graph.predecessors()
        self._operations = [
            (
                [position[name] for name in predecessors[operation.name]],
                operation.seconds,
                [COMPONENTS.index(name) for name in operation.loads],
                not_before.get(operation.name, 0.0),
            )
            for operation in graph.operations
        ]
        self.components = sorted({c for _, _, loads, _ in self._operations for c in loads})
        """Load components that the graph looks at."""

    def ends_s(self, slowest: Floats) -> Floats:
        """End of every operation. ``slowest``: [..., C]; result: [operations, ...]."""
        ends: list[Floats] = []
        zero = np.zeros(slowest.shape[:-1])
        for before, seconds, loads, not_before in self._operations:
            end = zero + not_before if not_before or not before else ends[before[0]]
            for other in before if not_before else before[1:]:
                end = np.maximum(end, ends[other])
            if loads:
                longest = slowest[..., loads[0]]
                for component in loads[1:]:
                    longest = np.maximum(longest, slowest[..., component])
                end = end + longest
            ends.append(end + seconds if seconds else end)
        return np.array(ends)

    def step_s(self, slowest: Floats) -> Floats:
        """The step for each row of slowest-rank loads. ``slowest``: [..., C]; result: [...]."""
        return np.asarray(self.ends_s(slowest).max(axis=0))

    def sensitivity(self, slowest: Floats) -> Floats:
        """How much of each component's growth by 5 % of the step arrives in the step; [C]."""
        step = float(self.step_s(slowest))
        nudge = 0.05 * step
        nudged = np.tile(slowest, (len(COMPONENTS), 1))
        for component in self.components:
            nudged[component, component] += nudge
        result = np.zeros(len(COMPONENTS))
        result[self.components] = (self.step_s(nudged)[self.components] - step) / nudge
        return result


def undominated(loads: Sequence[OptionLoads], components: Sequence[int]) -> list[int]:
    """Options that no other beats or equals in all the given components, wherever pieces land.

    Option a dominates b when a spreads evenly and puts no more on any rank than b puts on every
    rank anyway, or when both are split into as many pieces of the same scope and a's are no
    larger. Of two equal ones the first is kept.
    """
    everywhere = np.array([option.everywhere[components] for option in loads])
    shapes = [tuple((s.scope, len(s.pieces)) for s in option.shards) for option in loads]
    alike: dict[tuple[tuple[Scope, int], ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        alike.setdefault(shape, []).append(index)
    kept = []
    for shape, members in alike.items():
        rows = np.array(
            [
                np.concatenate([everywhere[o], *(s.load[components] for s in loads[o].shards)])
                for o in members
            ]
        )
        for position, b in enumerate(members):
            no_larger = (rows <= rows[position]).all(axis=1)
            smaller = no_larger & (rows < rows[position]).any(axis=1)
            earlier_equal = no_larger[:position].any()
            beaten = bool(smaller.any() or earlier_equal)
            if shape and not beaten:
                spread = alike.get((), [])
                beaten = bool((everywhere[spread] <= everywhere[b]).all(axis=1).any())
            if not beaten:
                kept.append(b)
    return sorted(kept)
