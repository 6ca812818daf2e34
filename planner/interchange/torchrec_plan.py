"""A pool's placements as TorchRec's ``ShardingPlan``: as data, and as a Python module.

Both follow ``ParameterSharding`` and ``ShardMetadata`` of torchrec.distributed field by field, so
neither TorchRec nor hwplan is needed to read the data, and TorchRec alone to run the module.

Ranks: ``ranks`` counts inside the pool's process group; a shard's ``placement`` names the world
rank, ``rank:<first_rank + rank>/<device>``.
"""

from __future__ import annotations

import json
import pprint
import re
from pathlib import Path
from typing import Any

from planner.shards import Extent, check_placements, extents
from planner.specs.errors import UsageError
from planner.specs.plan import Placement, Plan, PoolPlan

DEVICE_TYPES = ("cuda", "cpu")
"""As PyTorch says it: AMD's GPUs are ``cuda`` too."""
BOUNDS_CHECK_MODE = "FATAL"
"""TorchRec's default replaces an id out of range by 0 and trains on."""


def pool_to_export(plan: Plan, pool: str | None) -> str:
    """The pool's name; the plan's only one if none is given.

    Raises:
        UsageError: no such pool, or several to choose from.
    """
    if pool is None and len(plan.pools) == 1:
        return next(iter(plan.pools))
    if pool is None or pool not in plan.pools:
        names = ", ".join(plan.pools)
        problem = "which of the plan's pools?" if pool is None else "the plan has no such pool"
        given = {} if pool is None else {"value": pool}
        fix = f"each pool has a sharding plan of its own: give one of {names}"
        raise UsageError(problem, field="--pool", fix=fix, **given)
    return pool


def sharding_plan_data(
    plan: Plan,
    pool_name: str,
    *,
    module: str = "",
    first_rank: int = 0,
    device_type: str = "cuda",
) -> dict[str, Any]:
    """The sharding plan as plain data: ``{"plan": {module: {table: ParameterSharding}}}`` and what
    it belongs to.

    Args:
        module: path of the embedding module inside the model, ``""`` where it is the model.
        first_rank: world rank of the pool's rank 0. All replica groups of a pool have this plan,
            each counted from its own first rank.
        device_type: as PyTorch says it.

    Raises:
        SpecError: placements that TorchRec would refuse or run wrongly.
    """
    check_placements(plan, pool_name)
    pool = plan.pools[pool_name]
    return {
        "made_by": f"hwplan {plan.hwplan_version}",
        "fingerprint": plan.fingerprint,
        "model": plan.model.name,
        "pool": pool_name,
        "device": pool.device,
        "device_type": device_type,
        "ranks": pool.group_ranks,
        "replica_groups": pool.replica_groups,
        "first_rank": first_rank,
        "devices_per_node": pool.group_devices_per_node,
        "local_batch": pool.local_batch,
        "embedding_bag_configs": _bag_configs(plan, pool),
        "plan": {
            module: {
                table.name: _parameter_sharding(
                    pool.placements[table.name],
                    extents(table, pool.placements[table.name], pool),
                    pool,
                    first_rank,
                    device_type,
                )
                for table in plan.model.all_tables
            }
        },
    }


def _bag_configs(plan: Plan, pool: PoolPlan) -> list[dict[str, Any]]:
    """Fields of TorchRec's ``EmbeddingBagConfig``."""
    return [
        {
            "name": table.name,
            "num_embeddings": table.num_embeddings,
            "embedding_dim": table.embedding_dim,
            "feature_names": list(table.feature_names),
            "data_type": str(pool.placements[table.name].data_type).upper(),
        }
        for table in plan.model.all_tables
    ]


def _parameter_sharding(
    placement: Placement,
    shards: tuple[Extent, ...],
    pool: PoolPlan,
    first_rank: int,
    device_type: str,
) -> dict[str, Any]:
    """Fields of ``ParameterSharding``. A data-parallel table has no shards."""

    def metadata(shard: Extent) -> dict[str, Any]:
        index = shard.rank % pool.group_devices_per_node
        device = "cpu" if device_type == "cpu" else f"{device_type}:{index}"
        return {
            "shard_offsets": [shard.row, shard.column],
            "shard_sizes": [shard.rows, shard.columns],
            "placement": f"rank:{first_rank + shard.rank}/{device}",
        }

    factor = placement.cache_load_factor
    return {
        "sharding_type": str(placement.sharding_type),
        "compute_kernel": str(placement.compute_kernel),
        "ranks": list(placement.ranks),
        "sharding_spec": {"shards": [metadata(shard) for shard in shards]} if shards else None,
        "cache_params": None if factor is None else {"load_factor": factor},
        "bounds_check_mode": BOUNDS_CHECK_MODE,
    }


