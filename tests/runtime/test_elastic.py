"""The supervisor of a job's attempts, with runs and clusters that are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from planner.specs.cluster import BridgeSpec, ClusterSpec, PoolSpec
from planner.specs.errors import InfeasibleError, RunError
from planner.specs.plan import Plan
from runtime.elastic import Recovery, Supervisor, contains, with_reserve
from runtime.failures import Cause, JobFailed
from tests.runtime.plans import plan_for
from trainers.task import TrainTask

DONE = {"kind": "result", "result": {"stopped_early": False}}
STOPPED = {"kind": "result", "result": {"stopped_early": True}}


def cluster_with(fast: int, slow: int) -> ClusterSpec:
    pools = (("fast", fast), ("slow", slow))
    return ClusterSpec(
        name="test",
        pools=tuple(
            PoolSpec(name=name, device="cpu", nodes=nodes, devices_per_node=1, cpu_cores=(0,))
            for name, nodes in pools
            if nodes
        ),
        bridge=BridgeSpec(gbps=8.0, latency_us=200.0),
        reference_device="cpu",
    )


def planned(cluster: ClusterSpec) -> Plan:
    """All nodes; the more, the faster."""
    plan = plan_for(cluster, {pool.name: 8 for pool in cluster.pools})
    devices = sum(pool.devices for pool in cluster.pools)
    predicted = plan.predicted.model_copy(update={"step_ms": 100.0 / devices})
    return plan.model_copy(update={"predicted": predicted})


def failure(cause: Cause = "killed") -> JobFailed:
    return JobFailed(f"worker 1 {cause}", cause=cause)


class Nodes:
    """A cluster whose nodes come and go: one entry for each time that it is looked at."""

    def __init__(self, *seen: ClusterSpec) -> None:
        self.seen = list(seen)
        self.asked: list[bool] = []

    def present(self, wanted: ClusterSpec, ask: bool) -> ClusterSpec:
        self.asked.append(ask)
        return self.seen.pop(0) if len(self.seen) > 1 else self.seen[0]


class Script:
    """Attempts that end as told: an exception, or a number of times to ask whether to stop."""

    def __init__(self, supervisor: Callable[[], Supervisor], *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.plans: list[Plan] = []
        self._supervisor = supervisor

    def __call__(self, task: TrainTask, should_stop: Callable[[], bool]) -> dict[str, Any]:
        self.plans.append(task.plan)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, tuple):
            saved, outcome = outcome
            self._supervisor().note({"kind": "checkpoint", "step": saved})
        if isinstance(outcome, Exception):
            raise outcome
        for _ in range(outcome):
            if should_stop():
                return STOPPED
        return DONE


def supervised(
    cluster: ClusterSpec,
    nodes: Nodes,
    *outcomes: Any,
    recovery: Recovery | None = None,
    plan: Callable[[ClusterSpec], Plan] = planned,
) -> tuple[Supervisor, Script, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    script = Script(lambda: supervisor, *outcomes)
    supervisor = Supervisor(
        TrainTask(planned(cluster)), recovery or Recovery(), nodes, plan, script, events.append
    )
    return supervisor, script, events


FULL = cluster_with(2, 2)


def test_a_job_that_goes_well_runs_once() -> None:
    supervisor, script, events = supervised(FULL, Nodes(FULL), 3)
    plan, event = supervisor.run()
    assert event is DONE and plan.cluster == FULL and len(script.plans) == 1
    assert [e["kind"] for e in events] == ["attempt"]


def test_a_killed_worker_on_a_whole_cluster_starts_the_same_plan_again() -> None:
    nodes = Nodes(FULL)
    supervisor, script, events = supervised(FULL, nodes, failure(), 0)
    supervisor.run()
    assert script.plans[0] is script.plans[1]
    assert [e["kind"] for e in events] == ["attempt", "failure", "attempt"]
    assert nodes.asked == [True], "a dead node must not be believed alive"


def test_a_lost_node_is_planned_around_and_a_returned_one_taken_back() -> None:
    less = cluster_with(2, 1)
    nodes = Nodes(less, less, FULL)
    supervisor, script, events = supervised(FULL, nodes, failure(), 5, 0)
    plan, _ = supervisor.run()
    assert [p.cluster for p in script.plans] == [FULL, less, FULL]
    assert plan.cluster == FULL
    assert [e["why"] for e in events if e["kind"] == "replanned"] == [
        "nodes are missing",
        "the cluster has grown",
    ]


def test_a_lost_pool_is_left_out() -> None:
    supervisor, script, _ = supervised(FULL, Nodes(cluster_with(0, 2)), failure(), 0)
    supervisor.run()
    assert list(script.plans[1].pools) == ["slow"]


def test_a_grown_cluster_that_does_not_pay_is_looked_at_once() -> None:
    small = cluster_with(1, 1)
    plans: list[ClusterSpec] = []

    def no_faster(cluster: ClusterSpec) -> Plan:
        plans.append(cluster)
        return planned(small)

    supervisor, script, _ = supervised(FULL, Nodes(small, FULL), failure(), 4, 0, plan=no_faster)
    supervisor.run()
    assert len(script.plans) == 2 and plans == [small, FULL]


@pytest.mark.parametrize("cause", ["crash", "out_of_memory"])
def test_what_would_happen_again_is_not_tried_again(cause: Cause) -> None:
    supervisor, script, _ = supervised(FULL, Nodes(FULL), failure(cause))
    with pytest.raises(JobFailed, match=cause):
        supervisor.run()
    assert len(script.plans) == 1


def test_failures_in_a_row_end_the_job_unless_checkpoints_lie_between() -> None:
    recovery = Recovery(max_restarts=2)
    supervisor, script, _ = supervised(FULL, Nodes(FULL), *[failure()] * 9, recovery=recovery)
    with pytest.raises(JobFailed):
        supervisor.run()
    assert len(script.plans) == 3
    progress = [(step, failure()) for step in (5, 10, 15, 20, 25)]
    supervisor, script, _ = supervised(FULL, Nodes(FULL), *progress, 0, recovery=recovery)
    supervisor.run()
    assert len(script.plans) == 6


def test_out_of_memory_is_planned_anew_with_memory_to_spare() -> None:
    seen: list[ClusterSpec] = []

    def plan(cluster: ClusterSpec) -> Plan:
        seen.append(cluster)
        return planned(cluster)

    class Same(Nodes):
        def present(self, wanted: ClusterSpec, ask: bool) -> ClusterSpec:
            return wanted

    recovery = Recovery(reserve_after_oom=0.05)
    supervisor, script, _ = supervised(
        FULL, Same(FULL), failure("out_of_memory"), failure("out_of_memory"), 0,
        recovery=recovery, plan=plan,
    )  # fmt: skip
    supervisor.run()
    assert [c.pools[0].reserved_memory for c in seen] == pytest.approx([0.05, 0.1])
    assert len(script.plans) == 3


def test_what_is_left_may_be_too_small() -> None:
    def impossible(cluster: ClusterSpec) -> Plan:
        raise InfeasibleError("tables do not fit", fix="add a node")

    supervisor, _, _ = supervised(FULL, Nodes(cluster_with(1, 0)), failure(), plan=impossible)
    with pytest.raises(RunError, match=r"worker 1 killed; .* tables do not fit") as caught:
        supervisor.run()
    assert caught.value.fix == "add a node"


def test_without_planning_again_missing_nodes_end_the_job() -> None:
    supervisor, script, _ = supervised(
        FULL, Nodes(cluster_with(2, 1)), failure(), recovery=Recovery(replan=False)
    )
    with pytest.raises(JobFailed):
        supervisor.run()
    assert len(script.plans) == 1


def test_which_nodes_a_plan_needs() -> None:
    plan = planned(cluster_with(2, 1))
    assert contains(cluster_with(2, 2), plan)
    assert not contains(cluster_with(1, 2), plan)
    assert not contains(cluster_with(2, 0), plan)


def test_memory_to_spare_has_a_limit() -> None:
    full = with_reserve(with_reserve(FULL, 0.8), 0.8)
    assert all(pool.reserved_memory == 0.9 for pool in full.pools)
