"""Placements from patterns, and the bound that patterns prove.

For programs whose step is the slowest rank's load of one component; notation of ``patterns``.

Steps below a target (the best one known, less the gap) have D in a range [lo, hi], which the
relaxed aggregate program gives. The range is cut into intervals until each is ruled out,
a + f(b) >= target for [a, b], or the patterns of f(b) are put together to a placement
(``combine``). Where the solution of f(b) would be short enough, what is relaxed in it is ruled out:
memory that some pattern and S overfill together, then tables that are divided among options.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from planner.ilp.balance import balance
from planner.ilp.bounds import SAFETY, lean, relax, without_hopeless
from planner.ilp.combine import Combination, patterns_of
from planner.ilp.patterns import Packing, Region, Relaxed
from planner.ilp.pool import INFEASIBLE, Found, Goal, PoolSolution, Refinement, solve_pool
from planner.ilp.program import Assignment, PoolProgram
from planner.ilp.solve import SolverOptions, run

NODES = 200
"""Nodes of the search."""
INTEGER_NODES = 300
"""Branch-and-bound nodes of the integer program."""
LEAST_S = 1.0
"""Time for one when there is none left."""
MOST_COMBINATIONS = 4000
"""Combinations of node and rank patterns in one of them."""
STEP = 1e-4
"""Share by which f is extended beyond where it is known to be the same."""
WHOLE = 1e-6
NODE_EFFORT = 20_000
"""Branch-and-bound nodes, times variables, of a program that tells nodes apart."""
GUESS = 16
"""The first step looked for where none is known, over the bound."""


@dataclass(frozen=True, order=True)
class _Node:
    """A region; the steps of its placements are at least ``bound``."""

    bound: float
    region: Region
    flat: bool = False
    """Whether f is the same for all D of the region."""


def solve_by_patterns(program: PoolProgram, options: SolverOptions) -> PoolSolution:
    """The shortest step of one pool whose step is the slowest rank's load of one component.

    What the aggregate programs give, if that is within the gap; else improved with patterns, where
    HiGHS is the solver.
    """
    usable = without_hopeless(program)
    if usable is None:
        return INFEASIBLE
    if options.name != "highs":
        return solve_pool(program, options)
    first = Refinement(options, Goal())
    for part, memory in ((lean(usable), False), (usable, True)):
        if not first.done:
            first.aggregate(part, memory)
        if not first.done and usable.nodes > 1:
            first.tell_nodes_apart(NODE_EFFORT)
    if first.done or first.bound_s == float("inf"):
        return first.solution()
    bound_s = max(first.bound_s, relax(usable, memory=True).step_s)
    step_s = GUESS * bound_s if first.best is None else first.best.step_s
    search = _Search(usable, step_s, bound_s, options, first.deadline)
    if first.best is not None:
        search.learn(first.best.program, first.best.assignment)
    first.bound_s = max(first.bound_s, search.run())
    if search.assignment is not None:
        first.best = Found(usable, search.assignment, search.best * search.unit_s)
    return first.solution()


class _Search:
    """The best placement so far, in units of the bound that was known before."""

    def __init__(
        self,
        program: PoolProgram,
        step_s: float,
        bound_s: float,
        options: SolverOptions,
        deadline: float,
    ) -> None:
        self.program, self.options, self.deadline = program, options, deadline
        self.unit_s = bound_s
        self.best = step_s / self.unit_s
        self.assignment: Assignment | None = None
        self.packing = Packing(program, self.unit_s, options.seed)
        self.failures = self.waited = 0
        """Integer programs that did not help, and nodes since the last one: ever fewer are tried.
        """

    @property
    def target(self) -> float:
        """Placements above it are of no interest."""
        return self.best / (1 + self.options.mip_gap)

    def learn(self, program: PoolProgram, assignment: Assignment) -> None:
        """Take the patterns of a placement."""
        for pattern in patterns_of(self.packing, program, assignment):
            self.packing.add(pattern)

    def run(self) -> float:
        """Search; the bound that is proven, seconds."""
        heap = [_Node(1.0, Region((0.0, self.target)))]
        stuck = float("inf")
        """The least bound of a node that cannot be divided."""
        for _ in range(NODES):
            if not heap or min(heap[0].bound, stuck) >= self.target:
                break
            if time.monotonic() > self.deadline:
                break
            node = heapq.heappop(heap)
            children = list(self._divide(node))
            for child in children:
                if child.flat and child.region == node.region:
                    stuck = min(stuck, child.bound)
                else:
                    heapq.heappush(heap, child)
        left = heap[0].bound if heap else self.target
        return max(1.0, min(left, stuck, self.best) * SAFETY) * self.unit_s

    def _divide(self, node: _Node) -> Iterator[_Node]:
        """Parts of a node that hold all its placements below the target; itself if it cannot be
        divided."""
        narrowed = self.packing.narrowed(node.region, self.target)
        if narrowed is None:
            return
        region, coarse = narrowed
        node = replace(node, bound=max(node.bound, coarse))
        if coarse >= self.target:
            return
        low, high = region.d
        found = self.packing.relax(region, self.target - low)
        bound = max(node.bound, low + found.bound)
        if bound >= self.target:
            return
        top = min(max(found.top[0], low), high)
        if top + found.value < self.target:
            self._combine(found, region)
        node = _Node(bound, region, node.flat)
        # The solution relaxed would do: what is relaxed in it is to be ruled out.
        parts = list(self._branch(node, found)) if top + found.bound < self.target else []
        if parts:
            yield from parts
        elif node.flat or top <= low * (1 + 3 * STEP):
            yield replace(node, flat=True)
        else:
            below = top * (1 - STEP)
            flat = max(node.bound, below + found.bound)
            yield _Node(flat, replace(region, d=(below, high)), flat=True)
            middle = (low + below) / 2
            half = max(node.bound, middle + found.bound)
            yield _Node(half, replace(region, d=(middle, below)))
            yield _Node(bound, replace(region, d=(low, middle)))

    def _branch(self, node: _Node, found: Relaxed) -> Iterator[_Node]:
        """Part on memory that patterns in use and S overfill together; else on the option whose
        number of tables is farthest from whole; nothing if there is neither."""
        region = node.region
        overfull = [s + m - 1 for s, m in zip(found.filled, found.top[1:], strict=True)]
        b = int(np.argmax(overfull))
        if overfull[b] > STEP:
            cut = (1 - found.top[1 + b]) * (1 + STEP)
            low, high = region.filled[b]
            for part in ((low, cut), (cut, high)):
                filled = (part, region.filled[1]) if b == 0 else (region.filled[0], part)
                yield replace(node, region=replace(region, filled=filled))
            return
        if not node.flat:
            return
        key = max(found.x, key=lambda key: abs(found.x[key] - round(found.x[key])))
        x = found.x[key]
        if abs(x - round(x)) < WHOLE:
            return
        tables = dict(region.tables)
        fewest, most = tables.get(key, (0, len(self.program.classes[key[0]].tables)))
        for count in ((fewest, math.floor(x)), (math.ceil(x), most)):
            kept = tuple(sorted({**tables, key: count}.items()))
            yield replace(node, region=replace(region, tables=kept))

    # Integer program

    def _combine(self, relaxed: Relaxed, region: Region) -> None:
        """Put the patterns that a region has room for together."""
        self.waited += 1
        if self.waited < 2**self.failures:
            return
        found = self._combined(relaxed, region)
        step = float("inf")
        if found is not None:
            self.learn(self.program, found)
            step = self.program.step_s(self.program.rank_loads(found)) / self.unit_s
        self.waited = 0
        if step < self.best:
            self.best, self.assignment, self.failures = step, found, 0
        else:
            self.failures += 1

    def _combined(self, relaxed: Relaxed, region: Region) -> Assignment | None:
        form = Combination(self.packing, region)
        if not 0 < len(form.loads) <= MOST_COMBINATIONS:
            return None
        form.build(region)
        options = replace(
            self.options,
            mip_gap=self.options.mip_gap / 4,
            max_nodes=INTEGER_NODES,
            time_limit_s=max(self.deadline - time.monotonic(), LEAST_S),
        )
        found = form.assignment() if run(form.problem, options).found else None
        if found is None or not self.program.fits(self.program.rank_loads(found)):
            return None
        enough = (relaxed.top[0] + relaxed.bound) * (1 + self.options.mip_gap / 4)
        return balance(self.program, found, enough * self.unit_s, self.deadline)