def sharding_plan_json(data: dict[str, Any]) -> str:
    """``sharding_plan_data`` as a file."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def sharding_plan_module(
    plan: Plan, pool_name: str, *, module: str = "", first_rank: int = 0, device_type: str = "cuda"
) -> str:
    """Source of a Python module with ``embedding_bag_configs()`` and ``sharding_plan()``.

    It imports torch and torchrec and nothing of hwplan. The arguments become the defaults of its
    ``sharding_plan``.

    Raises:
        SpecError: see ``sharding_plan_data``.
    """
    check_placements(plan, pool_name)
    pool = plan.pools[pool_name]
    tables = [
        (
            *bag.values(),
            placement.sharding_type.value,
            placement.compute_kernel.value,
            list(placement.ranks),
            [(s.rank, s.row, s.column, s.rows, s.columns) for s in shards],
            placement.cache_load_factor,
        )
        for table, bag in zip(plan.model.all_tables, _bag_configs(plan, pool), strict=True)
        for placement in [pool.placements[table.name]]
        for shards in [extents(table, placement, pool)]
    ]
    return _MODULE.format(
        title=f"TorchRec sharding plan of model {plan.model.name} on pool {pool_name}: "
        f"{pool.group_ranks} x {_plain(Path(pool.device).stem)}.",
        made_by=f"Made by hwplan {_plain(plan.hwplan_version)} from plan "
        f"{_plain(plan.fingerprint[:16])}.",
        local_batch=pool.local_batch,
        ranks=pool.group_ranks,
        devices_per_node=pool.group_devices_per_node,
        tables=pprint.pformat(tables, width=100, compact=True),
        module=module,
        first_rank=first_rank,
        device_type=device_type,
        bounds_check_mode=BOUNDS_CHECK_MODE,
    )


def _plain(text: str) -> str:
    """``text`` for a docstring, where a quotation mark could end it."""
    return re.sub(r"[^\w.+-]", "_", text)


_MODULE = '''"""{title}

{made_by}

Needs torch and torchrec only. RANKS processes form one process group; each takes LOCAL_BATCH
samples a step. table_row_wise and grid_shard need LOCAL_WORLD_SIZE=DEVICES_PER_NODE in the
environment.

    ebc = EmbeddingBagCollection(tables=embedding_bag_configs(), device=torch.device("meta"))
    model = Model(ebc)  # the path of ebc inside it is the argument module of sharding_plan
    dmp = DistributedModelParallel(model, plan=sharding_plan("ebc"), sharders=[...], device=device)
"""

from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType

RANKS = {ranks}
DEVICES_PER_NODE = {devices_per_node}
LOCAL_BATCH = {local_batch}
# (table, rows, columns, features, weight precision, sharding type, compute kernel,
#  ranks inside the process group, shards as (rank, first row, first column, rows, columns),
#  cached share of the rows)
TABLES = {tables}


def embedding_bag_configs():
    """One EmbeddingBagConfig per table, in the precision that the plan chose."""
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=columns,
            feature_names=list(features),
            data_type=DataType[data_type],
            pooling=PoolingType.SUM,
        )
        for name, rows, columns, features, data_type, *_ in TABLES
    ]


def sharding_plan(
    module={module!r},
    first_rank={first_rank},
    device_type={device_type!r},
    devices_per_node=DEVICES_PER_NODE,
):
    """The ShardingPlan.

    module: path of the EmbeddingBagCollection inside the model; "" where it is the model.
    first_rank: world rank of the first process of the process group.
    devices_per_node: device indices start again on every node. Give 1 where every process sees
    only the device that it uses, so that all are {{device_type}}:0.
    """

    def shard(rank, row, column, rows, columns):
        device = "cpu" if device_type == "cpu" else f"{{device_type}}:{{rank % devices_per_node}}"
        return ShardMetadata(
            shard_offsets=[row, column],
            shard_sizes=[rows, columns],
            placement=f"rank:{{first_rank + rank}}/{{device}}",
        )

    shardings = {{
        name: ParameterSharding(
            sharding_type=sharding_type,
            compute_kernel=compute_kernel,
            ranks=list(ranks),
            sharding_spec=EnumerableShardingSpec([shard(*s) for s in shards]) if shards else None,
            cache_params=None if cached is None else CacheParams(load_factor=cached),
            bounds_check_mode=BoundsCheckMode.{bounds_check_mode},
        )
        for name, _, _, _, _, sharding_type, compute_kernel, ranks, shards, cached in TABLES
    }}
    return ShardingPlan({{module: EmbeddingModuleShardingPlan(shardings)}})
'''
