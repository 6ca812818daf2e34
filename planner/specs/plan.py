"""The plan: the only contract between planner and runtime.

A plan file is canonical JSON. ``fingerprint`` covers what went in (cluster, model, device
profiles, code version) and ``digest`` covers everything that stands in the file, so that a
truncated or edited plan is noticed and a plan for another cluster is refused.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from planner.specs.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PoolName,
    PositiveFloat,
    PositiveInt,
    Spec,
    canonical_json,
    read_text,
    rounded,
    sha256,
    validate,
    write_atomically,
)
from planner.specs.cluster import JOIN, ClusterSpec, PoolSpec
from planner.specs.consistency import check_consistency
from planner.specs.errors import SpecError
from planner.specs.kernels import Backend, PlannedGemm
from planner.specs.model import ComputeKernel, ModelSpec, ShardingType
from planner.specs.units import Dtype

SCHEMA_VERSION = 2

KernelPolicy = Literal["vendor", "preselected"]
DenseParallelism = Literal["data_parallel", "sharded_optimizer", "fully_sharded"]


class MemoryPolicy(Spec):
    """Per pool: what is kept, in which precision, and what is computed again."""

    compute_precision: Dtype
    recompute: tuple[str, ...] = ()
    """Blocks of the dense network whose activations are dropped and computed again in the backward
    pass, by name, in forward order (``planner.cost.dense``)."""
    dense_parallelism: DenseParallelism = "data_parallel"
    """``data_parallel``: every rank holds the dense network and its optimizer state.
    ``sharded_optimizer``: each rank of the pool keeps the state of, and updates, its part of the
    parameters. ``fully_sharded``: parameters and gradients are cut among the ranks too, and
    gathered block by block."""
    optimizer_state: Literal["device"] = "device"
    communication_precision: Dtype = Dtype.FP32
    prefetch_depth: Annotated[int, Field(ge=1, le=3)] = 2
    """Batches in flight on the device. 1: none ahead. 2: the next batch's ids are distributed
    meanwhile. 3: and the rows that it misses in ``fused_uvm_caching`` tables are fetched."""
    kernels: KernelPolicy = "vendor"
    """``vendor``: every product of the dense network runs in the vendor's library, by its own
    heuristics. ``preselected``: in the kernel that the plan names."""


class Placement(Spec):
    """Of one table in one pool. Ranks are counted inside the replica group (the whole pool where
    there is only one), from 0."""

    sharding_type: ShardingType
    compute_kernel: ComputeKernel
    data_type: Dtype
    ranks: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    """table_wise: one; column_wise: one per column shard (repeats allowed); row_wise and
    data_parallel: all, in order; table_row_wise: the ranks of one node; grid_shard: the ranks of
    one node per column shard, concatenated."""
    column_widths: tuple[PositiveInt, ...] = ()
    """column_wise and grid_shard: columns of each shard, left to right; else empty."""
    cache_load_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    """fused_uvm_caching: cached share of the rows."""


class PoolPrediction(Spec):
    """Predicted step of one pool."""

    step_ms: PositiveFloat
    breakdown_ms: dict[str, NonNegativeFloat]
    """Duration of every operation of the step graph (they overlap: no sum)."""
    critical_path: tuple[str, ...]
    """Operations whose durations make up the step."""
    slowest_rank: NonNegativeInt


class PoolPlan(Spec):
    """What one pool does."""

    device: str
    nodes: PositiveInt
    devices_per_node: PositiveInt
    ranks: PositiveInt
    """Working devices: nodes x devices_per_node."""
    local_batch: PositiveInt
    """Samples per rank and step."""
    replica_groups: PositiveInt = 1
    """Groups of ranks, consecutive and equal, that hold a copy of the tables each, sharded inside
    the group. Placements count ranks inside a group, and are the same for all of them."""
    policy: MemoryPolicy
    placements: dict[str, Placement]
    memory_bytes: tuple[dict[str, NonNegativeInt], ...]
    """Per rank: bytes of device memory by category, with ``total``, ``capacity`` and ``host``."""
    predicted: PoolPrediction
    kernels: tuple[PlannedGemm, ...] = ()
    """Every product of a step, in every precision that the model allows and the device has; those
    in ``policy.compute_precision`` run. Empty where ``policy.kernels`` is ``vendor``."""

    @property
    def group_ranks(self) -> int:
        """Ranks of one replica group."""
        return self.ranks // self.replica_groups

    @property
    def group_devices_per_node(self) -> int:
        """Ranks of one replica group on one node: all of the node's, unless it holds several."""
        return min(self.devices_per_node, self.group_ranks)

    @property
    def own_kernels(self) -> tuple[PlannedGemm, ...]:
        """The products that run outside the vendor's library."""
        return tuple(
            item
            for item in self.kernels
            if item.dtype is self.policy.compute_precision
            and item.candidates[0].backend is not Backend.VENDOR
        )


class ExchangePlan(Spec):
    """Traffic between pools, and between the replica groups of a pool."""

    embedding_interval_steps: PositiveInt
    """K: touched rows of the embedding replicas are combined every so many steps."""
    dense_bytes_per_step: NonNegativeInt
    """Over the bridge; 0 with one pool."""
    embedding_bytes_per_exchange: NonNegativeInt
    """0 with one copy of the tables."""


class Prediction(Spec):
    """Of the whole job."""

    step_ms: PositiveFloat
    samples_per_s: PositiveFloat
    lower_bound_ms: PositiveFloat
    """Proven: no plan in the search space has a shorter predicted step."""
    gap: NonNegativeFloat
    """(step_ms - lower_bound_ms) / lower_bound_ms."""
    provenance: dict[str, NonNegativeInt]
    """How many profile constants of each provenance the prediction rests on."""
    error_band: NonNegativeFloat
    """Relative: root of the mean squared relative errors of the constants used."""


