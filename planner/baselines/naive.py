"""The naive port: a plan made for the reference device, applied unchanged to every pool.

* Every rank gets the same local batch (``planner.splits.equal_split`` where B does not divide).
* The recipe's own precisions (the first of each list), no recompute, in every pool. A device that
  lacks the recipe's compute precision falls back to fp32, as frameworks do.
* Placements come from a conventional greedy planner (``planner.baselines.greedy``) that knows the
  reference device's costs, with capacities cut to the smallest device of the cluster. Pools of
  different sizes need a placement each; the greedy makes it with the same costs.
* The exchange interval obeys the same staleness limit as the planned job's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.assemble import assemble, freshest, with_batch
from planner.baselines.greedy import conventional, greedy
from planner.baselines.problem import placements_of, recipe_type
from planner.cost.context import PoolContext
from planner.cost.memory import base_memory_bytes
from planner.cost.step import StepGraph
from planner.crew import Crew
from planner.evaluate import Evaluation, evaluate
from planner.groups import grouped
from planner.ilp.options import Way, table_classes
from planner.ilp.program import PoolProgram
from planner.ilp.solve import SolverOptions
from planner.infeasible import unreachable_batch
from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.device import DeviceProfile
from planner.specs.errors import InfeasibleError
from planner.specs.load import load_device
from planner.specs.model import ModelSpec, Table
from planner.specs.plan import MemoryPolicy, Placement, Plan, SolverReport
from planner.specs.units import GIB, Dtype
from planner.splits import SplitSpace, equal_split


@dataclass(frozen=True)
class NaiveChoice:
    """The port's contexts, placements and their evaluation, by pool."""

    contexts: dict[str, PoolContext]
    placements: dict[str, dict[str, Placement]]
    evaluation: Evaluation


def naive_policy(device: DeviceProfile, model: ModelSpec) -> MemoryPolicy:
    """The recipe's policy on a device."""
    recipe = model.precision.compute[0]
    return MemoryPolicy(
        compute_precision=recipe if recipe in device.compute.peak_flops_per_s else Dtype.FP32,
        communication_precision=model.precision.communication[0],
    )


def naive_choice(cluster: ClusterSpec, model: ModelSpec) -> NaiveChoice:
    """What the naive port does at the model's global batch.

    Raises:
        InfeasibleError: the batch cannot be split, or the port does not fit.
    """
    split = equal_split({pool.name: pool.devices for pool in cluster.pools}, model.global_batch)
    if split is None:
        raise unreachable_batch(cluster, model, matched=True)
    several = len(cluster.pools) > 1
    contexts = {
        pool.name: PoolContext(
            pool=pool,
            device=(device := load_device(pool.device)),
            model=model,
            local_batch=split[pool.name],
            policy=naive_policy(device, model),
            bridge=cluster.bridge,
            pools_in_job=len(cluster.pools),
            embedding_interval_steps=model.max_exchange_interval_steps if several else 1,
        )
        for pool in cluster.pools
    }
    hbm_room = min(
        ctx.hbm_capacity_bytes - sum(base_memory_bytes(ctx).values()) for ctx in contexts.values()
    )
    on_cpu = any(ctx.device.is_cpu for ctx in contexts.values())
    host_room = 0 if on_cpu else min(ctx.host_capacity_bytes for ctx in contexts.values())
    reference = load_device(cluster.reference_device)
    placements = {
        name: _greedy_placements(
            _as_on(reference, ctx), float(hbm_room), float(host_room), spill=not on_cpu
        )
        for name, ctx in contexts.items()
    }
    contexts, evaluation = freshest(contexts, placements, evaluate(contexts, placements))
    if evaluation.overfull:
        name, rank, which, excess = evaluation.overfull[0]
        raise InfeasibleError(
            f"the naive port does not fit: rank {rank} of pool {name} lacks {excess:,} bytes of "
            f"{which} memory",
            fix="use a smaller global batch or a larger pool for the comparison",
        )
    return NaiveChoice(contexts, placements, evaluation)


def _as_on(reference: DeviceProfile, ctx: PoolContext) -> PoolContext:
    """The same pool if it had the reference device."""
    return PoolContext(
        pool=ctx.pool,
        device=reference,
        model=ctx.model,
        local_batch=ctx.local_batch,
        policy=naive_policy(reference, ctx.model),
        bridge=ctx.bridge,
        pools_in_job=ctx.pools_in_job,
        embedding_interval_steps=ctx.embedding_interval_steps,
    )


def _greedy_placements(
    ctx: PoolContext, hbm_room: float, host_room: float, spill: bool
) -> dict[str, Placement]:
    def keep(table: Table, way: Way) -> bool:
        return way.data_type == recipe_type(ctx.model, table) and conventional(
            table, way.sharding_type, way.column_widths, way.cache_load_factor
        )

    program = PoolProgram(
        graph=StepGraph(()),
        nodes=ctx.pool.nodes,
        devices_per_node=ctx.pool.devices_per_node,
        classes=table_classes(ctx, spill, keep),
        hbm_room_bytes=hbm_room,
        host_room_bytes=host_room,
    )
    assignment = greedy(program)
    if assignment is None:
        raise InfeasibleError(
            f"the naive port does not fit: a greedy plan for {ctx.device.name} finds no room for "
            f"the tables in pool {ctx.pool.name} with {hbm_room / GIB:.1f} GiB per rank",
            fix="use a larger pool, or fewer or smaller tables, for the comparison",
        )
    return placements_of(ctx, program, assignment)


def naive_port(cluster: ClusterSpec, model: ModelSpec, global_batch: int | None = None) -> Plan:
    """The naive port as a plan that can be executed and measured.

    Its lower bound is that of a job without tables on the same devices.

    Raises:
        InfeasibleError: the batch cannot be split, or the port does not fit.
        UsageError: the batch is not positive.
    """
    job = with_batch(model, global_batch)
    choice = naive_choice(cluster, job)
    return assemble(
        cluster=cluster,
        model=model,
        global_batch=job.global_batch,
        kind="naive",
        contexts=choice.contexts,
        evaluation=choice.evaluation,
        bound_s=min(_dense_bound_s(cluster, job), choice.evaluation.step_s),
        report=SolverReport(
            name="greedy", status="heuristic", mip_gap=0.0, time_limit_s=1.0, evaluated=0, pruned=0
        ),
    )


def _dense_bound_s(cluster: ClusterSpec, model: ModelSpec) -> float:
    """No plan on all devices of the cluster, linked pools joined or not, has a shorter step."""
    return min(
        crew.dense_s(crew.space.root)
        for crew in (_whole_crew(cluster, model, pools) for pools in cluster.ways())
        if crew.space.root is not None
    )


def _whole_crew(cluster: ClusterSpec, model: ModelSpec, pools: Sequence[PoolSpec]) -> Crew:
    studies = tuple(
        grouped(
            pool=pool,
            model=model,
            bridge=cluster.bridge,
            pools_in_job=len(pools),
            options=SolverOptions(),
        )
        for pool in pools
    )
    return Crew(studies, SplitSpace(tuple(study.ranks for study in studies), model.global_batch))
