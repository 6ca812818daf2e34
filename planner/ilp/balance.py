"""Local search over placements: move pieces, swap pieces, give tables another option.

The slowest ranks decide the step, and often several ranks are equally slow, so that no single
move shortens it. Each component's maximum over R ranks is therefore softened to its power mean

    soft(c) = (sum_r load[r,c]^p / R)^(1/p)      (mean for p = 1, maximum for p -> infinity)

and the search lowers the step graph's end under soft(c), with p = 2^k growing. All moves between
one rank and the ranks with most to spare are evaluated at once. The effort is a count of evaluated
moves, not a time, so that equal inputs give equal plans on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost.load import COMPONENTS, Scope
from planner.ilp.program import HBM, HOST, Assignment, Choice, Floats, OptionLoads, PoolProgram

DOUBLINGS = (3, 5, 7)
"""Exponents p = 2^k, one after another."""
EFFORT = 3_000_000
"""Moves that one search may evaluate."""
PARTNERS = 24
"""Places that a place's moves are tried with."""
PASSES = 8
"""Passes over all places per exponent at most."""
HOT = 48
"""Places that a pass relieves, those under most pressure."""
HOTTEST = 8
"""Places of which the tables' options are reconsidered."""
GAIN = 1e-7
"""Smallest relative gain that counts."""

MEMORY = [HBM, HOST]
Ints = NDArray[np.int64]
Piece = tuple[int, int, int]
"""Table class, table, piece of its option."""


