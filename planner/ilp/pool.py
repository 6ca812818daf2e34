"""Solve the placement program of one pool: bound, rounding, exact solution where it pays."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.cost.load import Scope
from planner.ilp.balance import balance
from planner.ilp.bounds import SAFETY, lean, time_unit_s, without_hopeless
from planner.ilp.formulation import Formulation, aggregate, exact
from planner.ilp.nodes import by_node, dealt, nodes_of_pieces, tells_apart
from planner.ilp.program import HBM, HOST, Assignment, PoolProgram
from planner.ilp.rounding import lighten, round_to_ranks
from planner.ilp.solve import Outcome, SolverOptions, Status, run
from planner.ilp.strata import heavies, stratified

EXACT_PLACES = 600
"""Integer variables up to which the exact formulation is tried when rounding leaves a gap."""
EXACT_EFFORT = 40_000
"""Its limit of branch-and-bound nodes, times places."""
ROOM_SHARES = (1.0, 0.95, 0.85, 0.7)
"""Shares of the room that the aggregate formulation may fill, until rounding succeeds."""
NODE_EFFORT = 400_000
"""Branch-and-bound nodes of a program that tells the pool's nodes apart, times variables."""
DEAL_NODES = 100
"""Branch-and-bound nodes of the program that puts its solution on ranks."""
STRATA_NODES = 3000
"""Branch-and-bound nodes of a stratified program."""
LEAST_S = 1.0
"""Time for a program when there is none left."""
CROWDED = 0.5
"""Memory is no obstacle where tables fill less than this share of it on average."""


@dataclass(frozen=True)
class Goal:
    """What a caller needs to know of a pool: no more is done."""

    enough_s: float = 0.0
    """A step this short need not get shorter."""
    hopeless_s: float = float("inf")
    """A pool bounded by this much need not be solved."""
    quick: bool = False
    """Take what rounding finds."""


@dataclass(frozen=True)
class Found:
    """A placement and its step."""

    program: PoolProgram
    assignment: Assignment
    step_s: float


@dataclass(frozen=True)
class PoolSolution:
    """``assignment`` chooses among the options of ``program``; both are None without a solution.

    ``status`` ``infeasible``: proven to have none; ``unknown``: none was found.
    """

    program: PoolProgram | None
    assignment: Assignment | None
    step_s: float
    bound_s: float
    status: Status
    roomy_bound_s: float = 0.0
    """The largest bound that holds whatever the memory."""

    @property
    def gap(self) -> float:
        """(step - bound) / bound."""
        return self.step_s / self.bound_s - 1 if self.bound_s > 0 else 0.0


INFEASIBLE = PoolSolution(None, None, float("inf"), float("inf"), "infeasible")


def solve_pool(
    program: PoolProgram | None,
    options: SolverOptions,
    wider: Callable[[], PoolProgram | None] | None = None,
    goal: Goal | None = None,
) -> PoolSolution:
    """The shortest step of one pool, with a proven bound.

    1. Ignoring memory, over the options that are best then: a bound for every placement. Its
       counts rounded and balanced; if that fits and is within the gap, done.
    2. The same with nodes told apart by their pieces, then with ranks, or nodes, told apart by
       their heavy pieces: tighter, and the counts are often easier to balance.
    3. If a gap is left and memory may be why: with memory, and every option that is not dominated.
    4. If that leaves a gap too and the pool is small, the exact formulation.

    Args:
        program: None if some table has no option that fits.
        wider: the program with options that take more time and less memory than those of
            ``program``; asked for only when step 2 does not do.
        goal: stop as soon as it is reached, or out of reach.
    """
    goal = goal or Goal()
    refinement = Refinement(options, goal)
    usable = None if program is None else without_hopeless(program)
    if usable is not None:
        refinement.aggregate(lean(usable), memory=False)
        if not (refinement.done or goal.quick or is_small(usable)):
            refinement.tell_nodes_apart()
            refinement.stratify()
        if refinement.done:
            return refinement.solution()
    if wider is not None:
        widest = wider()
        usable = None if widest is None else without_hopeless(widest)
    if usable is None:
        return INFEASIBLE
    small = is_small(usable)
    if small or refinement.crowded:
        refinement.aggregate(usable, memory=True)
    if not (refinement.done or goal.quick):
        refinement.tell_nodes_apart()
        if small:
            refinement.exactly(usable)
        else:
            refinement.stratify()
    return refinement.solution()


