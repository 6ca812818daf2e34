"""Keep a job going: start it again after a failure, on the nodes that are left or have come.

Ray Train runs each attempt with fixed workers; its own elasticity cuts the list of workers from the
tail, whichever pool lost a node, and never recovers (docs/decisions/restarts.md). So the driver
decides: it finds out which nodes answer, plans again for them (the same global batch: the batch is
the model's, and samples come in the same order), and the new ranks reshard the last checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from planner.specs.cluster import ClusterSpec
from planner.specs.errors import InfeasibleError, RunError
from planner.specs.plan import Plan
from runtime.failures import JobFailed
from trainers.task import TrainTask

Event = dict[str, Any]
WORTH_RESTARTING = 0.97
"""A grown cluster is taken if the new plan's step is at most this share of the present one's."""


@dataclass(frozen=True)
class Recovery:
    """How much is done to keep a job going.

    ``max_restarts``: in a row, without a new checkpoint between them. ``replan``: plan again where
    nodes are missing or new; otherwise only the same plan is started again.
    ``reserve_after_oom``: after running out of memory, plan again with so much more of each
    device's memory left free; 0: give up.
    """

    max_restarts: int = 3
    replan: bool = True
    reserve_after_oom: float = 0.0


class Cluster(Protocol):
    """What the driver sees of the Ray cluster."""

    def present(self, wanted: ClusterSpec, ask: bool) -> ClusterSpec:
        """``wanted`` cut to the nodes that are there.

        Args:
            ask: the nodes themselves; otherwise what Ray knows is believed.

        Raises:
            RunError: none is left.
        """


Planner = Callable[[ClusterSpec], Plan]
Run = Callable[[TrainTask, Callable[[], bool]], Event]
"""Runs a task; the second argument says whether to stop at a checkpoint. Raises JobFailed."""


class Supervisor:
    """One job over all its attempts.

    Args:
        plan_for: plans the job for a cluster.
        run: one attempt.
        on_event: gets ``attempt``, ``failure`` and ``replanned`` events, beside the job's own.
    """

    def __init__(
        self,
        task: TrainTask,
        recovery: Recovery,
        cluster: Cluster,
        plan_for: Planner,
        run: Run,
        on_event: Callable[[Event], None],
    ) -> None:
        self._task, self._recovery, self._cluster = task, recovery, cluster
        self._plan_for, self._run, self._on_event = plan_for, run, on_event
        self._wanted = task.plan.cluster
        """The whole cluster as the user gave it: what nodes may come back to."""
        self._better: Plan | None = None
        """For a cluster that has grown, once it is known to pay."""
        self._refused: ClusterSpec | None = None
        """The last grown cluster that does not."""
        self._last_saved = -1
        """Step of the newest checkpoint."""

    def run(self) -> tuple[Plan, Event]:
        """The plan that finished the job, and its result event.

        Raises:
            JobFailed: it cannot go on. Whatever else a run raises.
        """
        failures, saved, attempt = 0, -1, 1
        while True:
            self._on_event({"kind": "attempt", "number": attempt, "plan": self._task.plan})
            try:
                event = self._run(self._task, self._should_stop)
            except JobFailed as failure:
                reached = self._last_saved
                failures = 1 if reached > saved else failures + 1
                saved = max(saved, reached)
                self._on_event({"kind": "failure", "problem": failure.problem, "step": reached})
                self._recover(failure, failures)
            else:
                if not event["result"]["stopped_early"]:
                    return self._task.plan, event
                assert self._better is not None
                self._go_on_with(self._better, "the cluster has grown")
                self._better = None
            attempt += 1

    def note(self, event: Mapping[str, Any]) -> None:
        """Told of the job's events: a new checkpoint is progress."""
        if event["kind"] == "checkpoint":
            self._last_saved = event["step"]

    def _recover(self, failure: JobFailed, failures: int) -> None:
        """Choose what to start next.

        Raises:
            JobFailed: nothing that may go better.
        """
        recovery = self._recovery
        reserve = recovery.reserve_after_oom if failure.cause == "out_of_memory" else 0.0
        if failures > recovery.max_restarts or not (failure.recoverable or reserve):
            raise failure
        if reserve:
            self._wanted = with_reserve(self._wanted, reserve)
        here = self._cluster.present(self._wanted, ask=True)
        if not reserve and contains(here, self._task.plan):
            return
        if not recovery.replan:
            raise failure
        try:
            plan = self._plan_for(here)
        except InfeasibleError as error:
            raise RunError(
                f"{failure.problem}; what is left cannot go on: {error.problem}",
                fix=error.fix or "bring the missing nodes back, then run the same command again",
            ) from None
        self._go_on_with(plan, "out of memory" if reserve else "nodes are missing")

    def _go_on_with(self, plan: Plan, why: str) -> None:
        # Kernels compiled ahead of time belong to the plan that they were compiled for.
        self._task = dataclasses.replace(self._task, plan=plan, kernel_store=None)
        self._on_event({"kind": "replanned", "why": why, "plan": plan})

    def _should_stop(self) -> bool:
        """Whether nodes have come that make a new plan pay; asked now and then during a run."""
        if not self._recovery.replan or self._better is not None:
            return self._better is not None
        here = self._cluster.present(self._wanted, ask=False)
        now = self._task.plan
        if here in (now.cluster, self._refused) or not _grown(here, now.cluster):
            return False
        try:
            plan = self._plan_for(here)
        except InfeasibleError:
            self._refused = here
            return False
        if plan.predicted.step_ms > now.predicted.step_ms * WORTH_RESTARTING:
            self._refused = here
            return False
        self._better = plan
        return True


def contains(here: ClusterSpec, plan: Plan) -> bool:
    """Whether all nodes that the plan uses are there."""
    nodes = {pool.name: pool.nodes for pool in here.pools}
    return all(
        member.nodes <= nodes.get(member.name, 0)
        for name, pool in plan.pools.items()
        for member in plan.cluster.pool(name).model_copy(update={"nodes": pool.nodes}).parts
    )


def _grown(here: ClusterSpec, before: ClusterSpec) -> bool:
    """Whether some pool has more nodes than before."""
    nodes = {pool.name: pool.nodes for pool in before.pools}
    return any(pool.nodes > nodes.get(pool.name, 0) for pool in here.pools)


def with_reserve(cluster: ClusterSpec, more: float) -> ClusterSpec:
    """``cluster`` with ``more`` of every device's memory (a share) left free."""
    pools = tuple(
        pool.model_copy(update={"reserved_memory": min(pool.reserved_memory + more, 0.9)})
        for pool in cluster.pools
    )
    return cluster.model_copy(update={"pools": pools})