class Balance:
    """Tables on ranks, with what every piece's move would change."""

    def __init__(self, program: PoolProgram, assignment: Assignment) -> None:
        self.program = program
        self.choices = [list(row) for row in assignment]
        self.loads = program.rank_loads(assignment)
        self.effort = EFFORT
        self.doublings = DOUBLINGS[0]
        self.kinds: dict[tuple[int, int, int], int] = {}
        """By class, option and shard class: row of ``kind_loads``; equal loads share one."""
        rows: dict[tuple[Scope, bytes], int] = {}
        self.kind_scopes: list[Scope] = []
        loads: list[Floats] = []
        for g, options in enumerate(program.loads):
            for o, option in enumerate(options):
                for k, shard in enumerate(option.shards):
                    key = (shard.scope, shard.load.tobytes())
                    if key not in rows:
                        rows[key] = len(loads)
                        loads.append(shard.load)
                        self.kind_scopes.append(shard.scope)
                    self.kinds[g, o, k] = rows[key]
        self.kind_loads = np.array(loads).reshape(len(loads), len(COMPONENTS))
        self.times = [c for c in program.times.components if self.kind_loads[:, c].any()]
        """Components that depend on where pieces land."""
        self.importance = np.ones(len(self.times))
        self.places = {Scope.RANK: program.ranks, Scope.NODE: program.nodes}
        self.held: dict[Scope, list[dict[int, list[Piece]]]] = {
            scope: [{} for _ in range(count)] for scope, count in self.places.items()
        }
        for g, row in enumerate(self.choices):
            for t in range(len(row)):
                self._hold(g, t)

    @property
    def step_s(self) -> float:
        return self.program.step_s(self.loads)

    def assignment(self) -> Assignment:
        return tuple(tuple(row) for row in self.choices)

    def _pieces(self, g: int, t: int) -> Iterator[tuple[Scope, int, int, Piece]]:
        """Scope, place and kind of every piece of a table that lands on some place."""
        choice = self.choices[g][t]
        for k, shard in enumerate(self.program.loads[g][choice.option].shards):
            kind = self.kinds[g, choice.option, k]
            for piece in shard.pieces:
                yield shard.scope, choice.places[piece], kind, (g, t, piece)

    def _hold(self, g: int, t: int) -> None:
        for scope, place, kind, piece in self._pieces(g, t):
            self.held[scope][place].setdefault(kind, []).append(piece)

    def _drop(self, g: int, t: int) -> None:
        for scope, place, kind, piece in self._pieces(g, t):
            self._take(scope, place, kind, piece)

    def _take(self, scope: Scope, place: int, kind: int, piece: Piece | None = None) -> Piece:
        """Remove a piece (any of its kind if none is named) from a place's list."""
        pieces = self.held[scope][place][kind]
        found = pieces.pop() if piece is None else pieces.pop(pieces.index(piece))
        if not pieces:
            del self.held[scope][place][kind]
        return found

    # Soft maxima

    def _scaled(self) -> tuple[Floats, Floats, Floats]:
        """Largest loads [T], loads relative to them to the power p [R, T], their sums [T]."""
        times = self.loads[:, self.times]
        largest = np.maximum(times.max(axis=0), 1e-12)
        powers = self._power(times / largest)
        return largest, powers, powers.sum(axis=0)

    def _power(self, values: Floats) -> Floats:
        """``values`` to the power 2^k; infinite where that is out of range, which rules out."""
        with np.errstate(over="ignore"):
            for _ in range(self.doublings):
                values = values * values
        return values

    def _soft_step_s(self, sums: Floats, largest: Floats) -> Floats:
        """The step under softened maxima. ``sums``: [..., T]."""
        mean = np.maximum(sums, 0.0) / self.program.ranks
        for _ in range(self.doublings):
            mean = np.sqrt(mean)
        # One row per component in memory: the step graph looks at one after another.
        slowest = np.empty((len(COMPONENTS), *sums.shape[:-1]))
        slowest.T[:] = self.loads.max(axis=0)
        slowest[self.times] = np.moveaxis(largest * mean, -1, 0)
        return self.program.times.step_s(np.moveaxis(slowest, 0, -1))

    @property
    def soft_step_s(self) -> float:
        largest, _, sums = self._scaled()
        return float(self._soft_step_s(sums, largest))

    # Moves and swaps

    def relieve(self, scope: Scope, place: int) -> bool:
        """The best move or swap of a piece at a place with another place; whether any helped."""
        mine = sorted(self.held[scope][place])
        if not mine:
            return False
        partners = [other for other in self.by_pressure(scope) if other != place][-PARTNERS:]
        others = [
            (other, kind)
            for other in sorted(partners)
            for kind in (-1, *sorted(self.held[scope][other]))
        ]
        if not others:
            return False
        self.effort -= len(mine) * len(others)
        loads_of = np.vstack([self.kind_loads, np.zeros(len(COMPONENTS))])
        where = np.array([other for other, _ in others])
        given, taken = np.array(mine), np.array([kind for _, kind in others])
        change = loads_of[taken][None] - loads_of[given][:, None]
        largest, powers, sums = self._scaled()
        here = self._ranks(scope, np.array([place]))[0]
        there = self._ranks(scope, where)
        after = sums - powers[here].sum(axis=0) - powers[there].sum(axis=1)
        after = np.broadcast_to(after, (len(mine), *after.shape)).copy()
        fits = np.ones(change.shape[:2], dtype=bool)
        for r in range(len(here)):
            for new in (self.loads[here[r]] + change, self.loads[there[:, r]] - change):
                fits &= (new[..., MEMORY] <= self.program.room).all(axis=-1)
                relative = np.maximum(new[..., self.times], 0.0) / largest
                after += self._power(relative)
        steps = self._soft_step_s(after, largest)
        steps[~fits] = np.inf
        best = int(steps.argmin())
        if not steps.flat[best] < float(self._soft_step_s(sums, largest)) * (1 - GAIN):
            return False
        i, j = divmod(best, len(others))
        self._swap(scope, place, int(given[i]), int(where[j]), int(taken[j]))
        return True

    def _ranks(self, scope: Scope, places: Ints) -> Ints:
        """Ranks of each place; shape [places, ranks of one]."""
        if scope is Scope.RANK:
            return places[:, None]
        per_node = self.program.devices_per_node
        return places[:, None] * per_node + np.arange(per_node)

    def _swap(self, scope: Scope, place: int, given: int, other: int, taken: int) -> None:
        """Move a piece of kind ``given`` to ``other``, and one of ``taken`` (-1: none) back."""
        moved = [(self._take(scope, place, given), place, other, given)]
        if taken >= 0:
            moved.append((self._take(scope, other, taken), other, place, taken))
        for piece, source, target, kind in moved:
            g, t, index = piece
            choice = self.choices[g][t]
            places = (*choice.places[:index], target, *choice.places[index + 1 :])
            self.choices[g][t] = Choice(choice.option, places)
            self.held[scope][target].setdefault(kind, []).append(piece)
            self.loads[self.program.landing(scope, source)] -= self.kind_loads[kind]
            self.loads[self.program.landing(scope, target)] += self.kind_loads[kind]
        np.maximum(self.loads, 0.0, out=self.loads)

    # Options

    def reconsider(self, g: int, t: int) -> bool:
        """Give a table the option and places under which the soft step is shortest."""
        old, before, loads = self.choices[g][t], self.soft_step_s, self.loads
        bare = loads - self.program.loads[g][old.option].everywhere
        for shard in self.program.loads[g][old.option].shards:
            for piece in shard.pieces:
                bare[self.program.landing(shard.scope, old.places[piece])] -= shard.load
        np.maximum(bare, 0.0, out=bare)
        best_s, best, best_loads = before * (1 - GAIN), old, loads
        for o, option in enumerate(self.program.loads[g]):
            self.loads = bare + option.everywhere
            if self.soft_step_s >= best_s:
                continue
            places = self._put(option, len(self.program.classes[g].options[o].pieces))
            if places is None or not self.program.fits(self.loads):
                continue
            step_s = self.soft_step_s
            if step_s < best_s:
                best_s, best, best_loads = step_s, Choice(o, places), self.loads
        self.loads = loads
        if best is old:
            return False
        self._drop(g, t)
        self.choices[g][t] = best
        self._hold(g, t)
        self.loads = best_loads
        return True

    def _put(self, option: OptionLoads, pieces: int) -> tuple[int, ...] | None:
        """Places for an option's pieces, each where the soft step grows least."""
        places = [0] * pieces
        for shard in sorted(option.shards, key=lambda s: -float(s.load[self.times].sum())):
            ranks = self._ranks(shard.scope, np.arange(self.places[shard.scope]))
            for piece in shard.pieces:
                self.effort -= len(ranks)
                largest, powers, sums = self._scaled()
                new = self.loads[ranks] + shard.load
                after = sums - powers[ranks].sum(axis=1)
                after += self._power(new[..., self.times] / largest).sum(axis=1)
                steps = self._soft_step_s(after, largest)
                steps[(new[..., MEMORY] > self.program.room).any(axis=(1, 2))] = np.inf
                place = int(steps.argmin())
                if not np.isfinite(steps[place]):
                    return None
                places[piece] = place
                self.loads[ranks[place]] += shard.load
        return tuple(places)

    # Passes

    def weigh(self) -> None:
        """Note how much the step depends on each component."""
        slowest = self.loads.max(axis=0)
        self.importance = (self.program.times.sensitivity(slowest) * slowest)[self.times]

    def by_pressure(self, scope: Scope) -> list[int]:
        """Places, those that the softened step depends on most first."""
        _, powers, sums = self._scaled()
        pressure = (powers / np.maximum(sums, 1e-300)) @ self.importance
        if scope is Scope.NODE:
            pressure = pressure.reshape(self.program.nodes, -1).sum(axis=1)
        return [int(place) for place in np.argsort(-pressure, kind="stable")]

    def tables_of(self, places: Sequence[int], scope: Scope) -> list[tuple[int, int]]:
        """One table of each class and option with a piece at each of these places."""
        found: dict[tuple[int, int, int], tuple[int, int]] = {}
        for place in places:
            for pieces in self.held[scope][place].values():
                for g, t, _ in pieces:
                    found.setdefault((place, g, self.choices[g][t].option), (g, t))
        return list(dict.fromkeys(found.values()))


