"""Every other way to place one table in one pool, all other tables fixed.

Loads are sums over tables, so a move is priced by what the ranks hold without the table plus the
pieces of the option; the step follows from the slowest ranks. A single piece is tried on every rank
(or node); the pieces of a column-split table one after another, each where the step is shortest,
then where the tables take least time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.cost.embedding import option_pieces
from planner.cost.load import COMPONENTS, PlacementOption, Scope
from planner.cost.memory import base_memory_bytes
from planner.evaluate import MS, landings, placement_of
from planner.explain.job import Job, PoolState, table_seconds
from planner.ilp.options import Way, placement_option, ways
from planner.ilp.program import HBM, HOST, Choice, Floats, TableClass, vector
from planner.specs.base import PositiveFloat, Spec
from planner.specs.model import Table
from planner.specs.plan import Placement
from planner.specs.units import GIB

TICK_S = 1e-12
"""Steps that differ by less are equal: sums in another order round differently."""


class Move(Spec):
    """One table placed otherwise in one pool."""

    placement: Placement
    step_ms: PositiveFloat
    """Of the job."""
    delta_ms: float
    """Over the plan's step."""
    tables_delta_ms: float
    """Change of what the pool's tables take if no rank waited for another; it matters once the
    step is decided by them."""
    memory_delta_bytes: int
    """Of device memory, over all ranks that hold a copy of the table or a part of it."""
    fits: bool
    short_of: str = ""


def own_loads(state: PoolState, table: Table, placement: Placement) -> Floats:
    """What a table puts on each rank of a replica group; [ranks of a group, C]."""
    group = state.ctx.sharding_group
    loads = np.zeros((group.ranks, len(COMPONENTS)))
    pieces = option_pieces(
        group,
        table,
        placement.sharding_type,
        placement.compute_kernel,
        placement.data_type,
        placement.column_widths,
        placement.cache_load_factor,
    )
    for piece, ranks in zip(pieces, landings(state.ctx, placement), strict=True):
        loads += vector(piece.everyone)
        loads[list(ranks)] += vector(piece.owner)
    return loads


def way_of(placement: Placement) -> Way:
    """A placement without its ranks."""
    return Way(
        placement.sharding_type,
        placement.compute_kernel,
        placement.data_type,
        placement.column_widths,
        placement.cache_load_factor,
    )


