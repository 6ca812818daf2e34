"""What a cost formula may look at: one pool, its device, the model, a local batch and a policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.specs.cluster import BridgeSpec, JoinedPool, PoolSpec
from planner.specs.device import DeviceProfile
from planner.specs.model import ModelSpec
from planner.specs.plan import KernelPolicy, MemoryPolicy
from planner.specs.units import GIB, gbps_to_bytes_per_s


@dataclass(frozen=True)
class PoolContext:
    """One pool under one local batch and memory policy.

    ``pools_in_job``, ``replica_groups`` and ``embedding_interval_steps`` describe the exchange of
    table copies; one pool of one group has none.
    """

    pool: PoolSpec
    device: DeviceProfile
    model: ModelSpec
    local_batch: int
    policy: MemoryPolicy
    bridge: BridgeSpec | None = None
    pools_in_job: int = 1
    embedding_interval_steps: int = 1
    replica_groups: int = 1
    """Groups of ranks that hold a copy of the tables each."""
    whole_pool: PoolSpec | None = None
    """The pool that ``pool`` is a replica group of."""

    @property
    def sharding_group(self) -> PoolContext:
        """One replica group, alone: what its tables see. Everything dense is the whole pool's."""
        if self.replica_groups == 1:
            return self
        return replace(
            self, pool=self.pool.group(self.replica_groups), replica_groups=1, whole_pool=self.pool
        )

    @property
    def copies_tables(self) -> bool:
        """Whether the job holds several copies of the tables, which are combined."""
        return self.pools_in_job > 1 or self.replica_groups > 1

    def with_kernels(self, kernels: KernelPolicy) -> PoolContext:
        """The same pool with other kernels."""
        return replace(self, policy=self.policy.model_copy(update={"kernels": kernels}))

    @property
    def ranks(self) -> int:
        """Working devices of the pool."""
        return self.pool.devices

    @property
    def pool_batch(self) -> int:
        """Samples of the whole pool per step."""
        return self.ranks * self.local_batch

    @property
    def compute_share(self) -> float:
        """Share of one compute device that a rank has: CPU workers may share cores."""
        if self.pool.cpu_cores is None:
            return 1.0
        return min(1.0, len(self.pool.cpu_cores) / self._node.devices_per_node)

    @property
    def _node(self) -> PoolSpec:
        """The pool whose nodes are whole."""
        return self.whole_pool or self.pool

    @property
    def nic_bytes_per_s(self) -> float:
        """Scale-out bandwidth of one rank, each way, before efficiency."""
        nic = self.device.network.bytes_per_s.value
        if self.pool.nic_gbps_per_device is not None:
            nic = gbps_to_bytes_per_s(self.pool.nic_gbps_per_device)
        if isinstance(self.pool, JoinedPool):
            return min(nic, gbps_to_bytes_per_s(self.pool.link_gbps_per_device))
        return nic

    @property
    def hbm_capacity_bytes(self) -> int:
        """Device memory a rank may fill: capacity less what allocator and cluster file reserve."""
        memory = self.device.memory
        capacity = self.host_capacity_bytes if self.device.is_cpu else memory.hbm_bytes.value
        kept_free = memory.allocator_reserve.value + self.pool.reserved_memory
        return int(capacity * max(1 - kept_free, 0.0))

    @property
    def host_capacity_bytes(self) -> int:
        """Host memory a rank may use for tables."""
        if self.pool.host_memory_gib_per_node is not None:
            return int(self.pool.host_memory_gib_per_node * GIB / self._node.devices_per_node)
        return int(self.device.host.memory_bytes_per_device.value)
