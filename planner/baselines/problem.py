"""What baselines get, and what they share: a pool's tables and options, and ranks being filled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.cost.context import PoolContext
from planner.cost.load import Scope
from planner.evaluate import placement_of
from planner.ilp.options import Way, pool_program, table_classes
from planner.ilp.program import HBM, HOST, Assignment, Floats, PoolProgram, TableClass
from planner.specs.errors import InfeasibleError
from planner.specs.model import ComputeKernel, ModelSpec, ShardingType, Table
from planner.specs.plan import Placement
from planner.specs.units import GIB, Dtype

KERNELS = (
    ComputeKernel.FUSED,
    ComputeKernel.DENSE,
    ComputeKernel.FUSED_UVM_CACHING,
    ComputeKernel.FUSED_UVM,
)
"""In the order in which a baseline without a choice of its own prefers them."""


@dataclass(frozen=True)
class PoolProblem:
    """Tables of one pool to place.

    ``program`` has every option of ``ctx`` in the recipe's weight precision: all sharding types,
    all compute kernels.
    """

    ctx: PoolContext
    program: PoolProgram

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """One table of each class of ``program``."""
        by_name = {table.name: table for table in self.ctx.model.all_tables}
        return tuple(by_name[group.tables[0]] for group in self.program.classes)

    @cached_property
    def in_order(self) -> tuple[tuple[int, int], ...]:
        """(class, position in it) of every table, in the model's order."""
        place = {
            name: (g, t)
            for g, group in enumerate(self.program.classes)
            for t, name in enumerate(group.tables)
        }
        return tuple(place[table.name] for table in self.ctx.model.all_tables)


Baseline = Callable[[PoolProblem], Assignment]
"""Chooses an option and places for every table of a pool; ``InfeasibleError`` if it cannot.

A baseline that does not look at memory may overfill ranks: ``planner.evaluate`` tells.
"""


def recipe_type(model: ModelSpec, table: Table) -> Dtype:
    """Weight precision of a table in the model's own recipe."""
    recipe, constrained = model.precision.embeddings[0], table.constraints.data_types
    return recipe if constrained is None or recipe in constrained else constrained[0]


def pool_problem(ctx: PoolContext) -> PoolProblem:
    """The problem of a pool under a local batch and a policy.

    Raises:
        InfeasibleError: a table's constraints leave no option in this pool.
    """

    def recipe(table: Table, way: Way) -> bool:
        return way.data_type == recipe_type(ctx.model, table)

    classes = table_classes(ctx.sharding_group, True, recipe)
    return PoolProblem(ctx, pool_program(ctx, True, classes))


def placements_of(
    ctx: PoolContext, program: PoolProgram, assignment: Assignment
) -> dict[str, Placement]:
    """An assignment in the plan's words, in the model's order of tables."""
    by_name = {
        table: placement_of(ctx, group, choice)
        for group, row in zip(program.classes, assignment, strict=True)
        for table, choice in zip(group.tables, row, strict=True)
    }
    return {table.name: by_name[table.name] for table in ctx.model.all_tables}


def option_like(group: TableClass, wanted: Sequence[ShardingType]) -> int:
    """Position of the option with the first sharding type of ``wanted`` that there is.

    A table whose constraints allow none of them takes another type. Of equal types the first
    kernel of ``KERNELS``, then the fewest pieces.
    """

    def rank(index: int) -> tuple[int, int, int]:
        option = group.options[index]
        kind = option.sharding_type
        return (
            wanted.index(kind) if kind in wanted else len(wanted),
            KERNELS.index(option.compute_kernel),
            len(option.pieces),
        )

    return min(range(len(group.options)), key=rank)


def least_burdened(
    program: PoolProgram, ranks: Floats, burden: Floats, scope: Scope, load: Floats
) -> int | None:
    """The rank, or node, with the least burden that has room for one more piece, if any has.

    Args:
        ranks: what the ranks hold; shape [ranks, C].
        burden: what is to be balanced, infinite where the piece must not go; shape [ranks].
        load: of the piece; shape [C].
    """
    full = ((ranks + load)[:, [HBM, HOST]] > program.room).any(axis=1)
    if scope is Scope.NODE:
        shape = (program.nodes, program.devices_per_node)
        burden = burden.reshape(shape).max(axis=1)
        full = np.logical_or.reduce(full.reshape(shape), axis=1)
    usable = np.where(full, np.inf, burden)
    place = int(usable.argmin())
    return place if np.isfinite(usable[place]) else None


def no_room(problem: PoolProblem, table: str, load: Floats, ranks: Floats) -> InfeasibleError:
    """A piece of ``table`` fits on no rank; says what it needs and what the emptiest rank has."""
    free = problem.program.hbm_room_bytes - float(ranks[:, HBM].min())
    return InfeasibleError(
        f"no rank of pool {problem.ctx.pool.name} has room for a shard of table {table}: it takes "
        f"{load[HBM] / GIB:.2f} GiB, the emptiest rank has {max(free, 0.0) / GIB:.2f} GiB",
        fix="use more ranks or a smaller batch",
    )
