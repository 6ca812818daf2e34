"""TorchRec's sharder of the tables, for groups that do not hold the job's first rank."""

from __future__ import annotations

from typing import Any

import torch
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import ParameterSharding, ShardingEnv


class _ShardedTables(ShardedEmbeddingBagCollection):
    """Leaves initial weights to ``trainers.shards.initialise``.

    TorchRec would broadcast data-parallel tables from *world* rank 0 inside the sharding group,
    where it need not be (TorchRec 1.8.0, ``embeddingbag.py:1614``).
    """

    def reset_parameters(self) -> None:
        """Nothing: weights are set right after sharding."""


class TableSharder(EmbeddingBagCollectionSharder):
    """Shards the tables inside a replica group."""

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """See TorchRec."""
        return _ShardedTables(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )
