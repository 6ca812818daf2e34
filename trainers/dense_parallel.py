"""How the ranks of a pool share the dense network: ``MemoryPolicy.dense_parallelism``.

* ``data_parallel``, ``sharded_optimizer``: every rank has all parameters; gradients are summed over
  all pools (``trainers.gradients``). With the latter, each rank of the pool keeps the optimizer
  state of some parameters, updates these and broadcasts them (``trainers.optimizers``).
* ``fully_sharded``: parameters, gradients and state are cut along their first dimension among the
  pool's ranks. A block is gathered before its forward and again before its backward pass. Gradients
  are means over the ranks: local batches in a pool are equal, so samples are weighted alike.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from planner.specs.errors import SpecError
from planner.specs.plan import Plan
from trainers.gradients import DenseExchange, WorldDataParallel
from trainers.rank import RankEnv


class FullyShardedNetwork(DataParallelWrapper):
    """Cuts the network of ``TrainModel`` among the ranks of ``pool_group``, child by child."""

    def __init__(self, pool_group: dist.ProcessGroup) -> None:
        self._pool_group = pool_group

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Called by TorchRec once the tables are sharded."""
        # Logits are a view, which must not be written in place: the loss only reads them.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        network = dmp.module.head.network
        mesh = DeviceMesh.from_group(self._pool_group, device.type)
        blocks = [m for m in network.children() if next(m.parameters(), None) is not None]
        # The network itself, left without parameters, has its blocks share streams and buffers.
        for module in (*blocks, network):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)


def spread_network(
    plan: Plan, rank: RankEnv, loss_scale: float
) -> tuple[DataParallelWrapper, DenseExchange | None]:
    """The wrapper of the dense network on this rank, and the exchange of its gradients (None with
    one rank, and where FSDP reduces them).

    Raises:
        SpecError: a fully sharded network in a job of several pools, whose gradients nothing would
            sum.
    """
    pool = plan.pools[rank.pool]
    if pool.policy.dense_parallelism == "fully_sharded":
        if len(plan.pools) > 1:
            raise SpecError(
                "the dense network can be fully sharded only in a job of one pool",
                field=f"pools.{rank.pool}.policy.dense_parallelism",
                value=pool.policy.dense_parallelism,
                fix="make the plan again with hwplan plan --out",
            )
        return FullyShardedNetwork(rank.pool_group), None
    exchange = None
    if plan.world_size > 1:
        weight = pool.local_batch / plan.global_batch / loss_scale
        exchange = DenseExchange(rank.bridge, weight, rank.device)
    return WorldDataParallel(rank.world_group, exchange), exchange
