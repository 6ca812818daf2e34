"""The aggregate program, with ranks (or nodes) told apart by how many heavy pieces they hold.

The aggregate program bounds the slowest rank by the mean, as if a rank could hold 1.75 heavy
tables. In truth some hold two and some one, and what else those with two may hold is limited by
what the slowest rank may carry. *Strata* say so. In addition to ``formulation``:

    p            a place: a rank, or a node; Q of them in the pool
    c*, h        a component and a size; a piece of that scope is heavy if P[c*] >= h
    t            number of heavy pieces on a place, 0 <= t <= m
    j, P[j,c]    kind of equal pieces of either scope, and what one adds to the load of a place
                 (the mean load of a node's ranks, the load of a rank: a rank piece adds P / ranks
                 per node to its node, a node piece adds P to each of its node's ranks)

    N[t]         integer: places with t heavy pieces;  N[t] = sum_i 2^i b[t,i],  b in {0,1}
    D[c]         L[c] - S[c], what pieces may put on a place; lo[c] <= D[c] <= hi[c]
    v[t,c,i]     b[t,i] D[c]
    n[j,t]       >= 0: pieces of kind j on places with t heavy pieces; integer for heavy ones

    (14) sum_t N[t] = Q
    (15) sum_t n[j,t] = sum mu x  over the classes of pieces of kind j
    (16) sum_{j heavy} n[j,t] = t N[t];  D[c*] >= t h b[t,i]
    (17) sum_j P[j,c] n[j,t] <= sum_i 2^i v[t,c,i] = N[t] D[c]         for all t, c
    (18) lo b <= v <= hi b;  D - hi (1 - b) <= v <= D - lo (1 - b);  sum_{t,i} 2^i v = Q D
    (19) T <= U

Proof that the optimum, or U if that is smaller, is a lower bound: take a placement with step below
U, and L[c] its slowest rank's load. Count its places by their heavy pieces and its pieces by the
stratum of their place; (14) to (16) hold, since a place with t heavy pieces carries at least t h.
(17) is (7) summed over the places of a stratum (over a node's ranks in the mean), (18) are exact
products of a binary, and lo, hi are optima of the relaxed aggregate program under (19). Where the
pieces' loads in one component are those of another times a factor, so are D, and only one of them
needs (17).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pulp

from planner.cost.load import COMPONENTS, Scope
from planner.ilp.formulation import Formulation, aggregate, expression, scales
from planner.ilp.program import Floats, PoolProgram
from planner.ilp.solve import SolverOptions, run

HEAVY_SHARE = 5
"""A piece is heavy if so many of them fill the slowest rank."""
MOST_STRATA = 9
"""More of them say little that the mean does not."""
RELEVANT = 1e-3
"""Components whose growth arrives in the step by less than this share are left out."""
SLACK = 1e-6
"""Ranges are widened by the solver's tolerance."""

Range = tuple[float, float]
Landing = tuple[Scope, Floats, pulp.LpVariable, int]
"""Scope and load of a class of pieces, the tables that have them, and how many each has."""


@dataclass(frozen=True)
class Heavy:
    """What makes a piece heavy: its load of one component."""

    scope: Scope
    component: int
    size: float


def heavies(program: PoolProgram, form: Formulation) -> list[Heavy]:
    """Ways to tell heavy pieces apart, by their weight in the solution of ``form``, a solved
    aggregate program; of those with the same heavy pieces, the first."""
    scale = scales(program, form.unit_s)
    slowest = np.zeros(len(COMPONENTS))
    for c, variable in form.slowest.items():
        slowest[c] = variable.value() / scale(c)
    sensitivity = program.times.sensitivity(slowest)
    found: dict[tuple[int, ...], tuple[float, Heavy]] = {}
    pieces = list(_landings(form))
    for scope in (Scope.RANK, Scope.NODE):
        places = program.nodes if scope is Scope.NODE else program.ranks
        for c in program.times.components:
            room = slowest[c] - form.everywhere[c].value() / scale(c)
            large = tuple(
                index
                for index, (at, load, _, _) in enumerate(pieces)
                if at is scope and load[c] >= room / HEAVY_SHARE > 0
            )
            if not large or places == 1:
                continue
            size = min(float(pieces[index][1][c]) for index in large)
            weight = sum(pieces[i][1][c] * pieces[i][2].value() * pieces[i][3] for i in large)
            weight *= sensitivity[c] / places
            if weight > found.get(large, (0.0,))[0]:
                found[large] = weight, Heavy(scope, c, size)
    return [heavy for _, heavy in sorted(found.values(), key=lambda pair: -pair[0])]


