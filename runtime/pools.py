"""Pools on Ray: which node belongs to which pool, and which worker runs on which node.

A node belongs to the pool that its label ``hwplan.io/pool`` names; without that label, to the
pool whose device type Ray detected on it (label ``ray.io/accelerator-type``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.specs.cluster import PoolSpec
from planner.specs.errors import UsageError
from planner.specs.load import load_device
from planner.specs.plan import Plan

POOL_LABEL = "hwplan.io/pool"
ACCELERATOR_LABEL = "ray.io/accelerator-type"
NODE_ID_LABEL = "ray.io/node-id"
SHOWN_NODES = 16


@dataclass(frozen=True)
class Node:
    """A live Ray node."""

    node_id: str
    address: str
    cpus: int
    gpus: int
    labels: dict[str, str]

    def __str__(self) -> str:
        labels = {key: value for key, value in self.labels.items() if key != NODE_ID_LABEL}
        shown = ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))
        return f"{self.address}: {self.cpus} CPU, {self.gpus} GPU, labels {shown or 'none'}"


@dataclass(frozen=True)
class Slot:
    """Where one worker process runs."""

    pool: str
    pool_rank: int
    local_rank: int
    workers_on_node: int
    node: Node
    cpu_cores: tuple[int, ...] | None
    """CPU pools: the cores that the node's workers share."""


def live_nodes() -> list[Node]:
    """Live nodes of the connected Ray cluster."""
    import ray

    return [
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            cpus=int(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
            labels=dict(node["Labels"]),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def own_address() -> str:
    """Address of the Ray node that this process runs on."""
    import ray.util

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def slots_for(plans: Sequence[Plan], nodes: Sequence[Node]) -> tuple[Slot, ...]:
    """One worker per rank that any of the plans uses, pools in the cluster file's order.

    Workers of a pool fill its nodes one after the other, so that a plan's ranks of pool p are the
    first workers of p's slots, and those of a joined pool a+b the first of a's, then of b's.

    Raises:
        UsageError: a pool without enough nodes, with every node's labels in the message.
    """
    slots = []
    for pool in plans[0].cluster.pools:
        needed = max(plan.nodes_at_work.get(pool.name, 0) for plan in plans)
        for index, node in enumerate(_nodes_of(pool, needed, nodes)):
            for local_rank in range(pool.devices_per_node):
                slots.append(
                    Slot(
                        pool=pool.name,
                        pool_rank=index * pool.devices_per_node + local_rank,
                        local_rank=local_rank,
                        workers_on_node=pool.devices_per_node,
                        node=node,
                        cpu_cores=pool.cpu_cores,
                    )
                )
    return tuple(slots)


def nodes_of_pool(pool: PoolSpec, nodes: Sequence[Node]) -> list[Node]:
    """The nodes that belong to the pool and have room for its workers, by address."""
    accelerator = load_device(pool.device).ray_accelerator_type
    on_cpu = pool.cpu_cores is not None
    found = []
    for node in sorted(nodes, key=lambda node: (node.address, node.node_id)):
        label = node.labels.get(POOL_LABEL)
        detected = accelerator is not None and node.labels.get(ACCELERATOR_LABEL) == accelerator
        room = node.cpus if on_cpu else min(node.gpus, node.cpus)
        if (label == pool.name or (label is None and detected)) and room >= pool.devices_per_node:
            found.append(node)
    return found


def _nodes_of(pool: PoolSpec, needed: int, nodes: Sequence[Node]) -> list[Node]:
    """The first ``needed`` nodes of the pool.

    Raises:
        UsageError: there are fewer.
    """
    found = nodes_of_pool(pool, nodes)
    if len(found) < needed:
        accelerator = load_device(pool.device).ray_accelerator_type
        listed = [f"    {node}" for node in nodes[:SHOWN_NODES]]
        if len(nodes) > SHOWN_NODES:
            listed.append(f"    and {len(nodes) - SHOWN_NODES} more")
        on_cpu = pool.cpu_cores is not None
        device = "CPU" if on_cpu else f"GPU and {pool.devices_per_node} CPU"
        automatic = f" (or {ACCELERATOR_LABEL}={accelerator})" if accelerator else ""
        raise UsageError(
            f"pool {pool.name} needs {needed} Ray nodes with {pool.devices_per_node} {device} and "
            f"label {POOL_LABEL}={pool.name}{automatic}, found {len(found)}\n"
            "  Nodes of this Ray cluster:\n" + "\n".join(listed or ["    none"]),
            fix=f"start the missing nodes with: ray start --address=… "
            f"--labels={POOL_LABEL}={pool.name}",
        )
    return found[:needed]


def label_selectors(slots: Sequence[Slot]) -> list[dict[str, str]]:
    """Per worker, for Ray Train's ScalingConfig.

    Ray numbers workers node by node, nodes in order of first appearance: naming the node itself in
    every entry, grouped by pool, makes Ray's rank the index into ``slots``.
    """
    return [{NODE_ID_LABEL: slot.node.node_id} for slot in slots]


def resources_per_worker(plans: Sequence[Plan]) -> dict[str, float]:
    """What every worker reserves; Ray Train knows one answer for all workers of a job.

    Raises:
        UsageError: CPU and GPU pools in one job.
    """
    cluster = plans[0].cluster
    on_cpu = {cluster.pool(name).cpu_cores is not None for plan in plans for name in plan.pools}
    if len(on_cpu) > 1:
        raise UsageError(
            "CPU pools and GPU pools in one job: Ray Train reserves the same for every worker",
            field="cluster.pools",
            fix="train on the GPU pools only, or on the CPU pools only",
        )
    return {"CPU": 1} if on_cpu == {True} else {"CPU": 1, "GPU": 1}
