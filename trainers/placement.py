"""A pool's placements as TorchRec's ``ShardingPlan``, after checking what TorchRec does not.

Ranks: the plan counts inside the replica group; TorchRec's ``ParameterSharding.ranks`` counts
inside its process group (the same); ``ShardMetadata.placement`` wants the world rank.
"""

from __future__ import annotations

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)

from planner.shards import Extent, check_placements, extents
from planner.specs.plan import Plan
from trainers.models.build import EMBEDDINGS


def sharding_plan(
    plan: Plan, pool_name: str, world_rank: int, device: torch.device
) -> ShardingPlan:
    """TorchRec's plan of this rank's replica group, for the module ``trainers.models.TrainModel``.

    Args:
        device: this rank's; the other ranks' device indices are their place on their node.

    Raises:
        SpecError: see ``check_placements``.
    """
    check_placements(plan, pool_name)
    pool = plan.pools[pool_name]
    pool_rank = plan.pool_of_rank(world_rank)[1]
    group_rank = pool_rank % pool.group_ranks
    first_rank, first_pool_rank = world_rank - group_rank, pool_rank - group_rank

    def metadata(extent: Extent) -> ShardMetadata:
        rank = first_rank + extent.rank
        if device.type == "cpu":
            where = "cpu"
        elif rank == world_rank:
            where = str(device)
        else:
            where = f"{device.type}:{(first_pool_rank + extent.rank) % pool.devices_per_node}"
        return ShardMetadata(
            shard_offsets=[extent.row, extent.column],
            shard_sizes=[extent.rows, extent.columns],
            placement=f"rank:{rank}/{where}",
        )

    shardings = {}
    for table in plan.model.all_tables:
        placement = pool.placements[table.name]
        shards = [metadata(extent) for extent in extents(table, placement, pool)]
        cache = placement.cache_load_factor
        shardings[table.name] = ParameterSharding(
            sharding_type=placement.sharding_type.value,
            compute_kernel=placement.compute_kernel.value,
            ranks=list(placement.ranks),
            sharding_spec=EnumerableShardingSpec(shards) if shards else None,
            cache_params=None if cache is None else CacheParams(load_factor=cache),
            # The default replaces an id out of range by 0 and trains on.
            bounds_check_mode=BoundsCheckMode.FATAL,
        )
    return ShardingPlan({EMBEDDINGS: EmbeddingModuleShardingPlan(shardings)})