class SolverReport(Spec):
    """How the answer was found; no wall times, so that equal inputs give equal bytes."""

    name: str
    status: Literal["optimal", "exhausted", "time_limit", "heuristic"]
    """``optimal``: proven within ``mip_gap``; ``exhausted``: the search ended, with a larger gap;
    ``time_limit``: the time was over before; ``heuristic``: no solver (naive port)."""
    mip_gap: NonNegativeFloat
    time_limit_s: PositiveFloat
    evaluated: NonNegativeInt
    """Pool programs solved."""
    pruned: NonNegativeInt
    """Policies and splits excluded by their lower bound."""


class Alternative(Spec):
    """One row of the considered table."""

    description: str
    pools: tuple[str, ...]
    local_batch: dict[str, PositiveInt]
    step_ms: PositiveFloat | None
    """None: infeasible."""
    samples_per_s: PositiveFloat | None
    note: str = ""
    chosen: bool = False


class Plan(Spec):
    """A plan that a training job executes unchanged."""

    schema_version: PositiveInt = SCHEMA_VERSION
    hwplan_version: str
    kind: Literal["planned", "naive"]
    fingerprint: str
    fingerprint_parts: dict[Literal["cluster", "model", "profiles", "code"], str]
    digest: str = ""
    seed: NonNegativeInt = 0
    cluster: ClusterSpec
    model: ModelSpec
    global_batch: PositiveInt
    pools: Annotated[dict[PoolName, PoolPlan], Field(min_length=1)]
    """Working pools only, in the cluster file's order (a joined one where its first member is)."""
    exchange: ExchangePlan
    predicted: Prediction
    solver: SolverReport
    considered: tuple[Alternative, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of all pools."""
        return sum(pool.ranks for pool in self.pools.values())

    @property
    def table_copies(self) -> int:
        """Replica groups of all pools: each holds a copy of the tables."""
        return sum(pool.replica_groups for pool in self.pools.values())

    @property
    def parts(self) -> tuple[PoolSpec, ...]:
        """The cluster file's pools that work, each with its working nodes: joined ones apart."""
        return tuple(
            part
            for name, pool in self.pools.items()
            for part in self.cluster.pool(name).model_copy(update={"nodes": pool.nodes}).parts
        )

    @property
    def nodes_at_work(self) -> dict[str, int]:
        """Working nodes by pool of the cluster file."""
        return {part.name: part.nodes for part in self.parts}

    def workplace(self, pool: str) -> str | None:
        """The plan's pool that a pool of the cluster file is, or is joined into; None: idle."""
        return next((name for name in self.pools if pool in name.split(JOIN)), None)

    def pool_of_rank(self, rank: int) -> tuple[str, int]:
        """Pool name and pool-local rank of a world rank (pools in order, ranks contiguous)."""
        for name, pool in self.pools.items():
            if rank < pool.ranks:
                return name, rank
            rank -= pool.ranks
        raise IndexError("no such rank in this plan")

    def works_like(self, other: Plan) -> bool:
        """Whether a run of this plan is a run of ``other``, however either was found."""
        return (self.pools, self.exchange) == (other.pools, other.exchange)

    def share(self, pool: str) -> float:
        """alpha_p: the pool's share of the global batch's samples."""
        return self.pools[pool].ranks * self.pools[pool].local_batch / self.global_batch


def _round_floats(data: Any) -> Any:
    if isinstance(data, float):
        return rounded(data)
    if isinstance(data, dict):
        return {key: _round_floats(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_round_floats(value) for value in data]
    return data


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, floats rounded, with its digest filled in."""
    data: dict[str, Any] = _round_floats(plan.model_dump(mode="json"))
    data.pop("digest")
    data["digest"] = sha256(data)
    return data


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write canonical JSON atomically.

    Raises:
        SpecError: if the folder does not exist or is not writable.
    """
    # Pools keep the cluster's order (it decides world ranks), so only the digest sorts keys.
    text = json.dumps(plan_json(plan), separators=(",", ":"), allow_nan=False)
    write_atomically(path, text + "\n")


def _refuse_constant(name: str) -> None:
    """Plans hold no NaN or Infinity, though Python's parser would accept them."""
    raise ValueError(name)


def _finite(text: str) -> float:
    """A number beyond a float's range (1e999) would become infinite."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def load_plan(path: str | Path) -> Plan:
    """Read a plan and check schema, digest and internal consistency.

    Raises:
        SpecError: truncated, edited, of another schema version, or not a plan at all.
    """
    text = read_text(path, "plan")
    try:
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        raise SpecError(
            "not valid JSON: the plan is truncated or damaged",
            file=path,
            fix="make it again with hwplan plan --out",
        ) from None
    if not isinstance(data, dict) or "schema_version" not in data:
        raise SpecError(
            "this is not a plan", file=path, fix="give a file written by hwplan plan --out"
        )
    if data["schema_version"] != SCHEMA_VERSION:
        raise SpecError(
            f"this hwplan reads plan schema {SCHEMA_VERSION}",
            file=path,
            field="schema_version",
            value=data["schema_version"],
            fix="make the plan again with this version of hwplan",
        )
    digest = data.pop("digest", None)
    if digest != sha256(data):
        raise SpecError(
            "the content does not match the plan's digest: it was edited or damaged",
            file=path,
            field="digest",
            fix="make it again with hwplan plan --out (change the model or cluster file, "
            "not the plan)",
        )
    data["digest"] = digest
    plan = validate(Plan, data, path)
    check_consistency(plan, path)
    return plan


def fingerprint(parts: dict[str, str]) -> str:
    """SHA-256 over the fingerprints of cluster, model, profiles and code version."""
    return sha256(canonical_json(parts))