def _landings(form: Formulation) -> Iterator[Landing]:
    for g, loads in enumerate(form.program.loads):
        for o, option in enumerate(loads):
            for shard in option.shards:
                yield shard.scope, shard.load, form.x[g][o], len(shard.pieces)


def stratified(
    program: PoolProgram,
    unit_s: float,
    memory: bool,
    heavy: Heavy,
    below_s: float,
    options: SolverOptions,
) -> Formulation | None:
    """The aggregate program with equations (14) to (19), U = ``below_s``.

    None if no placement with a step below ``below_s`` can exist.
    """
    ranges = _ranges(program, unit_s, memory, heavy.component, below_s, options)
    if ranges is None:
        return None
    form = aggregate(program, unit_s, memory)
    form.problem += form.step <= below_s / unit_s  # (19)
    problem, scale = form.problem, scales(program, unit_s)
    rooms = {
        c: problem.add_variable(f"D_{COMPONENTS[c]}", low, high)
        for c, (low, high) in ranges.items()
    }
    for c, room in rooms.items():
        problem += room == form.slowest[c] - form.everywhere[c]
    for c, other, factor in _proportional(form, list(ranges)):
        ratio = factor * scale(other) / scale(c)
        problem += form.slowest[other] - form.everywhere[other] >= ratio * rooms[c]
        rooms.pop(other)
    places = program.nodes if heavy.scope is Scope.NODE else program.ranks
    size = heavy.size * scale(heavy.component)
    most = int(ranges[heavy.component][1] / size)
    if most > MOST_STRATA:
        return form
    strata = [_Stratum(form, t, places, rooms, ranges, heavy, size) for t in range(most + 1)]
    problem += pulp.lpSum(stratum.count for stratum in strata) == places  # (14)
    for c, room in rooms.items():
        problem += pulp.lpSum(stratum.room[c] for stratum in strata) == places * room  # (18)
    for index, (load, terms, is_heavy) in enumerate(_kinds(form, heavy, list(rooms))):
        numbers = [stratum.hold(index, load, is_heavy) for stratum in strata]
        problem += pulp.lpSum(numbers) == expression(terms)  # (15)
    for stratum in strata:
        stratum.close()
    return form


class _Stratum:
    """Places with ``t`` heavy pieces: their number, their room, and the pieces on them."""

    def __init__(
        self,
        form: Formulation,
        t: int,
        places: int,
        rooms: dict[int, pulp.LpVariable],
        ranges: dict[int, Range],
        heavy: Heavy,
        size: float,
    ) -> None:
        self.form, self.t = form, t
        problem = form.problem
        bits = [
            problem.add_variable(f"b_{t}_{i}", 0, 1, pulp.LpInteger)
            for i in range(places.bit_length())
        ]
        self.count = pulp.lpSum(2**i * bit for i, bit in enumerate(bits))
        self.room: dict[int, pulp.LpAffineExpression] = {}
        for c, room in rooms.items():
            low, high = ranges[c]
            products = []
            for i, bit in enumerate(bits):
                product = problem.add_variable(f"v_{t}_{c}_{i}", 0)
                least = max(low, t * size) if c == heavy.component else low
                problem += product >= least * bit  # (16), (18)
                problem += product <= high * bit
                problem += product <= room - low * (1 - bit)
                problem += product >= room - high * (1 - bit)
                products.append(2**i * product)
            self.room[c] = pulp.lpSum(products)
        self.heavy: list[pulp.LpVariable] = []
        self.load: dict[int, list[tuple[pulp.LpVariable, float]]] = {c: [] for c in rooms}

    def hold(self, kind: int, load: dict[int, float], is_heavy: bool) -> pulp.LpVariable:
        """The number of pieces of a kind in this stratum. ``load``: on a place, scaled."""
        most = 0 if is_heavy and self.t == 0 else None
        number = self.form.problem.add_variable(
            f"n_{kind}_{self.t}", 0, most, pulp.LpInteger if is_heavy else pulp.LpContinuous
        )
        if is_heavy:
            self.heavy.append(number)
        for c, value in load.items():
            if value > 0:
                self.load[c].append((number, value))
        return number

    def close(self) -> None:
        """Equations (16) and (17)."""
        self.form.problem += pulp.lpSum(self.heavy) == self.t * self.count
        for c, terms in self.load.items():
            self.form.problem += expression(terms) <= self.room[c]


