"""Exchanges between pools over the bridge (gloo over host memory), and of table copies.

S bytes on R rails among P pools (one leader per pool and rail)::

    t = staging + rounds * latency + 2 (P-1)/P * S/R / bandwidth        rounds = 2 (P-1)

The leaders' ring all-reduce moves 2 (P-1)/P of each rail's slice; staging copies the slice from
device to host and back over the host link. On CPU workers there is no staging; their pool's other
workers wait for the leader, so it has the core for its socket, and the cluster file's bandwidth is
that of two busy cores. Inside the pool, before and after: a ``pool_sum``.

Tables have a copy in every pool, and in a pool of several replica groups one in each of them. All
copies of the touched rows are combined every K steps; with one pool that is the ``pool_sum`` alone.
"""

from __future__ import annotations

from functools import lru_cache

from planner.cost.collectives import collective_seconds
from planner.cost.context import PoolContext
from planner.cost.dense import dense_network, parameters
from planner.cost.dense_shards import FP32_BYTES
from planner.cost.elementwise import elementwise_seconds
from planner.cost.zipf import expected_distinct
from planner.specs.model import ModelSpec

ID_BYTES = 8


def dense_exchange_bytes(model: ModelSpec) -> int:
    """fp32 gradients of the dense network."""
    return FP32_BYTES * parameters(dense_network(model).blocks)


@lru_cache(maxsize=256)
def touched_rows(model: ModelSpec, global_batch: int, interval_steps: int) -> tuple[float, ...]:
    """Expected distinct rows of each table that ``interval_steps`` global batches look up."""
    samples = global_batch * interval_steps
    return tuple(
        expected_distinct(table.num_embeddings, table.zipf_exponent, samples * table.pooling)
        for table in model.all_tables
    )


def embedding_exchange_bytes(model: ModelSpec, global_batch: int, interval_steps: int) -> int:
    """fp32 rows and optimizer state of the expected distinct touched rows of one exchange."""
    sparse = model.optimizer.sparse
    touched = touched_rows(model, global_batch, interval_steps)
    return int(
        sum(
            rows
            * FP32_BYTES
            * (table.embedding_dim + sparse.state_floats_per_row(table.embedding_dim))
            for rows, table in zip(touched, model.all_tables, strict=True)
        )
    )


def bridge_seconds(ctx: PoolContext, total_bytes: float) -> float:
    """All-reduce of ``total_bytes`` among the leaders of all pools, staging included."""
    bridge, pools = ctx.bridge, ctx.pools_in_job
    if bridge is None or pools == 1 or total_bytes == 0:
        return 0.0
    rail_bytes = total_bytes / bridge.rails
    bandwidth = bridge.bytes_per_s
    staging_s = 0.0
    if not ctx.device.is_cpu:
        link = ctx.device.host.link_bytes_per_s.value * ctx.device.host.link_efficiency.value
        staging_s = 2 * rail_bytes / link
    rounds = 2 * (pools - 1)
    return staging_s + rounds * (bridge.latency_s + rail_bytes / pools / bandwidth)


EXCHANGE_PASSES = 7
"""Passes over a shard's touched rows: read into a copy (2), weighted and added to the buffer (3),
written back from it (2). The buffer is zeroed before, on every rank the whole."""
EXCHANGE_OPERATORS = 20
"""Launches per table held: its part of the buffer found, gathered, added and written back."""


def embedding_exchange_seconds(ctx: PoolContext) -> float:
    """Exchange of table copies per step, spread over its interval.

    The ranks' distinct ids are gathered, every rank adds its shards' rows to a zeroed buffer over
    the union of touched rows, the buffers are summed over all ranks of the pool (all its replica
    groups), over the bridge and back where there are several pools, and every rank writes its
    shards' rows. A group's ranks share the work on its copy.
    """
    if not ctx.copies_tables:
        return 0.0
    sharers = ctx.sharding_group.ranks
    interval, batch = ctx.embedding_interval_steps, ctx.model.global_batch
    rows_bytes = embedding_exchange_bytes(ctx.model, batch, interval)
    id_bytes = ID_BYTES * sum(touched_rows(ctx.model, batch, interval))
    moved_bytes = rows_bytes * (1 + EXCHANGE_PASSES / sharers)
    framework = ctx.device.framework
    operators = EXCHANGE_OPERATORS * len(ctx.model.all_tables) / sharers
    local_s = elementwise_seconds(ctx.device, moved_bytes, 4) + operators * framework.op_s.value
    seconds = (
        bridge_seconds(ctx, rows_bytes + id_bytes)
        + collective_seconds(ctx, "all_gather", id_bytes)
        + collective_seconds(ctx, "pool_sum", rows_bytes)
        + local_s / ctx.compute_share
    )
    return seconds / interval
