"""The placement program of one pool, exact and in aggregate.

Notation (one pool with R ranks in N equal nodes):

    g, m_g          class of equal tables, and how many there are
    o               placement option of a class
    k, mu_k         class of equal pieces of an option, and how many there are
    r, n            rank, node
    c               component of the rank load that takes time; b: one that takes memory
    A[g,o,c]        what option o puts on every rank, wherever its pieces land
    P[g,o,k,c]      what one piece of class k puts on the rank (every rank of the node) it lands on
    cap[b]          room of a rank for tables, bytes
    s[i], C(i)      fixed seconds of operation i of the step graph, and its load components
    pred(i), w[i]   operations that i comes after, and its earliest start

Variables:

    x[g,o]   in 0..m_g      tables of class g that take option o
    y[g,o,k,p]  integer >= 0   pieces of class k that land on place p (rank or node; exact only)
    z[g,o]   in {0,1}       whether any table of g takes o (aggregate only; x itself if m_g = 1)
    S[c]     what lies on every rank
    L[c]     load of the slowest rank
    e[i]     end of operation i
    T        the step

Program:

    (1)  min T
    (2)  T >= e[i]                                                   for all i
    (3)  e[i] >= e[j] + s[i] + L[c]                                  j in pred(i), c in C(i)
         e[i] >= w[i] + s[i] + L[c]                                  c in C(i); L = 0 if C(i) = {}
    (4)  sum_o x[g,o] = m_g                                          for all g
    (5)  S[c] = sum_{g,o} A[g,o,c] x[g,o]                            for all c and b

    exact, per rank:
    (6)  sum_p y[g,o,k,p] = mu_k x[g,o]                              for all g, o, k
    (7)  L[c] >= S[c] + sum_{g,o,k} P[g,o,k,c] y[g,o,k,p(r)]         for all c, r
    (8)  cap[b] >= S[b] + sum_{g,o,k} P[g,o,k,b] y[g,o,k,p(r)]       for all b, r
    (9)  ranks of a node, and nodes by their first rank, in order of descending load of one
         component: ranks are interchangeable, and this picks one of each set of equal solutions

    aggregate, whatever the number of ranks (a relaxation: averaging (7) and (8) over r gives
    (10) and (11); a rank that holds a piece has at least that piece, hence (12)):
    (10) L[c] >= sum_{g,o} M[g,o,c] x[g,o],   M = A + sum_k P mu_k / (R or N)
    (11) cap[b] >= sum_{g,o} M[g,o,b] x[g,o]
    (12) L[c] >= S[c] + P[g,o,k,c] z[g,o];   x[g,o] <= m_g z[g,o]
    (13) L[c] >= S[c] + h q[c,h];   R q[c,h] >= sum floor(P[g,o,k,c] / h) mu_k x[g,o];   q integer
         (pieces hold whole multiples of h, and some rank holds at least the rounded-up mean number
         of them; likewise for node pieces and N; for a few large h, and only where integers are
         kept)

(11) and (12) hold for memory alike, with cap[b] in the place of L[c].

Times are in units of ``unit_s`` and memory in units of ``cap``, so that the solver's absolute
tolerances mean the same for every problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pulp

from planner.cost.load import COMPONENTS, Scope
from planner.ilp.program import HBM, HOST, Assignment, Choice, PoolProgram

THRESHOLDS = 5
"""Sizes h of equation (13) per component."""
LARGE = 0.1
"""The smallest of them, as a share of the largest piece."""

PieceKey = tuple[int, int, int]
"""Class of tables, option, class of pieces."""


@dataclass
class Formulation:
    """A PuLP problem and the variables that its solution is read from."""

    program: PoolProgram
    problem: pulp.LpProblem
    unit_s: float
    """Seconds in one unit of the objective."""
    step: pulp.LpVariable
    """T."""
    slowest: dict[int, pulp.LpVariable] = field(default_factory=dict)
    """L by component."""
    everywhere: dict[int, pulp.LpVariable] = field(default_factory=dict)
    """S by component."""
    x: list[list[pulp.LpVariable]] = field(default_factory=list)
    y: dict[PieceKey, list[pulp.LpVariable]] = field(default_factory=dict)

    @property
    def solved(self) -> bool:
        """Whether the variables hold a solution."""
        return self.step.value() is not None

    def counts(self) -> list[list[int]]:
        """Tables of each class that take each option, in the solution."""
        return [[round(variable.value()) for variable in row] for row in self.x]

    def assignment(self) -> Assignment:
        """The solution of an exact formulation; equal tables and pieces are dealt out in order."""
        result = []
        for g, (row, group) in enumerate(zip(self.counts(), self.program.classes, strict=True)):
            choices = []
            for o, count in enumerate(row):
                shards = self.program.loads[g][o].shards
                places = [
                    [p for p, y in enumerate(self.y[g, o, k]) for _ in range(round(y.value()))]
                    for k in range(len(shards))
                ]
                for index in range(count):
                    chosen = [0] * len(group.options[o].pieces)
                    for shard, dealt in zip(shards, places, strict=True):
                        size = len(shard.pieces)
                        mine = dealt[index * size : (index + 1) * size]
                        for piece, place in zip(shard.pieces, mine, strict=True):
                            chosen[piece] = place
                    choices.append(Choice(o, tuple(chosen)))
            result.append(tuple(choices))
        return tuple(result)


def exact(program: PoolProgram, unit_s: float) -> Formulation:
    """Equations (1) to (9): its optimum is the pool's optimum."""
    form = _common(program, unit_s, memory=True)
    problem, slowest, everywhere = form.problem, form.slowest, form.everywhere
    terms: list[dict[int, list[tuple[pulp.LpVariable, float]]]] = [
        {c: [] for c in everywhere} for _ in range(program.ranks)
    ]
    scale = scales(program, unit_s)
    for g, loads in enumerate(program.loads):
        most = len(program.classes[g].tables)
        for o, option in enumerate(loads):
            for k, shard in enumerate(option.shards):
                places = program.nodes if shard.scope is Scope.NODE else program.ranks
                mu = len(shard.pieces)
                y = [
                    problem.add_variable(f"y_{g}_{o}_{k}_{p}", 0, mu * most, pulp.LpInteger)
                    for p in range(places)
                ]
                form.y[g, o, k] = y
                problem += expression([(v, 1.0) for v in y] + [(form.x[g][o], -mu)]) == 0  # (6)
                for p, variable in enumerate(y):
                    landing = program.landing(shard.scope, p)
                    for r in range(landing.start, landing.stop):
                        for c in everywhere:
                            if shard.load[c] > 0:
                                terms[r][c].append((variable, shard.load[c] * scale(c)))
    for rank in terms:
        for c, loaded in rank.items():
            limit = 1.0 if c in (HBM, HOST) else slowest[c]
            problem += expression([*loaded, (everywhere[c], 1.0)]) <= limit  # (7), (8)
    for first, second in _ordered_ranks(program):
        c = program.times.components[0] if program.times.components else HBM
        pairs = [*terms[first][c], *((v, -load) for v, load in terms[second][c])]
        if pairs:
            problem += expression(pairs) >= 0  # (9)
    return form


