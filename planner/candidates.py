"""Policies of one pool at one local batch, by lower bounds that are refined as far as it matters.

A candidate stands for policies none of which makes the pool's step shorter than its bound. It is
refined stage by stage, in the order of the bounds, so that most policies never cost a linear
program. With q a quick kind, k a kind that is never faster, and p = k with some blocks recomputed
(``planner.policies``), L the loads of tables placed at will:

    GRAPH     the step graph of q without tables               for all k of q and all their p
    ROOMY     min over L of the graph of q with L              for as many
    SHORT     the same, once it is known that memory is short  for one k and all its p
    THRIFTY   min over L that fit beside the p of k that keeps least, of the graph of k
    MEMBER    the same, and the graph of p without tables      for one p
    RELAXED   min over L that fit beside p, of the graph of p
    SOLVED    what solving p proved

Each is a bound since recomputing only adds time to operations, a kind is never faster than its
quick one, and leaving out memory, or tables, never lengthens a step. Two bounds are also carried
from one policy to another, less the most that any path of its graph gains
(``planner.cost.step.head_start_s``): one that ignores memory to every other policy, and that of a
solved policy to those of the same depth that leave tables no more memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from planner.cost.step import StepGraph, beside, head_start_s
from planner.ilp.bounds import relax
from planner.ilp.pool import PoolSolution
from planner.ilp.program import PoolProgram
from planner.pool_ways import PoolWays, Waits
from planner.specs.plan import MemoryPolicy


class Stage(IntEnum):
    """How well the bound of a candidate is known, and for how much it stands."""

    GRAPH = 0
    ROOMY = 1
    SHORT = 2
    THRIFTY = 3
    MEMBER = 4
    RELAXED = 5
    SOLVED = 6


SETTLED = (Stage.ROOMY, Stage.THRIFTY, Stage.RELAXED, Stage.SOLVED)
"""Stages whose bounds are taken for a pool's."""
SOLVABLE = (Stage.ROOMY, Stage.RELAXED)
"""Stages whose policy is solved next."""


@dataclass(frozen=True)
class Candidate:
    """Policies, and a lower bound of the pool's step under each of them."""

    policy: MemoryPolicy
    """The fastest of them where memory is no obstacle."""
    bound_s: float
    stage: Stage = Stage.GRAPH
    roomy_s: float = 0.0
    """A bound that holds whatever the memory."""

    def at_least(self, bound_s: float) -> Candidate:
        """The same with the larger bound."""
        return replace(self, bound_s=max(self.bound_s, bound_s))


