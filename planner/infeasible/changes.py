"""Changes of a cluster file or a model file, as data: what to write, and the job after it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.model import ModelSpec, Precision
from planner.specs.units import Dtype

Job = tuple[ClusterSpec, ModelSpec]
"""The model carries the job's global batch."""

Limit = Literal["sharding_types", "compute_kernels", "data_types", "min_partition"]
"""A field of a table's constraints."""


class Change(Protocol):
    """One edit."""

    @property
    def text(self) -> str:
        """What to do, in the words of the files and options."""

    def apply(self, cluster: ClusterSpec, model: ModelSpec) -> Job:
        """The job after it."""


@dataclass(frozen=True)
class Cure:
    """Changes that make a job feasible together: no plan without any one of them."""

    changes: tuple[Change, ...]

    @property
    def text(self) -> str:
        return " and ".join(change.text for change in self.changes)

    def apply(self, cluster: ClusterSpec, model: ModelSpec) -> Job:
        """The cured job."""
        for change in self.changes:
            cluster, model = change.apply(cluster, model)
        return cluster, model


def _with_pools(cluster: ClusterSpec, names: Collection[str], **fields: object) -> ClusterSpec:
    pools = tuple(
        pool.model_copy(update=fields) if pool.name in names else pool for pool in cluster.pools
    )
    return cluster.model_copy(update={"pools": pools})


@dataclass(frozen=True)
class Nodes:
    """So many nodes in a pool."""

    pool: PoolSpec
    nodes: int

    @property
    def text(self) -> str:
        return f"give pool {self.pool.name} {self.nodes} nodes instead of {self.pool.nodes}"

    def apply(self, cluster: ClusterSpec, model: ModelSpec) -> Job:
        return _with_pools(cluster, {self.pool.name}, nodes=self.nodes), model


@dataclass(frozen=True)
class HostMemory:
    """So much host memory per node; linked pools are alike, so they get it together."""

    pools: tuple[str, ...]
    gib: int

    @property
    def text(self) -> str:
        which = (
            f"pool {self.pools[0]}" if len(self.pools) == 1 else "pools " + ", ".join(self.pools)
        )
        return f"set host_memory_gib_per_node of {which} to {self.gib}"

    def apply(self, cluster: ClusterSpec, model: ModelSpec) -> Job:
        return _with_pools(cluster, self.pools, host_memory_gib_per_node=float(self.gib)), model


@dataclass(frozen=True)
class Batch:
    """Another global batch."""

    global_batch: int

    @property
    def text(self) -> str:
        return f"use --global-batch {self.global_batch}"

    def apply(self, cluster: ClusterSpec, model: ModelSpec) -> Job:
        return cluster, model.model_copy(update={"global_batch": self.global_batch})


@dataclass(frozen=True)
class TablePrecision:
    """Tables may be stored in one more precision."""

    allowed: tuple[Dtype, ...]
    dtype: Dtype

    @property
    def text(self) -> str:
        listed = ", ".join((*self.allowed, self.dtype))
        return f"allow {self.dtype} tables (precision.embeddings: [{listed}])"

    def apply(self, cluster: ClusterSpec, model: ModelSpec) -> Job:
        fields = {**model.precision.model_dump(), "embeddings": (*self.allowed, self.dtype)}
        return cluster, model.model_copy(update={"precision": Precision.model_validate(fields)})


@dataclass(frozen=True)
class Lift:
    """A constraint of some tables is removed."""

    limit: Limit
    groups: tuple[str, ...]
    """Names of the model file's entries under ``tables``."""

    @property
    def text(self) -> str:
        which = (
            f"table {self.groups[0]}"
            if len(self.groups) == 1
            else "tables " + ", ".join(self.groups)
        )
        return f"lift constraints.{self.limit} of {which}"

    def apply(self, cluster: ClusterSpec, model: ModelSpec) -> Job:
        groups = tuple(
            group.model_copy(
                update={"constraints": group.constraints.model_copy(update={self.limit: None})}
            )
            if group.name in self.groups
            else group
            for group in model.tables
        )
        fields = {name: getattr(model, name) for name in ModelSpec.model_fields}
        return cluster, ModelSpec(**{**fields, "tables": groups})  # a copy keeps its old all_tables


@dataclass(frozen=True)
class MayRest:
    """A pool need not work."""

    pool: str

    @property
    def text(self) -> str:
        return f"let pool {self.pool} rest (min_nodes: 0)"

    def apply(self, cluster: ClusterSpec, model: ModelSpec) -> Job:
        return _with_pools(cluster, {self.pool}, min_nodes=0), model


@dataclass(frozen=True)
class Without:
    """A pool is taken out of the cluster file: where every device must work, none may rest."""

    pool: str

    @property
    def text(self) -> str:
        return f"take pool {self.pool} out of the cluster file"

    def apply(self, cluster: ClusterSpec, model: ModelSpec) -> Job:
        pools = tuple(pool for pool in cluster.pools if pool.name != self.pool)
        links = tuple(
            link.model_copy(update={"pools": tuple(n for n in link.pools if n != self.pool)})
            for link in cluster.links
        )
        links = tuple(link for link in links if len(link.pools) > 1)
        return cluster.model_copy(update={"pools": pools, "links": links}), model
