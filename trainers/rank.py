"""What a rank is given by whoever started it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist


class Bridge(Protocol):
    """Exact sums over all ranks of all pools."""

    def all_reduce_sum(self, tensor: torch.Tensor, *, exact: bool = True) -> None:
        """Replace a CPU or device tensor by its sum over all ranks; same order on every rank.

        Args:
            exact: whether it may not be rounded on its way between pools.
        """


@dataclass(frozen=True)
class RankEnv:
    """One rank: its place, its device and its process groups, already initialised."""

    world_rank: int
    pool: str
    pool_rank: int
    device: torch.device
    world_group: dist.ProcessGroup
    """All ranks, over gloo (host tensors)."""
    pool_group: dist.ProcessGroup
    """The pool's ranks, over the vendor's library."""
    replica_group: dist.ProcessGroup
    """Those among them that hold one copy of the tables together: TorchRec's sharding group. The
    pool's group where there is one copy in the pool."""
    bridge: Bridge

    @property
    def group_rank(self) -> int:
        """Rank inside the replica group."""
        return self.replica_group.rank()