class Candidates:
    """All policies of a pool at a local batch.

    Args:
        ways: of the pool.
        waits: for the other pools, of which nothing else is known.
        others: the other pools' steps, if they are known.
        seed: of the solver.
    """

    def __init__(
        self,
        ways: PoolWays,
        batch: int,
        *,
        waits: Waits = (),
        others: Sequence[StepGraph] = (),
        seed: int = 0,
    ) -> None:
        self._ways, self._batch, self._seed = ways, batch, seed
        self._waits, self._others = dict(waits), others
        self._graphs: dict[MemoryPolicy, StepGraph] = {}
        self._open = [Candidate(policy, self._empty_step_s(policy)) for policy in ways.policies]
        self._solved: list[Candidate] = []
        self._roomy: list[MemoryPolicy] = []
        """Solved without memory having a part in it."""

    def at_work(self, program: PoolProgram, policy: MemoryPolicy) -> PoolProgram:
        """A placement program of the pool with the operations of a policy, and with the other
        pools."""
        return program.under(self._graph(policy), self._waits)

    def _graph(self, policy: MemoryPolicy) -> StepGraph:
        if policy not in self._graphs:
            graph = self._ways.graph(self._batch, policy)
            self._graphs[policy] = beside(graph, self._others) if self._others else graph
        return self._graphs[policy]

    def _head_start_s(self, policy: MemoryPolicy, other: MemoryPolicy) -> float:
        """How much shorter a step can be under ``policy`` than under ``other`` at most, where
        memory is no obstacle; infinite if nothing is known."""
        if not self._ways.same_loads(policy, other):
            return float("inf")
        return head_start_s(self._graph(policy), self._graph(other))

    def bound_s(self) -> float:
        """Lower bound of the pool's step under every policy; infinite if nothing fits."""
        while (first := min([*self._open, *self._solved], key=_bound_s)).stage not in SETTLED:
            refined = self._refined(first)
            self._open.remove(first)
            self._open += refined
        return first.bound_s

    def open_bound_s(self) -> float:
        """The same without the policies that were solved; infinite if none is left."""
        return min(map(_bound_s, self._open), default=float("inf"))

    def take(self, mip_gap: float) -> Candidate | None:
        """A policy to be solved next; None if the most promising ones were refined instead.

        Of those bounded within half the gap of the least that is the one known best: it may do.
        """
        enough_s = self.open_bound_s() * (1 + mip_gap / 2)
        near = [one for one in self._open if one.bound_s <= enough_s]
        chosen = max(near, key=lambda one: (one.stage, -one.bound_s))
        self._open.remove(chosen)
        if any(self._head_start_s(chosen.policy, one) == 0 for one in self._roomy):
            # Never faster: their bounds stand for it.
            return None
        if chosen.stage in SOLVABLE:
            return chosen
        self._open += [one for one in self._refined(chosen) if not self._known(one)]
        return None

    def record(self, chosen: Candidate, solution: PoolSolution) -> None:
        """What solving the policy of ``take`` proved, for it and for others."""
        done = replace(
            chosen.at_least(solution.bound_s),
            stage=Stage.SOLVED,
            roomy_s=max(chosen.roomy_s, solution.roomy_bound_s),
        )
        self._solved.append(done)
        if solution.assignment is not None and solution.roomy_bound_s == solution.bound_s:
            # Memory had no part in it: another policy can only be as good if it is faster.
            self._roomy.append(chosen.policy)
        elif chosen.stage is Stage.ROOMY:
            rest = replace(chosen.at_least(done.roomy_s), roomy_s=done.roomy_s)
            self._open += self._when_short(rest)
        self._open = [
            other.at_least(
                max(self._carried_s(done, other.policy), self._carried_with_memory_s(done, other))
            )
            for other in self._open
        ]

    def _known(self, candidate: Candidate) -> bool:
        """Whether it was solved: as the quick kind that stood for it, with nothing recomputed."""
        alone = candidate.stage >= Stage.MEMBER
        return alone and any(candidate.policy == one.policy for one in self._solved)

    def _carried_s(self, known: Candidate, policy: MemoryPolicy) -> float:
        """What a bound that holds whatever the memory says of another policy."""
        return known.roomy_s - self._head_start_s(policy, known.policy)

    def _carried_with_memory_s(self, solved: Candidate, other: Candidate) -> float:
        """What the bound of a solved policy says of another one that leaves tables no more memory:
        at one depth they take as much under both."""
        policy, known = other.policy, solved.policy
        if other.stage not in (Stage.MEMBER, Stage.RELAXED):
            return 0.0
        if policy.prefetch_depth != known.prefetch_depth:
            return 0.0
        kept, least = (self._ways.base_bytes(self._batch, one) for one in (policy, known))
        return solved.bound_s - self._head_start_s(policy, known) if kept >= least else 0.0

    def _refined(self, candidate: Candidate) -> list[Candidate]:
        """The policies of a candidate, their bounds known better by a stage."""
        policy, known_s = candidate.policy, candidate.bound_s
        if candidate.stage is Stage.GRAPH:
            others = [one for one in (*self._open, *self._solved) if one.roomy_s > known_s]
            carried_s = max((self._carried_s(one, policy) for one in others), default=0.0)
            if carried_s > known_s:
                return [candidate.at_least(carried_s)]
            return self._with_tables(candidate)
        if candidate.stage is Stage.SHORT:
            thrifty = min(
                self._ways.members(self._batch, policy),
                key=lambda member: self._ways.base_bytes(self._batch, member),
            )
            relaxed_s = self._relaxed_s(thrifty, policy)
            return [replace(candidate.at_least(relaxed_s), stage=Stage.THRIFTY)]
        if candidate.stage is Stage.THRIFTY:
            members = [
                Candidate(member, max(known_s, self._empty_step_s(member)), Stage.MEMBER)
                for member in self._ways.members(self._batch, policy)
            ]
            return [
                member.at_least(
                    max(
                        (self._carried_with_memory_s(one, member) for one in self._solved),
                        default=0.0,
                    )
                )
                for member in members
            ]
        assert candidate.stage is Stage.MEMBER
        return [replace(candidate.at_least(self._relaxed_s(policy, policy)), stage=Stage.RELAXED)]

    def _with_tables(self, candidate: Candidate) -> list[Candidate]:
        """A quick kind with tables, memory ignored; kind by kind where it is short."""
        known_s, fits = candidate.bound_s, False
        program = self._ways.roomy_program(self._batch, candidate.policy)
        if program is not None:
            at_work = self.at_work(program, candidate.policy)
            relaxed = relax(at_work, memory=False, seed=self._seed)
            known_s, fits = max(known_s, relaxed.step_s), relaxed.fits
        known = Candidate(candidate.policy, known_s, Stage.ROOMY, roomy_s=known_s)
        return [known] if fits else self._when_short(known)

    def _when_short(self, known: Candidate) -> list[Candidate]:
        """The kinds that a quick one stands for."""
        return [
            Candidate(
                kind, known.bound_s, Stage.SHORT, known.roomy_s if kind == known.policy else 0.0
            )
            for kind in self._ways.kinds(self._batch, known.policy)
        ]

    def _empty_step_s(self, policy: MemoryPolicy) -> float:
        """The step if tables cost nothing."""
        spans = self._graph(policy).schedule({}, self._waits)
        return max(span.end_s for span in spans.values())

    def _relaxed_s(self, keeps: MemoryPolicy, runs: MemoryPolicy) -> float:
        """Bound with the memory of one policy and the operations of another."""
        program = self._ways.program(self._batch, keeps, spill=True)
        if program is None:
            return float("inf")
        return relax(self.at_work(program, runs), memory=True, seed=self._seed).step_s


def _bound_s(candidate: Candidate) -> float:
    return candidate.bound_s
