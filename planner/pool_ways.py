"""One pool of a job under any local batch and memory policy: step graph and placement program.

All of it is memoised, since bounds of many batch splits ask for the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from planner.cost.context import PoolContext
from planner.cost.dense import recomputable
from planner.cost.graph import pool_step_graph
from planner.cost.load import PlacementOption
from planner.cost.memory import ID_BYTES, base_memory_bytes
from planner.cost.step import StepGraph
from planner.ilp.bounds import hopeful, lean, without_hopeless
from planner.ilp.options import equal_tables, pool_program, table_classes, ways
from planner.ilp.program import PoolProgram, TableClass
from planner.policies import (
    caches_anyway,
    compute_precisions,
    kinds_beside,
    plain_policy,
    quick_policies,
    recompute_choices,
)
from planner.specs.cluster import BridgeSpec, PoolSpec
from planner.specs.device import DeviceProfile
from planner.specs.model import ModelSpec
from planner.specs.plan import KernelPolicy, MemoryPolicy

Waits = tuple[tuple[str, float], ...]
"""Operations on the bridge, and when the other pools reach them at the earliest, seconds."""


@dataclass(kw_only=True)
class PoolWays:
    """One pool (with the nodes it uses) inside a job, and every way for it to work."""

    pool: PoolSpec
    device: DeviceProfile
    model: ModelSpec
    """With the job's global batch."""
    bridge: BridgeSpec | None
    pools_in_job: int
    interval_steps: int
    kernels: KernelPolicy = "preselected"
    replica_groups: int = 1
    _graphs: dict[tuple[int, MemoryPolicy], StepGraph] = field(default_factory=dict)
    _programs: dict[tuple[int, MemoryPolicy, bool], PoolProgram | None] = field(
        default_factory=dict
    )
    _roomy_programs: dict[tuple[int, MemoryPolicy], PoolProgram | None] = field(
        default_factory=dict
    )
    _thriftiest: dict[int, MemoryPolicy] = field(default_factory=dict)
    _classes: dict[tuple[int, bool, int], tuple[TableClass, ...]] = field(default_factory=dict)
    _kinds: dict[tuple[int, MemoryPolicy], list[MemoryPolicy]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.pool.devices

    @property
    def kernel_policy(self) -> KernelPolicy:
        """``kernels`` where the device has kernels to choose from."""
        return "vendor" if self.device.triton is None else self.kernels

    @cached_property
    def policies(self) -> list[MemoryPolicy]:
        """Kinds of policy that may be the fastest; communication in the narrowest precision.

        Raises:
            InfeasibleError: the device computes in no precision that the model allows.
        """
        precision = compute_precisions(self.device, self.model)[0]
        plain = plain_policy(self.device, self.model, precision, self.kernel_policy)
        return quick_policies(self.context(1, plain))

    @property
    def placeable(self) -> bool:
        """Whether the tables' constraints leave every table a way, be there room or not."""
        group = self.context(1, self.policies[0]).sharding_group
        return all(
            any(True for _ in ways(group, tables[0], spill=True))
            for tables in equal_tables(self.model)
        )

    def kinds(self, batch: int, quick: MemoryPolicy) -> list[MemoryPolicy]:
        """Those that a quick kind stands for: itself, and those that are never faster."""
        return list(kinds_beside(self.context(batch, quick), quick))

    def members(self, batch: int, kind: MemoryPolicy) -> list[MemoryPolicy]:
        """Policies of a kind: every choice of blocks to recompute that may be worth it."""
        key = (batch, kind)
        if key not in self._kinds:
            self._kinds[key] = [
                kind.model_copy(update={"recompute": names})
                for names in recompute_choices(self.context(batch, kind))
            ]
        return self._kinds[key]

    def thriftiest(self, batch: int) -> PoolContext:
        """The pool under the policy that takes least memory."""
        kind = self._thriftiest_kind(batch)
        member = min(self.members(batch, kind), key=lambda one: self.base_bytes(batch, one))
        return self.context(batch, member)

    def _thriftiest_kind(self, batch: int) -> MemoryPolicy:
        if batch not in self._thriftiest:
            every = [kind for quick in self.policies for kind in self.kinds(batch, quick)]
            # Fewer batches ahead leave more room to the tables too.
            self._thriftiest[batch] = min(
                every,
                key=lambda kind: (
                    kind.prefetch_depth,
                    self.base_bytes(batch, _recomputing_all(kind, self.model)),
                ),
            )
        return self._thriftiest[batch]

    def _most_room_bytes(self, batch: int, prefetch_depth: int) -> float:
        """Device memory that tables may fill under any policy, counted as if ids were held for so
        many batches: what an option takes at this depth and not at another are ids of one table.
        """
        kind = self._thriftiest_kind(batch)
        ctx = self.context(batch, _recomputing_all(kind, self.model))
        ids = max(table.pooling + len(table.feature_names) for table in self.model.all_tables)
        ids_bytes = ID_BYTES * (ctx.sharding_group.pool_batch * ids + 1)
        ahead = prefetch_depth - kind.prefetch_depth
        room_bytes = ctx.hbm_capacity_bytes - sum(base_memory_bytes(ctx).values())
        return room_bytes + ahead * ids_bytes

    def context(self, batch: int, policy: MemoryPolicy) -> PoolContext:
        """What the cost model sees."""
        return PoolContext(
            pool=self.pool,
            device=self.device,
            model=self.model,
            local_batch=batch,
            policy=policy,
            bridge=self.bridge,
            pools_in_job=self.pools_in_job,
            embedding_interval_steps=self.interval_steps,
            replica_groups=self.replica_groups,
        )

    def base_bytes(self, batch: int, policy: MemoryPolicy) -> int:
        """Device memory of a rank, tables apart."""
        return sum(base_memory_bytes(self.context(batch, policy)).values())

    def graph(self, batch: int, policy: MemoryPolicy) -> StepGraph:
        """The step graph, whatever the placements."""
        key = (batch, policy)
        if key not in self._graphs:
            self._graphs[key] = pool_step_graph(self.context(batch, policy))
        return self._graphs[key]

    def program(self, batch: int, policy: MemoryPolicy, spill: bool) -> PoolProgram | None:
        """Options that matter; None if some table has none that fits.

        Args:
            spill: also those that take more time and less memory.

        Raises:
            InfeasibleError: a table's constraints leave no option in this pool.
        """
        key = (batch, policy, spill)
        if key not in self._programs:
            whole = self._whole(batch, policy, spill)
            if not spill and not _all_hopeful(whole):
                # Instead of an option that fills a rank, the same with rows in host memory may do.
                whole = self._whole(batch, policy, spill=True)
            kept = without_hopeless(whole)
            self._programs[key] = kept if kept is None or spill else lean(kept)
        return self._programs[key]

    def roomy_program(self, batch: int, policy: MemoryPolicy) -> PoolProgram | None:
        """Options that matter where memory is no obstacle: a bound of this program that ignores
        memory holds for every policy that is never faster.

        Options that fill a rank are kept where they fit beside another policy, or with rows in host
        memory. The same object as ``program`` without ``spill`` where that has the same options.
        """
        key = (batch, policy)
        if key not in self._roomy_programs:
            own, whole = self.program(batch, policy, spill=False), self._whole(batch, policy, False)
            roomy = own if _all_hopeful(whole) else self._stand_ins(batch, policy, whole)
            alike = own is not None and roomy is not None and own.classes == roomy.classes
            self._roomy_programs[key] = own if alike else roomy
        return self._roomy_programs[key]

    def _stand_ins(
        self, batch: int, policy: MemoryPolicy, whole: PoolProgram
    ) -> PoolProgram | None:
        most_bytes = self._most_room_bytes(batch, policy.prefetch_depth)
        wide = self._whole(batch, policy, spill=True)
        kept = []
        for known, group, live in zip(
            whole.classes, wide.classes, hopeful(wide.with_hbm_room(most_bytes)), strict=True
        ):
            alive = {_shape(group.options[o]) for o in live}
            kept.append([o for o, option in enumerate(known.options) if _shape(option) in alive])
        return lean(whole.keep(kept)) if all(kept) else None

    def _whole(self, batch: int, policy: MemoryPolicy, spill: bool) -> PoolProgram:
        """All options."""
        ctx = self.context(batch, policy)
        # Tables see nothing of the policy but the depth: the communication precision is one.
        shared = (batch, spill, policy.prefetch_depth)
        if shared not in self._classes:
            self._classes[shared] = table_classes(ctx.sharding_group, spill)
        return pool_program(ctx, spill, self._classes[shared])

    def same_loads(self, policy: MemoryPolicy, other: MemoryPolicy) -> bool:
        """Whether tables take the same time under both where memory is no obstacle."""
        alike = policy.prefetch_depth == other.prefetch_depth
        return alike or not caches_anyway(self.device, self.model)


def _recomputing_all(policy: MemoryPolicy, model: ModelSpec) -> MemoryPolicy:
    """The member of a kind that keeps least."""
    return policy.model_copy(update={"recompute": recomputable(model)})


def _all_hopeful(program: PoolProgram) -> bool:
    """Whether no piece of any option fills a rank."""
    counts = [len(group.options) for group in program.classes]
    return [len(options) for options in hopeful(program)] == counts


def _shape(option: PlacementOption) -> tuple[object, ...]:
    """What an option has in common with the same in other memory."""
    widths = tuple(piece.columns for piece in option.pieces)
    return option.sharding_type, option.data_type, widths
