"""From counts of options to ranks: largest piece first; and no load without need.

An upper bound for the aggregate formulation's lower bound. Every candidate is scored by the step
graph itself, many candidates per evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from planner.cost.load import COMPONENTS, Scope
from planner.ilp.program import HBM, HOST, Assignment, Choice, Floats, OptionLoads, PoolProgram

EFFORT = 1500
"""Placements of a piece that ``lighten`` may try; a count, so that equal inputs give equal
plans on any machine."""
TIE = 1e-9
"""Steps closer than this (relative) count as equal."""

FREE: Mapping[int, int] = {}


class Ranks:
    """Loads of all ranks while tables are put on them and taken off again."""

    def __init__(self, program: PoolProgram, weights: Floats) -> None:
        self.program = program
        self.loads = np.zeros((program.ranks, len(COMPONENTS)))
        self.weights = weights
        """[C]: what a rank's load counts when the step does not decide."""
        self.effort = 0
        """Placements of a piece that may still be tried."""

    @property
    def step_s(self) -> float:
        return self.program.step_s(self.loads)

    @property
    def score(self) -> tuple[float, float]:
        """What is lowered: the step, then the loads (squares favour balance)."""
        return self.step_s, float(np.square(self.loads @ self.weights).sum())

    def put(
        self, option: OptionLoads, pieces: int, nodes: Mapping[int, int] = FREE
    ) -> tuple[int, ...] | None:
        """Put an option's pieces where the step grows least; None (unchanged) if none has room.

        Args:
            nodes: the node that a piece must land on, if it must.
        """
        self.effort -= max(1, sum(len(shard.pieces) for shard in option.shards))
        before = self.loads.copy()
        self.loads += option.everywhere
        places = [0] * pieces
        shards = sorted(option.shards, key=lambda shard: -float(self.weights @ shard.load))
        for shard in shards:
            for piece in shard.pieces:
                place = self._best_place(shard.scope, shard.load, nodes.get(piece))
                if place is None:
                    self.loads = before
                    return None
                places[piece] = place
                self.loads[self.program.landing(shard.scope, place)] += shard.load
        if not self.program.fits(self.loads):
            self.loads = before
            return None
        return tuple(places)

    def take(self, option: OptionLoads, places: Sequence[int]) -> None:
        """Undo ``put``."""
        self.loads = self.loads - option.everywhere
        for shard in option.shards:
            for piece in shard.pieces:
                self.loads[self.program.landing(shard.scope, places[piece])] -= shard.load
        np.maximum(self.loads, 0.0, out=self.loads)

    def _best_place(self, scope: Scope, load: Floats, node: int | None) -> int | None:
        grown = self.loads + load
        if scope is Scope.NODE:
            shape = (self.program.nodes, self.program.devices_per_node, -1)
            grown = grown.reshape(shape).max(axis=1)
        slowest = np.maximum(grown, self.loads.max(axis=0))
        step = self.program.times.step_s(slowest)
        step[(grown[:, [HBM, HOST]] > self.program.room).any(axis=1)] = np.inf
        if node is not None:
            elsewhere = np.ones(len(step), dtype=bool)
            elsewhere[node if scope is Scope.NODE else self.program.landing(Scope.NODE, node)] = 0
            step[elsewhere] = np.inf
        best = step.min()
        if not np.isfinite(best):
            return None
        tied = np.flatnonzero(step <= best * (1 + TIE))
        return int(tied[np.argmin((grown @ self.weights)[tied])])


def weights(program: PoolProgram, mean: Floats) -> Floats:
    """What a unit of each component counts: by its effect on the step, and by scarcity.

    Args:
        mean: load averaged over ranks; shape [C].
    """
    step = max(float(program.times.step_s(mean)), 1e-12)
    result = (program.times.sensitivity(mean) + 0.01) / step
    result[[HBM, HOST]] = 0.0
    for component, room in ((HBM, program.hbm_room_bytes), (HOST, program.host_room_bytes)):
        if room > 0:
            result[component] = min(1.0, mean[component] / room) ** 2 / room
    return result


NodesOfPieces = Mapping[tuple[int, int, int], Sequence[int]]
"""By table class, option and shard class: the node of each piece of all its tables, in order."""
ANYWHERE: NodesOfPieces = {}