def _kinds(
    form: Formulation, heavy: Heavy, components: list[int]
) -> Iterator[tuple[dict[int, float], list[tuple[pulp.LpVariable, float]], bool]]:
    """Equal pieces: load on a place, tables times pieces, whether heavy."""
    program, scale = form.program, scales(form.program, form.unit_s)
    kinds: dict[tuple[bool, bytes], tuple[Floats, list[tuple[pulp.LpVariable, float]]]] = {}
    for scope, load, x, mu in _landings(form):
        is_heavy = scope is heavy.scope and load[heavy.component] >= heavy.size
        seen = load[components]
        if scope is not heavy.scope:
            per_node = program.devices_per_node
            seen = seen * per_node if scope is Scope.NODE else seen / per_node
        _, terms = kinds.setdefault((is_heavy, seen.tobytes()), (seen, []))
        terms.append((x, float(mu)))
    for (is_heavy, _), (seen, terms) in kinds.items():
        yield (
            {c: v * scale(c) for c, v in zip(components, seen.tolist(), strict=True)},
            terms,
            is_heavy,
        )


def _proportional(form: Formulation, components: list[int]) -> Iterator[tuple[int, int, float]]:
    """Pairs (c, other, factor): every piece's load of ``other`` is ``factor`` times that of c."""
    pieces = np.array([load[components] for _, load, _, _ in _landings(form)])
    dropped: set[int] = set()
    for i, c in enumerate(components):
        for j in range(i + 1, len(components)):
            if c in dropped or components[j] in dropped or not pieces[:, i].any():
                continue
            factor = float(pieces[:, j].sum() / pieces[:, i].sum())
            if np.allclose(pieces[:, j], factor * pieces[:, i], rtol=1e-12, atol=0.0):
                dropped.add(components[j])
                yield c, components[j], factor * (1 - 1e-11)


def _ranges(
    program: PoolProgram,
    unit_s: float,
    memory: bool,
    first: int,
    below_s: float,
    options: SolverOptions,
) -> dict[int, Range] | None:
    """Least and largest D[c] of placements with a step below ``below_s``: of the component
    ``first`` and those that the step depends on there; None if there is no such placement."""
    form = aggregate(program, unit_s, memory, counting=False)
    form.problem += form.step <= below_s / unit_s
    slowest = np.zeros(len(COMPONENTS))
    result = {}
    for c in sorted(program.times.components, key=lambda c: c != first):
        if not any(load[c] > 0 for _, load, _, _ in _landings(form)):
            continue
        room = form.slowest[c] - form.everywhere[c]
        ends = []
        for sign in (1, -1):
            form.problem.setObjective(sign * room)
            outcome = run(form.problem, options, relaxed=True)
            if outcome.status == "infeasible":
                return None
            assert outcome.objective is not None, "bounded by (19), and small: it is solved"
            ends.append(sign * outcome.objective)
            slowest[c] = form.slowest[c].value() * unit_s
        low, high = ends
        result[c] = max(0.0, low - SLACK), high * (1 + SLACK) + SLACK
    relevant = program.times.sensitivity(slowest) > RELEVANT
    return {c: ends for c, ends in result.items() if relevant[c] or c == first}
