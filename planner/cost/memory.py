"""Device memory of one rank by category, bytes.

Everything but tables: dense weights, gradients (they live in the all-reduce buckets), optimizer
state, each as the dense parallelism cuts it; low-precision copies of the weights under autocast
(its graph keeps them, whole blocks or not), activations, input batches in flight, pooled rows and
their gradients on the receiving side, the driver's context. One shard: weights,
optimizer state, gradients (data-parallel only), cache metadata, and its side of the exchanges.
"""

from __future__ import annotations

import math

from planner.cost.context import PoolContext
from planner.cost.dense import dense_network, parameters
from planner.cost.dense_shards import FP32_BYTES, gathered_bytes, held_elements, updated_elements
from planner.cost.dense_time import saved_activation_bytes
from planner.cost.elementwise import activation_bytes_per_element
from planner.specs.model import ComputeKernel, ShardingType, Table
from planner.specs.units import Dtype

ID_BYTES = 8
CACHE_SLOT_BYTES = 16
"""Row id and time stamp of one slot of FBGEMM's software cache."""
CACHE_ROW_BYTES = 4
"""Its index entry of one row of the table."""
CACHE_LOCK_BYTES = 4
"""Its lock of one slot, which rows that are fetched ahead must not take while they are in use."""
CACHE_LOCATION_BYTES = 4
"""Slot of one id that was fetched ahead."""
FETCHED_AHEAD = 3
"""Prefetch depth at which the next batch's missed rows are fetched while this one computes."""
IN_FLIGHT = 2
"""Pooled rows and their gradient, alive together."""


def base_memory_bytes(ctx: PoolContext) -> dict[str, int]:
    """Bytes of device memory on one rank by category, without tables."""
    model, batch = ctx.model, ctx.local_batch
    network = dense_network(model)
    count = parameters(network.blocks)
    precision = ctx.policy.compute_precision
    low_precision = precision not in (Dtype.FP32, Dtype.TF32)
    copies = count * activation_bytes_per_element(precision) if low_precision else 0
    tables = model.all_tables
    ids = sum(table.pooling + len(table.feature_names) for table in tables)
    sample_bytes = FP32_BYTES * (model.dense_features + 1) + ID_BYTES * ids
    held, state = held_elements(ctx), model.optimizer.dense.state_floats_per_parameter
    gathered = gathered_bytes(ctx)
    return {
        "context": int(ctx.device.memory.context_bytes.value),
        "dense_weights": FP32_BYTES * held,
        "dense_gradients": FP32_BYTES * held,
        "dense_optimizer": FP32_BYTES * updated_elements(ctx) * state,
        **({"gathered_blocks": gathered} if gathered else {}),
        "low_precision_weights": copies,
        "activations": saved_activation_bytes(ctx),
        "input_batches": math.ceil(sample_bytes * batch) * ctx.policy.prefetch_depth,
        "pooled_embeddings": IN_FLIGHT * FP32_BYTES * batch * network.pooled_width,
    }


def shard_rows(ctx: PoolContext, table: Table, sharding_type: ShardingType) -> int:
    """Rows of the largest shard of ``table``."""
    if sharding_type is ShardingType.ROW_WISE:
        return math.ceil(table.num_embeddings / ctx.ranks)
    if sharding_type in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD):
        return math.ceil(table.num_embeddings / ctx.pool.devices_per_node)
    return table.num_embeddings


def _stored_bytes(ctx: PoolContext, rows: int, data_type: Dtype, columns: int) -> tuple[int, int]:
    """(weights, optimizer state) of ``rows`` rows."""
    state = ctx.model.optimizer.sparse.state_floats_per_row(columns)
    return rows * columns * data_type.bytes, rows * state * FP32_BYTES


def shard_memory_bytes(
    ctx: PoolContext,
    table: Table,
    sharding_type: ShardingType,
    compute_kernel: ComputeKernel,
    data_type: Dtype,
    columns: int,
    cache_load_factor: float | None,
) -> dict[str, int]:
    """Device bytes of one shard by category (``columns`` wide).

    UVM kernels keep weights and optimizer state in host memory; with caching the cached rows and
    the cache's metadata take device memory.
    """
    rows = shard_rows(ctx, table, sharding_type)
    weights, state = _stored_bytes(ctx, rows, data_type, columns)
    gradients = cache = 0
    if compute_kernel is ComputeKernel.DENSE:
        gradients = rows * columns * FP32_BYTES
    elif compute_kernel is ComputeKernel.FUSED_UVM:
        weights = state = 0
    elif compute_kernel is ComputeKernel.FUSED_UVM_CACHING:
        assert cache_load_factor is not None
        slots = math.ceil(rows * cache_load_factor)
        weights, state = slots * columns * data_type.bytes, 0
        cache = rows * CACHE_ROW_BYTES + slots * CACHE_SLOT_BYTES
        if ctx.policy.prefetch_depth == FETCHED_AHEAD:
            ids = ctx.pool_batch * table.pooling * rows / table.num_embeddings
            cache += slots * CACHE_LOCK_BYTES + math.ceil(ids) * CACHE_LOCATION_BYTES
    return {
        "table_weights": weights,
        "table_optimizer": state,
        "table_gradients": gradients,
        "table_cache": cache,
        "exchange_buffers": _exchange_bytes(ctx, table, sharding_type, columns),
    }


def _exchange_bytes(
    ctx: PoolContext, table: Table, sharding_type: ShardingType, columns: int
) -> int:
    """Ids received for a shard (of the batches in flight), its pooled rows and their gradients."""
    if sharding_type is ShardingType.DATA_PARALLEL:
        return 0
    split = table.num_embeddings / shard_rows(ctx, table, sharding_type)
    ids = ctx.pool_batch * (table.pooling / split + len(table.feature_names)) * ID_BYTES
    pooled = ctx.pool_batch * len(table.feature_names) * columns * FP32_BYTES
    return math.ceil(ids) * ctx.policy.prefetch_depth + IN_FLIGHT * pooled


def shard_host_bytes(
    ctx: PoolContext,
    table: Table,
    sharding_type: ShardingType,
    compute_kernel: ComputeKernel,
    data_type: Dtype,
    columns: int,
) -> int:
    """Host bytes of one shard: weights and optimizer state of the UVM kernels."""
    if compute_kernel not in (ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING):
        return 0
    rows = shard_rows(ctx, table, sharding_type)
    return sum(_stored_bytes(ctx, rows, data_type, columns))
