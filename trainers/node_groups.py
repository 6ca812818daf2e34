"""Node-level process groups for ``table_row_wise`` and ``grid_shard``.

TorchRec derives them from the world and LOCAL_WORLD_SIZE and caches them in its module. In a mixed
job each pool has nodes of its own size, so the groups are made here, per pool, and put in that
cache before TorchRec looks.
"""

from __future__ import annotations

import torch.distributed as dist
import torchrec.distributed.comm as torchrec_comm

from planner.specs.model import ShardingType
from planner.specs.plan import Plan

_NODE_SHARDINGS = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)


def create_node_groups(plan: Plan, world_rank: int, pool_group: dist.ProcessGroup) -> None:
    """Groups of the ranks of one node, and of the same place on every node, of this pool.

    Does nothing where no table of the pool needs them. All ranks of the pool must call it.
    """
    name, pool_rank = plan.pool_of_rank(world_rank)
    pool = plan.pools[name]
    if not any(p.sharding_type in _NODE_SHARDINGS for p in pool.placements.values()):
        return
    node_size, first_rank = pool.devices_per_node, world_rank - pool_rank
    backend = dist.get_backend(pool_group)
    node, place = divmod(pool_rank, node_size)
    inside = [first_rank + node * node_size + index for index in range(node_size)]
    across = [first_rank + index * node_size + place for index in range(pool.ranks // node_size)]
    # Only the members take part: the other pools have other nodes.
    torchrec_comm._INTRA_PG, torchrec_comm._CROSS_PG = (
        dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        for ranks in (inside, across)
    )
    torchrec_comm._NODE_GROUP_SIZE_2D = node_size