class Refinement:
    """The best placement so far and the largest bound."""

    def __init__(self, options: SolverOptions, goal: Goal) -> None:
        self.options, self.goal = options, goal
        self.deadline = time.monotonic() + options.time_limit_s
        self.best: Found | None = None
        self.bound_s = 0.0
        self.roomy_bound_s = 0.0
        self._solved: tuple[Formulation, bool] | None = None
        """The last aggregate program with a solution, and whether memory is part of it."""

    @property
    def done(self) -> bool:
        """Whether the gap is closed, the goal reached or out of reach, or the time over."""
        if self.bound_s >= self.goal.hopeless_s:
            return True
        if self.best is None:
            return False
        return self.best.step_s <= self.enough_s or time.monotonic() > self.deadline

    @property
    def enough_s(self) -> float:
        """A step that need not get shorter."""
        return max(self.bound_s * (1 + self.options.mip_gap), self.goal.enough_s)

    def run(self, form: Formulation, max_nodes: int | None = None) -> Outcome:
        """Solve a program within the time left."""
        left_s = max(self.deadline - time.monotonic(), LEAST_S)
        return run(
            form.problem,
            replace(
                self.options,
                mip_gap=self.options.mip_gap / 4,
                time_limit_s=left_s,
                max_nodes=max_nodes or self.options.max_nodes,
            ),
        )

    @property
    def crowded(self) -> bool:
        """Whether memory may keep better placements out."""
        if self.best is None:
            return True
        program = self.best.program
        mean = program.rank_loads(self.best.assignment).mean(axis=0)
        return bool((mean[[HBM, HOST]] > CROWDED * program.room).any())

    def solution(self) -> PoolSolution:
        """What was found and proven."""
        if self.bound_s == float("inf"):
            return INFEASIBLE
        best = self.best
        if best is None:
            step_s = float("inf")
            return PoolSolution(None, None, step_s, self.bound_s, "unknown", self.roomy_bound_s)
        assignment = lighten(best.program, best.assignment)
        step_s = best.program.step_s(best.program.rank_loads(assignment))
        bound_s = min(self.bound_s, step_s)
        proven = step_s <= bound_s * (1 + self.options.mip_gap) * (1 + 1e-9)
        status: Status = "optimal" if proven else "feasible"
        return PoolSolution(
            best.program, assignment, step_s, bound_s, status, min(self.roomy_bound_s, bound_s)
        )

    def aggregate(self, program: PoolProgram, memory: bool) -> None:
        """Step 1 or 3.

        Largest-first may find no room for a solution that fits on average: then once more with
        less room on average.
        """
        unit_s = time_unit_s(program)
        whole: Formulation | None = None
        for share in ROOM_SHARES if memory else (1.0,):
            form = aggregate(program.with_room(share), unit_s, memory)
            outcome = self.run(form)
            if whole is None:
                whole = form
                self._raise_bound(outcome.bound * unit_s * SAFETY, memory)
            if not outcome.found or self._round(program, form):
                break
        if whole is not None:
            self._solved = (whole, memory) if whole.solved else None

    def tell_nodes_apart(self, effort: int = NODE_EFFORT) -> None:
        """Step 2, its first part, for the program of the last step 1 or 3.

        Args:
            effort: branch-and-bound nodes times variables.
        """
        if self.best is None or self._solved is None:
            return
        whole, memory = self._solved
        if tells_apart(whole.program):
            form = by_node(whole.program, whole.unit_s, memory, self.best.step_s)
            self._solve(form, effort // len(form.problem.variables()), memory)
            if form.solved and not self.done:
                self._deal(form)

    def stratify(self) -> None:
        """Step 2, its second part, for the program of the last step 1 or 3."""
        if self.best is None or self._solved is None:
            return
        (whole, memory), self._solved = self._solved, None
        program, unit_s = whole.program, whole.unit_s
        for heavy in heavies(program, whole):
            if self.done:
                return
            below_s = self.best.step_s
            form = stratified(program, unit_s, memory, heavy, below_s, self.options)
            if form is None:
                self._raise_bound(below_s * SAFETY, memory)
                return
            self._solve(form, STRATA_NODES, memory, below_s)

    def _solve(
        self, form: Formulation, max_nodes: int, memory: bool, below_s: float = float("inf")
    ) -> None:
        """Bound and placement of a program that only holds for steps below ``below_s``."""
        outcome = self.run(form, max_nodes)
        self._raise_bound(min(below_s, outcome.bound * form.unit_s) * SAFETY, memory)
        if outcome.found:
            self._round(form.program, form)

    def _deal(self, form: Formulation) -> None:
        """Put a solution of ``by_node`` on ranks by the exact program, where rounding did not do
        or found no room."""
        ranked = dealt(form)
        if ranked is not None and self.run(ranked, DEAL_NODES).found:
            found = ranked.assignment()
            if ranked.program.fits(ranked.program.rank_loads(found)):
                self._offer(ranked.program, found)

    def _raise_bound(self, bound_s: float, memory: bool) -> None:
        self.bound_s = max(self.bound_s, bound_s)
        if not memory:
            self.roomy_bound_s = max(self.roomy_bound_s, bound_s)

    def _round(self, program: PoolProgram, form: Formulation) -> bool:
        """Put the counts of a solution on ranks; whether there was room."""
        rounded = round_to_ranks(program, form.counts(), nodes_of_pieces(form))
        if rounded is None:
            return False
        self._offer(program, balance(program, rounded, self.enough_s, self.deadline))
        return True

    def _offer(self, program: PoolProgram, assignment: Assignment) -> None:
        step_s = program.step_s(program.rank_loads(assignment))
        if self.best is None or step_s < self.best.step_s:
            self.best = Found(program, assignment, step_s)

    def exactly(self, program: PoolProgram) -> None:
        """Step 4."""
        form = exact(program, time_unit_s(program))
        options = replace(self.options, time_limit_s=max(self.deadline - time.monotonic(), LEAST_S))
        places = max(1, sum(len(variables) for variables in form.y.values()))
        outcome = run(form.problem, replace(options, max_nodes=EXACT_EFFORT // places))
        self.bound_s = max(self.bound_s, outcome.bound * form.unit_s * SAFETY)
        if not outcome.found:
            return
        found = form.assignment()
        # The solver's tolerance may let a rank be overfull by a few bytes.
        if program.fits(program.rank_loads(found)):
            self._offer(program, found)


def is_small(program: PoolProgram) -> bool:
    """Whether the exact formulation is tried."""
    places = sum(
        program.nodes if shard.scope is Scope.NODE else program.ranks
        for loads in program.loads
        for option in loads
        for shard in option.shards
    )
    return places <= EXACT_PLACES
