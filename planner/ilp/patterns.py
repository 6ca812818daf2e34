"""Patterns of pieces that one rank can hold: a linear program whose bound knows of packing.

For programs whose step is the slowest rank's load of one component. The aggregate program lets
pieces be cut at will, so its bound says nothing of how few of them fill a rank; here a rank holds
whole pieces. In addition to ``formulation``, and with L = S + D for the slowest rank:

    j, t_j, b_j     kind of equal pieces: time and memory that one puts on a rank it lands on
    a_j             tables' pieces of kind j: sum mu x over the classes of pieces of kind j
    q               pattern of a node: pieces of node scope, and those of rank scope on each of
                    its ranks; q_j counts both (rank scope: per rank), w_j = 1 (node), D (rank)
    n[q]            nodes with pattern q, continuous
    d               an upper limit of D; rho[b] a lower limit of S[b]
    u_j             pieces of kind j left out, at a price

    (24) f(d) = min S + sum_j price_j u_j   subject to (4), (5), (11)
    (25) sum_q w_j q_j n[q] + u_j >= a_j                             for all j
    (26) sum_q n[q] <= N
    (27) patterns: sum_j t_j q_j <= d, sum_j b_j q_j <= cap[b] - rho[b]

A placement with lo <= D <= d satisfies (24) to (27) with its ranks averaged inside each node (the
ranks of a node hold the same node pieces, so each of its ranks' pieces beside them are a pattern of
the node), so its step is at least lo + f(d). Bounds for an interval of D come from cutting it.

Patterns are made as they are needed (column generation): with the duals of (25) and (26), an
integer knapsack finds the pattern of least reduced cost, and Lagrange's bound, f >= objective - N
times the largest gain of any pattern, holds at every iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import highspy
import numpy as np

from planner.cost.load import Scope
from planner.ilp.program import HBM, HOST, Floats, PoolProgram
from planner.ilp.solve import new_highs
from planner.ilp.stack import BUCKETS, Stack, doublings, stack

ROUNDS = 400
"""Patterns made for one value of d at most."""
CLOSE = 2e-4
"""Share of the step up to which a gain of further patterns is not sought."""
DEARER = 4.0
"""Factor on the price of pieces left out when some are."""

TOLERANCE = 1e-9
SAFETY = 1 - 1e-7
"""Ranges are widened by the solver's tolerance."""
FREE = highspy.kHighsInf
MEMORY = (HBM, HOST)


@dataclass(frozen=True)
class Kind:
    """Pieces that put the same on the ranks that they land on."""

    scope: Scope
    load: tuple[float, float, float]
    """Time (units of ``Packing.unit_s``), device and host memory (shares of the room)."""
    sources: tuple[tuple[int, int, int], ...]
    """(class of tables, option, class of pieces) with such pieces."""
    most: int
    """Pieces that there can be."""


Key = tuple[int, int]
"""Class of tables, option."""
Range = tuple[float, float]


@dataclass(frozen=True, order=True)
class Region:
    """Placements that are looked at. Shares of the room for memory."""

    d: Range
    """What pieces put on the slowest rank."""
    filled: tuple[Range, Range] = ((0.0, 1.0), (0.0, 1.0))
    """S of device and host memory."""
    tables: tuple[tuple[Key, tuple[int, int]], ...] = ()
    """Fewest and most tables of a class that take an option, where that is limited."""


@dataclass(frozen=True)
class Relaxed:
    """f(d) lies between ``bound`` and ``value``."""

    bound: float
    value: float
    complete: bool
    """Whether no piece is left out."""
    top: tuple[float, float, float]
    """The most that a pattern in use puts on a rank, of time and memory: f is the same from here
    to d."""
    filled: tuple[float, float]
    """S of device and host memory."""
    x: Mapping[Key, float]
    """Tables of a class that take an option."""


