"""Node-level process groups for ``table_row_wise`` and ``grid_shard``.

TorchRec derives them from the world and LOCAL_WORLD_SIZE and caches them in its module. In a mixed
job each pool has nodes of its own size, and a pool may hold several replica groups, so they are
made here, inside the replica groups, and put in that cache before TorchRec looks.
"""

from __future__ import annotations

import torch.distributed as dist
import torchrec.distributed.comm as torchrec_comm

from planner.specs.model import ShardingType
from planner.specs.plan import Plan, PoolPlan
from trainers.rank import RankEnv

_NODE_SHARDINGS = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)


def create_node_groups(plan: Plan, rank: RankEnv) -> None:
    """Groups of the ranks of one node, and of the same place on every node, of a replica group.

    None for pools without tables that need them. All ranks of the job must call it, and all create
    the groups of all: PyTorch tells groups apart by their count. (It can have the members alone
    create one, but then counts what each of them has joined, and rail leaders have joined more.)
    """
    own_backend = dist.get_backend(rank.replica_group)
    first = 0
    for name, pool in plan.pools.items():
        starts = range(first, first + pool.ranks, pool.group_ranks)
        first += pool.ranks
        if not any(p.sharding_type in _NODE_SHARDINGS for p in pool.placements.values()):
            continue
        # A rank of another pool may lack the vendor's library.
        backend = own_backend if name == rank.pool else "gloo"
        for start in starts:
            inside, across = _node_ranks(pool, start)
            intra = [dist.new_group(ranks, backend=backend) for ranks in inside]
            cross = [dist.new_group(ranks, backend=backend) for ranks in across]
            place = rank.world_rank - start
            if 0 <= place < pool.group_ranks:
                node, device = divmod(place, pool.group_devices_per_node)
                torchrec_comm._INTRA_PG = intra[node]
                torchrec_comm._CROSS_PG = cross[device]
                torchrec_comm._NODE_GROUP_SIZE_2D = pool.group_devices_per_node


def _node_ranks(pool: PoolPlan, start: int) -> tuple[list[list[int]], list[list[int]]]:
    """World ranks of each node, and of each place on all nodes, of the group that begins there."""
    ranks, node_size = range(start, start + pool.group_ranks), pool.group_devices_per_node
    return (
        [list(ranks[low : low + node_size]) for low in range(0, pool.group_ranks, node_size)],
        [list(ranks[place::node_size]) for place in range(node_size)],
    )