def round_to_ranks(
    program: PoolProgram, counts: Sequence[Sequence[int]], nodes: NodesOfPieces = ANYWHERE
) -> Assignment | None:
    """Places for the pieces of ``counts[g][o]`` tables of class g under option o.

    None if largest-first finds no room for some piece.

    Args:
        nodes: where the pieces must land; empty: anywhere.
    """
    mean = np.zeros(len(COMPONENTS))
    items: list[tuple[int, int]] = []
    for g, row in enumerate(counts):
        for o, count in enumerate(row):
            mean += program.loads[g][o].mean * count
            items += [(g, o)] * count
    ranks = Ranks(program, weights(program, mean))
    sizes = {
        (g, o): max(
            (float(ranks.weights @ shard.load) for shard in program.loads[g][o].shards),
            default=np.inf,
        )
        for g, o in set(items)
    }
    found: list[list[Choice]] = [[] for _ in program.classes]
    for g, o in sorted(items, key=lambda item: (-sizes[item], item)):
        option = program.loads[g][o]
        index = sum(choice.option == o for choice in found[g])
        at: dict[int, int] = {}
        for k, shard in enumerate(option.shards if nodes else ()):
            dealt = nodes[g, o, k][index * len(shard.pieces) :]
            at |= zip(shard.pieces, dealt, strict=False)
        places = ranks.put(option, len(program.classes[g].options[o].pieces), at)
        if places is None:
            return None
        found[g].append(Choice(o, places))
    return tuple(tuple(choices) for choices in found)


def complete(program: PoolProgram, chosen: Sequence[Sequence[Choice | None]]) -> Assignment | None:
    """Tables without a choice given the option and places under which the step is shortest, one
    by one; None if there is no room."""
    missing = [(g, t) for g, row in enumerate(chosen) for t, one in enumerate(row) if one is None]
    choices = [[one or Choice(0, ()) for one in row] for row in chosen]
    placed = tuple(tuple(one for one in row if one is not None) for row in chosen)
    loads = program.rank_loads(placed)
    ranks = Ranks(program, weights(program, loads.mean(axis=0)))
    ranks.loads = loads
    if not program.fits(loads):
        return None
    for g, t in missing:
        if not _insert(ranks, choices, g, t):
            return None
    return tuple(tuple(row) for row in choices)


def _insert(ranks: Ranks, choices: list[list[Choice]], g: int, t: int) -> bool:
    """Give table t of class g, which is nowhere, its best option and places; whether any fits."""
    bare, best, best_loads = ranks.loads.copy(), None, ranks.loads
    score = (np.inf, np.inf)
    for o, option in enumerate(ranks.program.loads[g]):
        ranks.loads = bare.copy()
        places = ranks.put(option, len(ranks.program.classes[g].options[o].pieces))
        if places is not None and ranks.score < score:
            score, best, best_loads = ranks.score, Choice(o, places), ranks.loads
    ranks.loads = best_loads
    if best is None:
        return False
    choices[g][t] = best
    return True


def lighten(program: PoolProgram, assignment: Assignment) -> Assignment:
    """Tables one by one in the option and places that load the ranks least, the step no longer.

    The programs look at the step alone, so their answers may load ranks for nothing.
    """
    choices = [list(row) for row in assignment]
    loads = program.rank_loads(assignment)
    ranks = Ranks(program, weights(program, loads.mean(axis=0)))
    ranks.loads = loads
    ranks.effort = EFFORT
    for g, row in enumerate(choices):
        for t in range(len(row)):
            if ranks.effort > 0:
                _reinsert(ranks, choices, g, t)
    return tuple(tuple(row) for row in choices)


def _reinsert(ranks: Ranks, choices: list[list[Choice]], g: int, t: int) -> bool:
    """Give table t of class g its best option and places; whether the score fell."""
    program, old = ranks.program, choices[g][t]
    score, kept = ranks.score, ranks.loads.copy()
    ranks.take(program.loads[g][old.option], old.places)
    bare = ranks.loads.copy()
    best, best_loads = old, kept
    for o, option in enumerate(program.loads[g]):
        ranks.loads = bare.copy()
        places = ranks.put(option, len(program.classes[g].options[o].pieces))
        if places is None:
            continue
        new = ranks.score
        shorter = new[0] < score[0] * (1 - TIE)
        lighter = new[0] <= score[0] * (1 + TIE) and new[1] < score[1] * (1 - 1e-6)
        if shorter or lighter:
            score, best, best_loads = new, Choice(o, places), ranks.loads
    ranks.loads = best_loads
    choices[g][t] = best
    return best is not old