class Packing:
    """The linear program with the patterns made so far; times in units of ``unit_s``."""

    def __init__(self, program: PoolProgram, unit_s: float, seed: int) -> None:
        (self.component,) = program.times.components
        self.program, self.unit_s = program, unit_s
        self.scale = np.array([1 / unit_s, *(1 / np.maximum(program.room, 1.0))])
        self.kinds = _kinds(program, self.scale, self.component)
        self.loads = np.array([kind.load for kind in self.kinds]).reshape(-1, 3)
        self.most = np.array([kind.most for kind in self.kinds])
        self.on_nodes = np.array([kind.scope is Scope.NODE for kind in self.kinds], dtype=bool)
        self.per_node = np.where(self.on_nodes, 1, program.devices_per_node)
        self.patterns: list[Floats] = []
        """Pieces of each kind; [J]."""
        self.pattern_loads: list[Floats] = []
        """[3]"""
        self.price = 4 * self.loads.sum(axis=1) * self.per_node / program.ranks
        self.options = [(g, o) for g, loads in enumerate(program.loads) for o in range(len(loads))]
        self.x = {key: 1 + index for index, key in enumerate(self.options)}
        """Columns of both programs; column 0 is S."""
        self.left_out = 1 + len(self.options)
        self.first_pattern = self.left_out + len(self.kinds)
        self.first_kind = len(program.classes) + 5
        self.nodes_row = self.first_kind + len(self.kinds)
        self.region_program = self._region_program(seed)
        self.master = self._master(seed)
        self.knapsack = _knapsack(self.loads, self.most, seed)

    def _base(self, seed: int) -> highspy.Highs:
        """S and x with (4), (5) of time, and (11)."""
        program, solver = self.program, new_highs(seed)
        solver.addCol(1.0, 0.0, FREE, 0, [], [])
        for g, _ in self.options:
            solver.addCol(0.0, 0.0, float(len(program.classes[g].tables)), 0, [], [])
        for g, loads in enumerate(program.loads):
            count = float(len(program.classes[g].tables))
            _row(solver, count, count, {self.x[g, o]: 1.0 for o in range(len(loads))})  # (4)
        everywhere, mean = self._loads("everywhere"), self._loads("mean")
        _row(solver, 0.0, FREE, {0: 1.0} | {self.x[k]: -v[0] for k, v in everywhere.items()})
        for b in (1, 2):
            _row(solver, -FREE, 1.0, {self.x[k]: v[b] for k, v in mean.items()})  # (11)
        for b in (1, 2):
            _row(solver, -FREE, 1.0, {self.x[k]: v[b] for k, v in everywhere.items()})  # (5)
        return solver

    def _loads(self, name: str) -> dict[tuple[int, int], list[float]]:
        """Scaled loads of every option; [3]."""
        return {
            (g, o): self.scaled(getattr(option, name)).tolist()
            for g, loads in enumerate(self.program.loads)
            for o, option in enumerate(loads)
        }

    def scaled(self, load: Floats) -> Floats:
        """Time and memory of a load in the program's units; [3]."""
        seen: Floats = load[[self.component, HBM, HOST]] * self.scale
        return seen

    def key(self, load: Floats) -> tuple[float, float, float]:
        """``Kind.load`` of pieces with a load."""
        time, hbm, host = self.scaled(load).tolist()
        return time, hbm, host

    def _region_program(self, seed: int) -> highspy.Highs:
        """The aggregate program relaxed: columns S, x, D, S[b]."""
        solver = self._base(seed)
        d = self.left_out
        solver.addCol(0.0, 0.0, FREE, 0, [], [])
        for _ in MEMORY:
            solver.addCol(0.0, 0.0, 1.0, 0, [], [])
        everywhere, mean = self._loads("everywhere"), self._loads("mean")
        terms = {self.x[k]: -v[0] for k, v in mean.items()}
        _row(solver, 0.0, FREE, {0: 1.0, d: 1.0} | terms)  # (10)
        for b in (1, 2):
            terms = {self.x[k]: -v[b] for k, v in everywhere.items()}
            _row(solver, 0.0, FREE, {d + b: 1.0} | terms)
        _row(solver, -FREE, FREE, {0: 1.0, d: 1.0})
        for column in self.x.values():
            solver.changeColIntegrality(column, highspy.HighsVarType.kInteger)
        solver.setOptionValue("mip_rel_gap", 1e-3)
        solver.setOptionValue("mip_max_nodes", 50)
        return solver

    def narrowed(self, region: Region, below: float) -> tuple[Region, float] | None:
        """The part of a region that the relaxed aggregate program leaves to steps below ``below``,
        and a bound of its steps from the program with whole tables; None if nothing."""
        solver, d = self.region_program, self.left_out
        self._limit_options(solver, region, np.array([region.d[1], 1.0, 1.0]))
        solver.changeColBounds(d, *region.d)
        for b, (fewest, most) in enumerate(region.filled):
            solver.changeColBounds(d + 1 + b, fewest, most)
        solver.changeRowBounds(solver.getNumRow() - 1, -FREE, below)
        solver.setOptionValue("solve_relaxation", True)
        ends: list[float] = []
        for column, sign in ((d, 1.0), (d, -1.0), (d + 1, 1.0), (d + 2, 1.0)):
            for other in (0, d, d + 1, d + 2):
                solver.changeColCost(other, sign if other == column else 0.0)
            solver.run()
            if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
                return None
            ends.append(sign * float(solver.getInfo().objective_function_value))
        solver.setOptionValue("solve_relaxation", False)
        for column in (0, d, d + 1, d + 2):
            solver.changeColCost(column, 1.0 if column in (0, d) else 0.0)
        solver.run()
        if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return None
        bound = float(solver.getInfo().mip_dual_bound) * SAFETY
        least, largest, *filled = ends
        (low, high), (hbm, host) = region.d, region.filled
        narrowed = replace(
            region,
            d=(max(low, least * SAFETY), min(high, largest / SAFETY)),
            filled=(
                (max(hbm[0], filled[0] * SAFETY), hbm[1]),
                (max(host[0], filled[1] * SAFETY), host[1]),
            ),
        )
        return narrowed, bound

    def _limit_options(self, solver: highspy.Highs, region: Region, room: Floats) -> None:
        """Bounds of x: options of which a piece overfills ``room`` [3] are ruled out."""
        too_large = {
            (g, o)
            for kind, load in zip(self.kinds, self.loads, strict=True)
            if (load > room * (1 + TOLERANCE)).any()
            for g, o, _ in kind.sources
        }
        limits = dict(region.tables)
        for (g, o), column in self.x.items():
            low, high = limits.get((g, o), (0, len(self.program.classes[g].tables)))
            solver.changeColBounds(column, float(low), float(0 if (g, o) in too_large else high))

    # Master program

    def _master(self, seed: int) -> highspy.Highs:
        solver = self._base(seed)
        for price in self.price:
            solver.addCol(float(price), 0.0, FREE, 0, [], [])
        for j, kind in enumerate(self.kinds):
            supply = {
                self.x[g, o]: -float(len(self.program.loads[g][o].shards[k].pieces))
                for g, o, k in kind.sources
            }
            _row(solver, 0.0, FREE, {self.left_out + j: 1.0} | supply)  # (25)
        _row(solver, -FREE, float(self.program.nodes), {})  # (26)
        return solver

    def add(self, pattern: Floats) -> None:
        """A pattern of a node; [J]."""
        self.patterns.append(pattern)
        self.pattern_loads.append(pattern @ self.loads)
        held = np.flatnonzero(pattern)
        rows = [*(self.first_kind + held).tolist(), self.nodes_row]
        values = [*(pattern * self.per_node)[held].tolist(), 1.0]
        self.master.addCol(0.0, 0.0, FREE, len(rows), rows, values)

    def _limit(self, region: Region) -> None:
        """Rule out patterns and options that have no place in a region."""
        room = np.array([region.d[1], *(1 - low for low, _ in region.filled)])
        for b, (_, high) in enumerate(region.filled):
            self.master.changeRowBounds(self.first_kind - 2 + b, -FREE, high)
        for index, load in enumerate(self.pattern_loads):
            high = FREE if (load <= room * (1 + TOLERANCE)).all() else 0.0
            self.master.changeColBounds(self.first_pattern + index, 0.0, high)
        with np.errstate(divide="ignore", invalid="ignore"):
            fit = np.where(self.loads > 0, room * (1 + TOLERANCE) / self.loads, np.inf)
        self.room, self.fitting = room, np.minimum(np.floor(fit.min(axis=1)), self.most)
        for j, most in enumerate(self.fitting):
            self.knapsack.changeColBounds(j, 0.0, float(most))
        for b in range(3):
            self.knapsack.changeRowBounds(b, -FREE, float(room[b]))
        self._limit_options(self.master, region, room)

    def relax(self, region: Region, enough: float) -> Relaxed:
        """f of a region's largest D, or a bound of it that is ``enough`` already."""
        d = region.d[1]
        self._limit(region)
        bound, value, complete = 0.0, float("inf"), False
        for _ in range(ROUNDS):
            self.master.run()
            if self.master.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
                return Relaxed(float("inf"), float("inf"), False, (d, 1.0, 1.0), (1.0, 1.0), {})
            value = float(self.master.getInfo().objective_function_value)
            duals = np.array(self.master.getSolution().row_dual)
            worth = np.maximum(duals[self.first_kind : self.nodes_row], 0.0) * self.per_node
            asked = -float(duals[self.nodes_row])
            pattern = self._good_pattern(worth)
            if float(worth @ pattern) > asked + CLOSE * (d + value) / self.program.nodes:
                self.add(pattern)
                continue
            pattern, most = self._best_pattern(worth)
            bound = max(bound, value - self.program.nodes * max(0.0, most - asked))
            if bound >= enough:
                break
            done = value - bound <= CLOSE * (d + value)
            if done or float(worth @ pattern) <= asked + 1e-12:
                complete = self._complete()
                if complete or not self._raise_prices(d):
                    break
            else:
                self.add(pattern)
        return self._relaxed(bound, value, complete)

    def _relaxed(self, bound: float, value: float, complete: bool) -> Relaxed:
        solution = self.master.getSolution()
        values = np.array(solution.col_value)
        used = [
            load
            for load, count in zip(self.pattern_loads, values[self.first_pattern :], strict=False)
            if count > TOLERANCE
        ]
        top = np.max(used, axis=0, initial=0.0) if used else np.zeros(3)
        hbm, host = solution.row_value[self.first_kind - 2 : self.first_kind]
        x = {key: float(values[column]) for key, column in self.x.items()}
        return Relaxed(bound, value, complete, tuple(top.tolist()), (hbm, host), x)

    def _good_pattern(self, worth: Floats) -> Floats:
        """A pattern that is worth much: by dynamic programming over time in ``BUCKETS``."""
        rank = self._stack(worth * ~self.on_nodes)
        if not self.on_nodes.any():
            return rank.pattern(BUCKETS)
        node = self._stack(worth * self.on_nodes)
        both = node.worth + rank.worth[::-1]
        both[((node.memory + rank.memory[::-1]) > self.room[1:]).any(axis=1)] = -1.0
        used = int(both.argmax())
        return node.pattern(used) + rank.pattern(BUCKETS - used)

    def _stack(self, worth: Floats) -> Stack:
        """Pieces of positive worth, by what they are worth per time."""
        usable = np.flatnonzero((worth > 0) & (self.fitting > 0))
        width = self.room[0] / BUCKETS
        return stack(
            len(self.kinds),
            [
                (int(j), many)
                for j in usable[np.argsort(-worth[usable] / self.loads[usable, 0])]
                for many in doublings(int(self.fitting[j]))
            ],
            np.ceil(self.loads[:, 0] / width * (1 - TOLERANCE)).astype(int),
            self.loads[:, 1:],
            worth,
            self.room[1:],
        )

    def _best_pattern(self, worth: Floats) -> tuple[Floats, float]:
        """The pattern that is worth most, and an upper bound of what any is worth."""
        scale = max(float(worth.max(initial=0.0)), 1e-12)
        for j, value in enumerate(worth):
            self.knapsack.changeColCost(j, -float(value) / scale)
        self.knapsack.run()
        counts = np.round(np.array(self.knapsack.getSolution().col_value))
        return counts, -float(self.knapsack.getInfo().mip_dual_bound) * scale

    def _complete(self) -> bool:
        values = np.array(self.master.getSolution().col_value)
        return bool(values[self.left_out : self.first_pattern].sum() <= 1e-6)

    def _raise_prices(self, d: float) -> bool:
        """Make leaving pieces out dearer, unless it is dear already."""
        dear = 10 * (d + 1)
        if float(self.price.min()) >= dear:
            return False
        self.price = np.minimum(self.price * DEARER, dear)
        for j, price in enumerate(self.price):
            self.master.changeColCost(self.left_out + j, float(price))
        return True