@dataclass(frozen=True)
class Bench:
    """One table lifted out of one pool of a job."""

    job: Job
    pool: str
    table: Table

    @property
    def state(self) -> PoolState:
        return self.job.pools[self.pool]

    @property
    def placement(self) -> Placement:
        return self.state.placements[self.table.name]

    @cached_property
    def own(self) -> Floats:
        """The table's loads as planned; [ranks of a group, C]."""
        return own_loads(self.state, self.table, self.placement)

    @cached_property
    def rest(self) -> Floats:
        """What the ranks hold without it; [ranks of a group, C]."""
        return self.state.loads - self.own

    @cached_property
    def room(self) -> Floats:
        """Device and host bytes that tables may fill on one rank; [2]."""
        ctx = self.state.ctx
        base = sum(base_memory_bytes(ctx).values())
        host = 0 if ctx.device.is_cpu else ctx.host_capacity_bytes
        return np.array([ctx.hbm_capacity_bytes - base, host], dtype=float)

    @cached_property
    def without_s(self) -> float:
        """The step if the table cost nothing in this pool."""
        return float(self.job.steps_s(self.pool, self.rest.max(axis=0)))

    def places(self, option: PlacementOption, taken: int | None = None) -> tuple[int, ...]:
        """The best rank or node of each piece (0 for the whole pool).

        Args:
            taken: a place that must not be used.
        """
        group = self.state.ctx.sharding_group.pool
        held = self.rest + sum(vector(piece.everyone) for piece in option.pieces)
        found = []
        for piece in option.pieces:
            if piece.scope is Scope.POOL:
                held = held + vector(piece.owner)
                found.append(0)
                continue
            per_place = group.devices_per_node if piece.scope is Scope.NODE else 1
            places = held.reshape(-1, per_place, held.shape[1])
            place = self._best(held, places.max(axis=1) + vector(piece.owner), taken)
            held = held.copy()
            held[place * per_place : (place + 1) * per_place] += vector(piece.owner)
            found.append(place)
        return tuple(found)

    def _best(self, held: Floats, landed: Floats, taken: int | None) -> int:
        """Where a piece leaves room, the shortest step, the least time of tables, most memory.

        Args:
            landed: largest loads of each place with the piece on it; [places, C].
        """
        slowest = np.maximum(held.max(axis=0), landed)
        steps_s = np.broadcast_to(self.job.steps_s(self.pool, slowest), len(landed))
        missing = np.maximum(landed[:, [HBM, HOST]] - self.room, 0).sum(axis=1)
        if taken is not None:
            missing = missing.copy()
            missing[taken] = np.inf
        keys = (
            landed[:, HBM],
            np.round(table_seconds(self.state.graph, landed) / TICK_S),
            np.round(table_seconds(self.state.graph, slowest) / TICK_S),
            np.round(steps_s / TICK_S),
            missing,
        )
        return int(np.lexsort(keys)[0])

    def move(self, placement: Placement) -> Move:
        """What a placement of the table would do."""
        own = own_loads(self.state, self.table, placement)
        loads = self.rest + own
        slowest = loads.max(axis=0)
        step_s = float(self.job.steps_s(self.pool, slowest))
        before, after = (
            table_seconds(self.state.graph, one) for one in (self.state.slowest, slowest)
        )
        excess = loads[:, [HBM, HOST]] - self.room
        rank, what = np.unravel_index(int(excess.argmax()), excess.shape)
        worst = float(excess[rank, what])
        kind = ("device", "host")[int(what)]
        copies = self.state.ctx.replica_groups
        return Move(
            placement=placement,
            step_ms=step_s * MS,
            delta_ms=(step_s - self.job.step_s) * MS,
            tables_delta_ms=float(after - before) * MS,
            memory_delta_bytes=round(copies * float((own - self.own)[:, HBM].sum())),
            fits=worst <= 0,
            short_of=f"rank {rank} lacks {worst / GIB:.1f} GiB of {kind} memory"
            if worst > 0
            else "",
        )

    def moves(self) -> Iterator[Move]:
        """Every other way, placed best, and the planned way's best other place.

        Those that fit come first, the shortest step first; of equals, those with less time of
        tables.
        """
        found = [self.move(placement) for placement in self._others()]
        return iter(
            sorted(
                found,
                key=lambda one: (
                    not one.fits,
                    round(one.step_ms / MS / TICK_S),
                    round(one.tables_delta_ms / MS / TICK_S),
                ),
            )
        )

    def _others(self) -> Iterator[Placement]:
        group = self.state.ctx.sharding_group
        planned = self.placement
        for way in dict.fromkeys((way_of(planned), *ways(group, self.table, spill=True))):
            option = placement_option(group, self.table, way)
            taken = None
            if way == way_of(planned) and len(option.pieces) == 1:
                taken = self._place_of_planned(option.pieces[0].scope)
                if taken is None:
                    continue
            places = self.places(option, taken)
            one = TableClass((self.table.name,), (option,))
            placement = placement_of(self.state.ctx, one, Choice(0, places))
            if way != way_of(planned) or sorted(placement.ranks) != sorted(planned.ranks):
                yield placement

    def _place_of_planned(self, scope: Scope) -> int | None:
        """Rank or node of a table in one piece; None if there is no other."""
        group = self.state.ctx.sharding_group.pool
        if scope is Scope.POOL or (group.nodes if scope is Scope.NODE else group.devices) == 1:
            return None
        first = self.placement.ranks[0]
        return first // group.devices_per_node if scope is Scope.NODE else first