def aggregate(
    program: PoolProgram,
    unit_s: float,
    memory: bool = True,
    counting: bool = True,
    until: str | None = None,
) -> Formulation:
    """Equations (1) to (5) and (10) to (13): its optimum is a lower bound of the pool's.

    Args:
        memory: whether memory is constrained at all.
        counting: whether to include (13), which is of no use to the LP relaxation.
        until: minimise the end of this operation instead of the step.
    """
    form = _common(program, unit_s, memory, until)
    problem, slowest, everywhere = form.problem, form.slowest, form.everywhere
    scale = scales(program, unit_s)
    for c in everywhere:
        limit = 1.0 if c in (HBM, HOST) else slowest[c]
        mean = [
            (form.x[g][o], option.mean[c] * scale(c))
            for g, loads in enumerate(program.loads)
            for o, option in enumerate(loads)
            if option.mean[c] > 0
        ]
        problem += expression(mean) <= limit  # (10), (11)
    for g, loads in enumerate(program.loads):
        most = len(program.classes[g].tables)
        for o, option in enumerate(loads):
            if not option.shards:
                continue
            z = form.x[g][o]
            if most > 1:
                z = problem.add_variable(f"z_{g}_{o}", 0, 1, pulp.LpInteger)
                problem += expression([(form.x[g][o], 1.0), (z, -most)]) <= 0
            for c in everywhere:
                limit = 1.0 if c in (HBM, HOST) else slowest[c]
                largest = max(float(shard.load[c]) for shard in option.shards)
                if largest > 0:
                    problem += expression([(everywhere[c], 1.0), (z, largest * scale(c))]) <= limit
    if counting:
        for scope in (Scope.RANK, Scope.NODE):
            _count_pieces(form, scope)
    return form


