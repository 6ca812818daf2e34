"""HugeCTR's ``auto`` sharding, from its published description (MLPerf DLRM-DCNv2 sample).

A rank's cost is the ids per sample of its shards plus, for each shard, the price of sending one
pooled row in units of reading one row for one id:

    table_cost = (memory bandwidth / communication bandwidth) / (memory work / communication work)

Small tables are replicated. The others start whole; shards go in descending order of ids to the
rank with the least cost that has room, never two of one table to one rank; then the table with the
most ids per shard is split in two, and again, ``ITERATIONS`` times. The cheapest of all rounds and
of the plan that splits every table over all ranks wins.

HugeCTR splits rows over any 2, 4, 8 ranks. TorchRec splits rows over a node or the pool only, so a
split over part of the pool is one of columns here: the same bytes per shard, and as many pooled
bytes as HugeCTR's partial sums divided by the number of shards. Ids count in units of the model's
widest row, for HugeCTR's sample knows one width only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from planner.baselines.problem import PoolProblem, least_burdened, no_room, option_like
from planner.cost.load import Scope
from planner.ilp.program import HBM, Assignment, Choice, Floats
from planner.specs.errors import InfeasibleError
from planner.specs.model import ComputeKernel, ShardingType

ITERATIONS = 20
"""Rounds of splitting in the sample."""
REPLICATED_BYTES = 8_000_000
"""Tables up to this size, optimizer state included, are replicated in the MLPerf submissions
(``dp_sharding_threshold`` 0.008)."""
READ_AND_UPDATED = 2
"""Memory work of an id: its row is read and written back."""


def table_cost(problem: PoolProblem) -> float:
    """Price of sending a pooled row in units of looking one row up."""
    ctx = problem.ctx
    inside = ctx.pool.nodes == 1
    sent_per_s = ctx.device.scale_up.bytes_per_s.value if inside else ctx.nic_bytes_per_s
    bandwidth_ratio = ctx.device.memory.hbm_bytes_per_s.value / sent_per_s
    element = problem.program.classes[0].options[0].data_type.bytes
    work_ratio = READ_AND_UPDATED * element / ctx.policy.communication_precision.bytes
    return bandwidth_ratio / work_ratio


def hugectr(problem: PoolProblem) -> Assignment:
    """The cheapest plan of all rounds.

    Raises:
        InfeasibleError: no round found room, nor did every table over all ranks.
    """
    return _Planner(problem).plan()


@dataclass
class _Planner:
    problem: PoolProblem
    steps: dict[tuple[int, int], int] = field(default_factory=dict)
    """How far each table is split: a position on its ladder."""

    def __post_init__(self) -> None:
        tables = self.problem.tables
        widest = max(table.embedding_dim for table in tables)
        self.ids = [table.pooling * table.embedding_dim / widest for table in tables]
        self.ladders = [self._ladder(g) for g in range(len(tables))]
        self.table_cost = table_cost(self.problem)

    def _ladder(self, g: int) -> list[int]:
        """Options of a class by number of shards: one, 2, 4, 8 columns, all ranks' rows."""
        group, table = self.problem.program.classes[g], self.problem.tables[g]
        state = self.problem.ctx.model.optimizer.sparse.state_floats_per_row(table.embedding_dim)
        steps: dict[ShardingType, list[int]] = {kind: [] for kind in ShardingType}
        for index, option in enumerate(group.options):
            if option.compute_kernel in (ComputeKernel.FUSED, ComputeKernel.DENSE):
                steps[option.sharding_type].append(index)
        stored = group.options[0].data_type.bytes * table.embedding_dim + 4 * state
        small = table.num_embeddings * stored <= REPLICATED_BYTES
        if small and steps[ShardingType.DATA_PARALLEL]:
            return steps[ShardingType.DATA_PARALLEL]
        by_columns = sorted(
            steps[ShardingType.COLUMN_WISE], key=lambda index: len(group.options[index].pieces)
        )
        ladder = steps[ShardingType.TABLE_WISE] + by_columns + steps[ShardingType.ROW_WISE]
        return ladder or [option_like(group, ())]

    def plan(self) -> Assignment:
        candidates: list[tuple[float, Assignment]] = []
        places = self.problem.in_order
        self.steps = {place: len(self.ladders[place[0]]) - 1 for place in places}
        failure = self._round(candidates)
        self.steps = dict.fromkeys(places, 0)
        for _ in range(ITERATIONS):
            stuck = self._round(candidates)
            if stuck is None:
                further = [place for place in self._hottest_first() if self._splits(place)]
                if not further:
                    break
                self.steps[further[0]] += 1
            elif self._splits(stuck[0]):
                self.steps[stuck[0]] += 1
            else:
                failure = stuck
                break
        if not candidates:
            assert failure is not None, "a round ends with a plan or with a table that has no room"
            raise failure[1]
        return min(candidates, key=lambda one: one[0])[1]

    def _splits(self, place: tuple[int, int]) -> bool:
        return self.steps[place] + 1 < len(self.ladders[place[0]])

    def _option(self, place: tuple[int, int]) -> int:
        return self.ladders[place[0]][self.steps[place]]

    def _shares(self, place: tuple[int, int]) -> Iterator[tuple[Scope, float]]:
        """Scope of each piece, and its ids on each rank that it lands on."""
        program, g = self.problem.program, place[0]
        spread = {Scope.POOL: program.ranks, Scope.NODE: program.devices_per_node, Scope.RANK: 1}
        width = self.problem.tables[g].embedding_dim
        for piece in program.classes[g].options[self._option(place)].pieces:
            yield piece.scope, self.ids[g] * piece.columns / width / spread[piece.scope]

    def _hottest_first(self) -> list[tuple[int, int]]:
        return sorted(
            self.problem.in_order,
            key=lambda place: -max(ids for _, ids in self._shares(place)),
        )

    def _round(
        self, candidates: list[tuple[float, Assignment]]
    ) -> tuple[tuple[int, int], InfeasibleError] | None:
        """Place all shards and add a candidate; or the table that found no room, and why."""
        program = self.problem.program
        ranks = np.zeros((program.ranks, len(program.loads[0][0].everywhere)))
        burden = np.zeros(program.ranks)
        for place in self.problem.in_order:
            ranks += program.loads[place[0]][self._option(place)].everywhere
            for scope, ids in self._shares(place):
                if scope is Scope.POOL:
                    burden += ids + self.table_cost
        if not program.fits(ranks):
            largest = max(self.problem.in_order, key=lambda place: self._everywhere(place)[HBM])
            name = program.classes[largest[0]].tables[largest[1]]
            nothing = np.zeros_like(ranks)
            return largest, no_room(self.problem, name, ranks[0], nothing)
        choices: dict[tuple[int, int], Choice] = {}
        for place in self._hottest_first():
            found = self._place(place, ranks, burden)
            if isinstance(found, InfeasibleError):
                return place, found
            choices[place] = found
        assignment = tuple(
            tuple(choices[g, t] for t in range(len(group.tables)))
            for g, group in enumerate(program.classes)
        )
        candidates.append((float(burden.max()), assignment))
        return None

    def _everywhere(self, place: tuple[int, int]) -> Floats:
        return self.problem.program.loads[place[0]][self._option(place)].everywhere

    def _place(
        self, place: tuple[int, int], ranks: Floats, burden: Floats
    ) -> Choice | InfeasibleError:
        """Each piece of a table to the cheapest rank that has room and no other piece of it."""
        program, option = self.problem.program, self._option(place)
        shares = list(self._shares(place))
        places = [0] * len(shares)
        taken = np.zeros(program.ranks)
        for shard in program.loads[place[0]][option].shards:
            for piece in shard.pieces:
                target = least_burdened(program, ranks, burden + taken, shard.scope, shard.load)
                if target is None:
                    name = program.classes[place[0]].tables[place[1]]
                    return no_room(self.problem, name, shard.load, ranks)
                landing = program.landing(shard.scope, target)
                ranks[landing] += shard.load
                burden[landing] += shares[piece][1] + self.table_cost
                taken[landing] = np.inf
                places[piece] = target
        return Choice(option, tuple(places))
