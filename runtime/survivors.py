"""Which nodes of the cluster are there now, and the cluster file cut to them.

Ray takes 13 to 15 seconds to call a dead node dead (measured with Ray 2.58), so nodes are asked: a
task of no CPU, pinned to the node, must answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.specs.cluster import ClusterSpec
from planner.specs.errors import RunError
from runtime.pools import Node, live_nodes, nodes_of_pool

PROBE_S = 8.0
"""An idle node answers within a second; one whose worker processes start anew takes some."""


def answering(nodes: Sequence[Node], timeout_s: float = PROBE_S) -> list[Node]:
    """The nodes that run a task within ``timeout_s``, those being drained left out."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=0, max_retries=0)
    def answer() -> bool:
        return True

    draining = _draining()
    asked = {
        answer.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        ).remote(): node
        for node in nodes
        if node.node_id not in draining
    }
    done, late = (
        ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    )
    for task in late:
        ray.cancel(task, force=True)
    alive = set()
    for task in done:
        try:
            ray.get(task)
        except ray.exceptions.RayError:  # the node is gone, and Ray knows it
            continue
        alive.add(asked[task].node_id)
    return [node for node in nodes if node.node_id in alive]


def _draining() -> set[str]:
    from ray._private.state import state

    return set(state.get_draining_nodes())


def present(cluster: ClusterSpec, nodes: Sequence[Node]) -> ClusterSpec:
    """``cluster`` with the nodes that are there: fewer nodes in a pool, or a pool less.

    Raises:
        RunError: no pool has a node left.
    """
    pools = []
    for pool in cluster.pools:
        here = min(pool.nodes, len(nodes_of_pool(pool, nodes)))
        if here:
            pools.append(
                pool.model_copy(update={"nodes": here, "min_nodes": min(pool.min_nodes, here)})
            )
    if not pools:
        raise RunError(
            f"no node of cluster {cluster.name} is left",
            fix="start nodes with ray start and the pool's label, then run the same command again",
        )
    names = {pool.name for pool in pools}
    links = tuple(
        link.model_copy(update={"pools": left})
        for link in cluster.links
        if len(left := tuple(name for name in link.pools if name in names)) > 1
    )
    return cluster.model_copy(update={"pools": tuple(pools), "links": links})


class RayNodes:
    """The connected Ray cluster, as ``runtime.elastic`` looks at it."""

    def present(self, wanted: ClusterSpec, ask: bool) -> ClusterSpec:
        """See ``runtime.elastic.Cluster``."""
        nodes = live_nodes()
        return present(wanted, answering(nodes) if ask else nodes)
