"""One training run: check everything, keep it going on Ray, keep its record in one folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.specs.cluster import ClusterSpec
from planner.specs.errors import HwplanError, SpecError, UsageError
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan
from runtime.elastic import Recovery, Supervisor
from runtime.finite import finite
from runtime.run_folder import RunFolder
from trainers.task import TrainTask

Event = dict[str, Any]
Observer = Callable[[Event], object]

NO_RESTARTS = Recovery(max_restarts=0)
REPLAN_GAP = 0.02
REPLAN_LIMIT_S = 20.0
"""Nodes stand idle while a plan is made for those that are left."""


def check_place(address: str | None, data_paths: Sequence[str] = ()) -> None:
    """Whether somebody listens at ``address`` and the files exist: before a plan takes minutes.

    On another cluster the files are on the workers' nodes, and they check for themselves.

    Raises:
        UsageError: no Ray cluster there. SpecError: a file that cannot be read.
    """
    if address is not None:
        from runtime.embedded import check_listening

        check_listening(address)
        return
    for path in data_paths:
        if not os.path.exists(path):
            raise SpecError(
                "this data file does not exist", file=path, fix="check the path given to --data"
            )


def check_trainable(model: ModelSpec) -> None:
    """
    Raises:
        UsageError: the model can only be planned: for its architecture, or for a table's width.
    """
    why_not = model.why_not_trainable
    if why_not:
        raise UsageError(
            f"model {model.name} can be planned but not trained: {why_not}",
            field="--model",
            fix="see hwplan models for those that can be trained, or change a copy of its file",
        )


def check_task(task: TrainTask, address: str | None) -> None:
    """What can be known before any process starts.

    Raises:
        UsageError: the model cannot be trained, or does not fit the data.
        SpecError: unusable data.
    """
    check_trainable(task.plan.model)
    if address is None:
        # On another cluster the files are on the workers' nodes, and they check for themselves.
        from trainers.data.source import open_source

        open_source(task)


def train(
    task: TrainTask,
    folder: RunFolder,
    address: str | None = None,
    observers: Sequence[Observer] = (),
    recovery: Recovery = NO_RESTARTS,
) -> dict[str, Any]:
    """Run ``task`` on the Ray cluster at ``address``, or on an embedded one, until it is done.

    Args:
        observers: get every event after the folder has recorded it.
        recovery: what is done about failures.

    Returns:
        The summary that result.json holds.

    Raises:
        UsageError, SpecError: bad input. RunError: the run failed.
    """
    check_task(task, address)
    from runtime.embedded import ray_session

    supervisor: Supervisor

    def record(event: Event) -> None:
        supervisor.note(event)
        folder.on_event(event)
        for observer in observers:
            observer(event)

    try:
        with ray_session(task.plan.cluster, address):
            from runtime.launch import run_tasks
            from runtime.survivors import RayNodes

            def run(attempt: TrainTask, should_stop: Callable[[], bool]) -> Event:
                (event,) = run_tasks([attempt], record, folder.error_file, should_stop=should_stop)
                return event

            supervisor = Supervisor(
                task, recovery, RayNodes(), lambda here: plan_again(task.plan, here), run, record
            )
            plan, event = supervisor.run()
    except HwplanError as error:
        folder.fail(error.problem, error.exit_code)
        raise
    result = {**summary(plan, event), "attempts": folder.attempt, "out": str(folder.path)}
    folder.end(result)
    return result


def plan_again(plan: Plan, cluster: ClusterSpec) -> Plan:
    """A plan of the same kind, model and global batch for ``cluster``, within seconds.

    Raises:
        InfeasibleError: the job does not fit there.
    """
    if plan.kind == "naive":
        from planner.baselines.naive import naive_port

        return naive_port(cluster, plan.model, plan.global_batch)
    from planner.search import SearchOptions, plan_job

    options = SearchOptions(mip_gap=REPLAN_GAP, time_limit_s=REPLAN_LIMIT_S, cures=False)
    return plan_job(cluster, plan.model, plan.global_batch, options)


def summary(plan: Plan, event: Mapping[str, Any]) -> dict[str, Any]:
    """A result event as the JSON that users see."""
    result = dict(event["result"])
    bridge = event["bridge"]
    shown = (
        "samples_per_s",
        "loss",
        "auc",
        "ne",
        "calibration",
        "steps",
        "samples",
        "metrics_on",
        "eval_samples",
        "malformed_lines",
        "malformed_examples",
        "dropped_samples",
    )
    answer: dict[str, Any] = finite(
        {
            **{name: result[name] for name in shown},
            "step_ms": {"predicted": plan.predicted.step_ms, "measured": result["step_ms"]},
            "exchange": {
                "dense_bytes": result["dense_exchange_bytes"],
                "dense_s": result["dense_exchange_s"],
                "dense_exposed_s": result["dense_exchange_exposed_s"],
                "embedding_bytes": result["embedding_exchange_bytes"],
                "bridge_bytes_sent": bridge["bytes"],
                "bridge_s": bridge["seconds"],
                "bridge_calls": bridge["calls"],
            },
            "global_batch": plan.global_batch,
            "pools": {
                name: {"ranks": pool.ranks, "local_batch": pool.local_batch}
                for name, pool in plan.pools.items()
            },
            "plan_fingerprint": plan.fingerprint,
        }
    )
    return answer