def balance(
    program: PoolProgram, assignment: Assignment, enough_s: float, deadline: float
) -> Assignment:
    """A placement no worse than the given one.

    Stops when the step is no longer than ``enough_s``, nothing helps any more, the effort is spent,
    or the monotonic clock has passed ``deadline``.
    """
    state = Balance(program, assignment)
    best_s, best = state.step_s, assignment
    for doublings in DOUBLINGS:
        state.doublings = doublings
        for _ in range(PASSES):
            if best_s <= enough_s or state.effort <= 0 or time.monotonic() > deadline:
                return best
            helped = _one_pass(state)
            if state.step_s < best_s:
                best_s, best = state.step_s, state.assignment()
            if not helped:
                break
    return best


def _one_pass(state: Balance) -> bool:
    """Moves and swaps of the places under most pressure until none helps; where none did, other
    options for their tables."""
    helped = False
    state.weigh()
    for scope in (Scope.NODE, Scope.RANK):
        for place in state.by_pressure(scope)[:HOT]:
            while state.effort > 0 and state.relieve(scope, place):
                helped = True
    if helped:
        return True
    for scope in (Scope.NODE, Scope.RANK):
        for g, t in state.tables_of(state.by_pressure(scope)[:HOTTEST], scope):
            if state.effort > 0 and len(state.program.loads[g]) > 1:
                helped |= state.reconsider(g, t)
    return helped
