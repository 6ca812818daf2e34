"""Put a plan together from evaluated pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from planner.cost.context import PoolContext
from planner.cost.exchange import dense_exchange_bytes, embedding_exchange_bytes
from planner.evaluate import MS, Evaluation, evaluate
from planner.fingerprint import (
    error_band,
    fingerprint_parts,
    hwplan_version,
    provenance_counts,
)
from planner.kernels.planned import planned_kernels
from planner.policies import compute_precisions
from planner.specs.cluster import ClusterSpec
from planner.specs.errors import UsageError
from planner.specs.kernels import PlannedGemm
from planner.specs.load import load_device
from planner.specs.model import ModelSpec
from planner.specs.plan import (
    Alternative,
    ExchangePlan,
    Placement,
    Plan,
    Prediction,
    SolverReport,
    fingerprint,
)

FREE_RISE = 1e-3
"""A shorter exchange interval is taken if it lengthens the step by no more than this share."""


def with_batch(model: ModelSpec, global_batch: int | None) -> ModelSpec:
    """The model at the job's global batch.

    Raises:
        UsageError: the batch is not positive.
    """
    if global_batch is None:
        return model
    if global_batch < 1:
        raise UsageError(
            "the global batch is not positive",
            field="global_batch",
            value=global_batch,
            fix="give 1 or more samples",
        )
    return model.model_copy(update={"global_batch": global_batch})


def contexts_of(plan: Plan) -> dict[str, PoolContext]:
    """What the cost model sees of a plan's working pools, with the device profiles of now."""
    model = with_batch(plan.model, plan.global_batch)
    return {
        name: PoolContext(
            pool=plan.cluster.pool(name).model_copy(update={"nodes": pool.nodes}),
            device=load_device(pool.device),
            model=model,
            local_batch=pool.local_batch,
            policy=pool.policy,
            bridge=plan.cluster.bridge,
            pools_in_job=len(plan.pools),
            embedding_interval_steps=plan.exchange.embedding_interval_steps,
            replica_groups=pool.replica_groups,
        )
        for name, pool in plan.pools.items()
    }


def freshest(
    contexts: Mapping[str, PoolContext],
    placements: Mapping[str, Mapping[str, Placement]],
    evaluation: Evaluation,
) -> tuple[dict[str, PoolContext], Evaluation]:
    """The shortest exchange interval between table copies that costs next to nothing.

    The search uses the longest interval that the model allows, which is never slower; but stale
    replicas are a price too, so 1, 2, 4 … steps are tried.
    """
    longest = max(ctx.embedding_interval_steps for ctx in contexts.values())
    interval = 1
    while interval < longest:
        shorter = {
            name: replace(ctx, embedding_interval_steps=interval) for name, ctx in contexts.items()
        }
        tried = evaluate(shorter, placements)
        if tried.step_s <= evaluation.step_s * (1 + FREE_RISE):
            return shorter, tried
        interval *= 2
    return dict(contexts), evaluation


def _kernels(ctx: PoolContext) -> tuple[PlannedGemm, ...]:
    return planned_kernels(ctx, compute_precisions(ctx.device, ctx.model))


def assemble(
    *,
    cluster: ClusterSpec,
    model: ModelSpec,
    global_batch: int,
    kind: Literal["planned", "naive"],
    contexts: Mapping[str, PoolContext],
    evaluation: Evaluation,
    bound_s: float,
    report: SolverReport,
    seed: int = 0,
    considered: tuple[Alternative, ...] = (),
) -> Plan:
    """The plan of evaluated contexts.

    Args:
        model: as the user gave it; ``global_batch`` may differ from its own.
        bound_s: proven lower bound of the step.
    """
    parts = fingerprint_parts(cluster, model)
    copies = any(ctx.copies_tables for ctx in contexts.values())
    interval = max(ctx.embedding_interval_steps for ctx in contexts.values())
    return Plan(
        hwplan_version=hwplan_version(),
        kind=kind,
        fingerprint=fingerprint({str(part): digest for part, digest in parts.items()}),
        fingerprint_parts=parts,
        seed=seed,
        cluster=cluster,
        model=model,
        global_batch=global_batch,
        pools={
            name: pool.model_copy(update={"kernels": _kernels(contexts[name])})
            for name, pool in evaluation.pools.items()
        },
        exchange=ExchangePlan(
            embedding_interval_steps=interval,
            dense_bytes_per_step=dense_exchange_bytes(model) if len(contexts) > 1 else 0,
            embedding_bytes_per_exchange=embedding_exchange_bytes(model, global_batch, interval)
            if copies
            else 0,
        ),
        predicted=Prediction(
            step_ms=evaluation.step_s * MS,
            samples_per_s=global_batch / evaluation.step_s,
            lower_bound_ms=bound_s * MS,
            gap=evaluation.step_s / bound_s - 1,
            provenance=provenance_counts(contexts),
            error_band=error_band(contexts),
        ),
        solver=report,
        considered=considered,
    )
