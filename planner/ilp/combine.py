"""Whole patterns put together to a placement.

Notation of ``patterns``; of its patterns, w are the parts with node pieces and p those with rank
pieces, and they combine wherever one node has room for both.

    n[w,p]    ranks with pattern p in nodes with pattern w
    M[w]      nodes with pattern w;  both integer

    (28) min S + sum_j price_j u_j   subject to (4), (5)
    (29) sum_{w,p} p_j n[w,p] + u_j >= a_j  (ranks),  sum_w w_j M[w] + u_j >= a_j  (nodes)
    (30) sum_p n[w,p] = D M[w];  sum_w M[w] = N
    (31) S[b] + (w_b + p_b) used[w,p] <= cap[b];  n[w,p] <= R used[w,p]

Pieces left out are put where they make the least load.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pulp

from planner.cost.load import Scope
from planner.ilp.formulation import expression
from planner.ilp.patterns import TOLERANCE, Packing, Region
from planner.ilp.program import HBM, HOST, Assignment, Choice, Floats, PoolProgram
from planner.ilp.rounding import complete

LEFT_OUT = 3.0
"""Price of a piece that is left out, as a share of its time."""


class Combination:
    """Equations (28) to (31) over the patterns that a region has room for."""

    def __init__(self, packing: Packing, region: Region) -> None:
        self.packing, self.program = packing, packing.program
        self.problem = pulp.LpProblem("patterns", pulp.LpMinimize)
        limit = np.array([region.d[1], *(1 - low for low, _ in region.filled)]) * (1 + TOLERANCE)
        fitting = [
            pattern
            for pattern, load in zip(packing.patterns, packing.pattern_loads, strict=True)
            if (load <= limit).all()
        ]
        empty = np.zeros(len(packing.kinds))
        self.on_nodes = _distinct([empty, *(np.where(packing.on_nodes, q, 0) for q in fitting)])
        self.on_ranks = _distinct([empty, *(np.where(packing.on_nodes, 0, q) for q in fitting)])
        node_loads, rank_loads = (
            np.array(patterns) @ packing.loads for patterns in (self.on_nodes, self.on_ranks)
        )
        together = node_loads[:, None] + rank_loads
        self.loads = {
            (int(w), int(p)): together[w, p]
            for w, p in np.argwhere((together <= limit).all(axis=-1))
        }
        """Of the combinations that fit; [3]."""

    def build(self, region: Region) -> None:
        """Make the problem."""
        program, problem = self.program, self.problem
        everywhere = [problem.add_variable("S", 0)]
        everywhere += [
            problem.add_variable(f"S_{b}", 0, high) for b, (_, high) in enumerate(region.filled)
        ]
        self.left_out = [problem.add_variable(f"u_{j}", 0) for j in range(len(self.packing.kinds))]
        prices = LEFT_OUT * self.packing.loads[:, 0]
        problem += everywhere[0] + expression(
            list(zip(self.left_out, prices.tolist(), strict=True))
        )  # (28)
        self.x = self._options(everywhere)
        self.n = {
            (w, p): problem.add_variable(f"n_{w}_{p}", 0, program.ranks, pulp.LpInteger)
            for w, p in self.loads
        }
        self.nodes = [
            problem.add_variable(f"M_{w}", 0, program.nodes, pulp.LpInteger)
            for w in range(len(self.on_nodes))
        ]
        problem += pulp.lpSum(self.nodes) == program.nodes  # (30)
        for w, count in enumerate(self.nodes):
            inside = pulp.lpSum(n for (v, _), n in self.n.items() if v == w)
            problem += inside == program.devices_per_node * count
        for j, kind in enumerate(self.packing.kinds):
            pieces = [
                (self.x[g][o], float(len(program.loads[g][o].shards[k].pieces)))
                for g, o, k in kind.sources
            ]
            held = [(self.left_out[j], 1.0)]
            if kind.scope is Scope.NODE:
                held += [(m, q[j]) for m, q in zip(self.nodes, self.on_nodes, strict=True) if q[j]]
            else:
                held += [
                    (n, self.on_ranks[p][j]) for (_, p), n in self.n.items() if self.on_ranks[p][j]
                ]
            problem += expression(held) >= expression(pieces)  # (29)
        for pair, load in self.loads.items():  # (31)
            tight = [b for b in (1, 2) if load[b] + region.filled[b - 1][1] > 1]
            if tight:
                used = problem.add_variable(f"used_{pair[0]}_{pair[1]}", 0, 1, pulp.LpInteger)
                problem += self.n[pair] <= program.ranks * used
                for b in tight:
                    problem += everywhere[b] + float(load[b]) * used <= 1

    def _options(self, everywhere: list[pulp.LpVariable]) -> list[list[pulp.LpVariable]]:
        """x with equations (4) and (5)."""
        x = [
            [
                self.problem.add_variable(f"x_{g}_{o}", 0, len(group.tables), pulp.LpInteger)
                for o in range(len(group.options))
            ]
            for g, group in enumerate(self.program.classes)
        ]
        for row, group in zip(x, self.program.classes, strict=True):
            self.problem += pulp.lpSum(row) == len(group.tables)
        components = (self.packing.component, HBM, HOST)
        for c, scale, total in zip(components, self.packing.scale, everywhere, strict=True):
            part = [
                (x[g][o], float(option.everywhere[c] * scale))
                for g, loads in enumerate(self.program.loads)
                for o, option in enumerate(loads)
            ]
            self.problem += expression([*part, (total, -1.0)]) == 0
        return x

    def assignment(self) -> Assignment | None:
        """The solution; what patterns hold beyond need is left out. None if there is no room for
        tables with pieces that are in no pattern."""
        places, program = self._places(), self.program
        chosen: list[list[Choice | None]] = [[] for _ in program.classes]
        kind_of = kinds_by_source(self.packing)
        for g, row in enumerate(self.x):
            for o, variable in enumerate(row):
                for _ in range(round(variable.value())):
                    where = [0] * len(program.classes[g].options[o].pieces)
                    shards = [
                        (shard, places[kind_of[g, o, k]])
                        for k, shard in enumerate(program.loads[g][o].shards)
                    ]
                    held = all(len(at) >= len(shard.pieces) for shard, at in shards)
                    for shard, at in shards if held else ():
                        for piece in shard.pieces:
                            where[piece] = at.pop()
                    chosen[g].append(Choice(o, tuple(where)) if held else None)
        return complete(program, chosen)

    def _places(self) -> list[list[int]]:
        """Ranks, or nodes, that have room for a piece of each kind, one entry per piece."""
        places: list[list[int]] = [[] for _ in self.packing.kinds]
        node = 0
        waiting = {pair: round(n.value()) for pair, n in self.n.items()}
        for w, count in enumerate(self.nodes):
            ranks = [p for (v, p), many in waiting.items() if v == w for _ in range(many)]
            for index in range(round(count.value())):
                for j in np.flatnonzero(self.on_nodes[w]):
                    places[j] += [node] * int(self.on_nodes[w][j])
                per_node = self.program.devices_per_node
                mine = ranks[index * per_node : (index + 1) * per_node]
                for offset, p in enumerate(mine):
                    for j in np.flatnonzero(self.on_ranks[p]):
                        places[j] += [node * per_node + offset] * int(self.on_ranks[p][j])
                node += 1
        return places


def patterns_of(packing: Packing, program: PoolProgram, assignment: Assignment) -> Iterator[Floats]:
    """Patterns of a placement, each once: those of its ranks, with their nodes' pieces.

    Args:
        program: has the placement's options; pieces that the packing does not know are left out.
    """
    known = {(kind.scope, kind.load): j for j, kind in enumerate(packing.kinds)}
    held = np.zeros((program.ranks, len(packing.kinds)))
    for g, row in enumerate(assignment):
        for choice in row:
            for shard in program.loads[g][choice.option].shards:
                j = known.get((shard.scope, packing.key(shard.load)))
                for piece in shard.pieces if j is not None else ():
                    held[program.landing(shard.scope, choice.places[piece]), j] += 1
    yield from _distinct(list(held))


def kinds_by_source(packing: Packing) -> dict[tuple[int, int, int], int]:
    """Kind of the pieces of a (class of tables, option, class of pieces)."""
    return {source: j for j, kind in enumerate(packing.kinds) for source in kind.sources}


def _distinct(patterns: list[Floats]) -> list[Floats]:
    return list({pattern.tobytes(): pattern for pattern in patterns}.values())