def _count_pieces(form: Formulation, scope: Scope) -> None:
    """Equation (13) for the pieces that land on a rank, or on a node."""
    program, scale = form.program, scales(form.program, form.unit_s)
    places = program.nodes if scope is Scope.NODE else program.ranks
    pieces = [
        (shard.load, form.x[g][o], len(shard.pieces))
        for g, loads in enumerate(program.loads)
        for o, option in enumerate(loads)
        for shard in option.shards
        if shard.scope is scope
    ]
    for c, everywhere in form.everywhere.items():
        sizes = sorted({float(load[c]) for load, _, _ in pieces if load[c] > 0}, reverse=True)
        large = [size for size in sizes if size >= sizes[0] * LARGE]
        for index, size in enumerate(large[:: max(1, len(large) // THRESHOLDS)]):
            q = form.problem.add_variable(f"q_{scope}_{c}_{index}", 0, None, pulp.LpInteger)
            counted = [
                (x, mu * float(load[c] // size)) for load, x, mu in pieces if load[c] >= size
            ]
            form.problem += expression([*counted, (q, -float(places))]) <= 0
            limit = 1.0 if c in (HBM, HOST) else form.slowest[c]
            form.problem += expression([(everywhere, 1.0), (q, size * scale(c))]) <= limit


def scales(program: PoolProgram, unit_s: float) -> Callable[[int], float]:
    """Base units of a component to the formulation's units."""
    room = {HBM: program.hbm_room_bytes, HOST: program.host_room_bytes}

    def factor(component: int) -> float:
        return 1 / (max(room[component], 1.0) if component in room else unit_s)

    return factor


def _common(
    program: PoolProgram, unit_s: float, memory: bool, until: str | None = None
) -> Formulation:
    """Equations (1) to (5)."""
    problem = pulp.LpProblem("placement", pulp.LpMinimize)
    step = problem.add_variable("T", 0)
    form = Formulation(program, problem, unit_s, step)
    problem += step  # (1)
    form.slowest = slowest = {
        c: problem.add_variable(f"L_{COMPONENTS[c]}", 0) for c in program.times.components
    }
    predecessors = program.graph.predecessors()
    end: dict[str, pulp.LpVariable] = {}
    for index, operation in enumerate(program.graph.operations):
        variable = end[operation.name] = problem.add_variable(f"e_{index}", 0)
        begins: list[pulp.LpVariable | float] = [end[name] for name in predecessors[operation.name]]
        earliest = program.not_before.get(operation.name, 0.0)
        if earliest > 0 or not begins:
            begins.append(earliest / unit_s)
        lasts: list[pulp.LpVariable | float] = [
            slowest[COMPONENTS.index(name)] for name in operation.loads
        ] or [0.0]
        for begin in begins:
            for last in lasts:
                problem += variable >= begin + last + operation.seconds / unit_s  # (3)
        if until in (None, operation.name):
            problem += step >= variable  # (2)
    scale = scales(program, unit_s)
    components = [*program.times.components, *((HBM, HOST) if memory else ())]
    parts: dict[int, list[tuple[pulp.LpVariable, float]]] = {c: [] for c in components}
    for g, (group, loads) in enumerate(zip(program.classes, program.loads, strict=True)):
        most = len(group.tables)
        row = [
            problem.add_variable(f"x_{g}_{o}", 0, most, pulp.LpInteger)
            for o in range(len(group.options))
        ]
        form.x.append(row)
        problem += expression([(variable, 1.0) for variable in row]) == most  # (4)
        for variable, option in zip(row, loads, strict=True):
            for c in components:
                if option.everywhere[c] > 0:
                    parts[c].append((variable, option.everywhere[c] * scale(c)))
    form.everywhere = {c: problem.add_variable(f"S_{COMPONENTS[c]}", 0) for c in components}
    for c, part in parts.items():
        problem += expression([*part, (form.everywhere[c], -1.0)]) == 0  # (5)
    return form


def expression(terms: list[tuple[pulp.LpVariable, float]]) -> pulp.LpAffineExpression:
    """The linear expression; a variable may occur several times."""
    total: dict[pulp.LpVariable, float] = {}
    for variable, factor in terms:
        total[variable] = total.get(variable, 0.0) + float(factor)
    return pulp.LpAffineExpression(total)


def _ordered_ranks(program: PoolProgram) -> list[tuple[int, int]]:
    """Pairs of ranks of which the first carries at least as much as the second."""
    per_node = program.devices_per_node
    inside = [(rank, rank + 1) for rank in range(program.ranks - 1) if (rank + 1) % per_node != 0]
    across = [(node * per_node, (node + 1) * per_node) for node in range(program.nodes - 1)]
    return inside + across