def _row(solver: highspy.Highs, low: float, high: float, terms: dict[int, float]) -> None:
    used = {column: value for column, value in terms.items() if value != 0}
    solver.addRow(low, high, len(used), list(used), list(used.values()))


def _kinds(program: PoolProgram, scale: Floats, component: int) -> list[Kind]:
    found: dict[tuple[Scope, tuple[float, ...]], list[tuple[int, int, int]]] = {}
    for g, loads in enumerate(program.loads):
        for o, option in enumerate(loads):
            for k, shard in enumerate(option.shards):
                load = tuple((shard.load[[component, HBM, HOST]] * scale).tolist())
                found.setdefault((shard.scope, load), []).append((g, o, k))
    kinds = []
    for (scope, load), sources in found.items():
        most: dict[int, int] = {}
        for g, o, k in sources:
            pieces = len(program.loads[g][o].shards[k].pieces)
            most[g] = max(most.get(g, 0), pieces * len(program.classes[g].tables))
        kinds.append(Kind(scope, (load[0], load[1], load[2]), tuple(sources), sum(most.values())))
    return kinds


def _knapsack(loads: Floats, most: Floats, seed: int) -> highspy.Highs:
    """Maximise what pieces are worth on one rank; three limits."""
    solver = new_highs(seed)
    solver.setOptionValue("mip_rel_gap", 1e-4)
    for j in range(len(loads)):
        solver.addCol(0.0, 0.0, float(most[j]), 0, [], [])
        solver.changeColIntegrality(j, highspy.HighsVarType.kInteger)
    for b in range(3):
        used = np.flatnonzero(loads[:, b])
        solver.addRow(-FREE, FREE, len(used), used.tolist(), loads[used, b].tolist())
    return solver
