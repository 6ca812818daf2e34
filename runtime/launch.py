"""Start training tasks on Ray and follow them from the driver."""

from __future__ import annotations

import _thread
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

# What ray.train offers under Ray Train V2, which its type annotations do not know.
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig

from runtime.bridge import COLLECTIVE_TIMEOUT
from runtime.failures import explain
from runtime.heartbeat import beats
from runtime.pools import (
    label_selectors,
    live_nodes,
    own_address,
    resources_per_worker,
    slots_for,
)
from runtime.store import JobStore
from runtime.worker import Job, run_worker
from trainers.task import TrainTask

POLL_S = 0.2
STOP_POLL_S = 5.0
"""Between questions whether the job should stop for a better plan."""
WORKER_START_TIMEOUT_S = 180

RAY_SETTINGS = {
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(WORKER_START_TIMEOUT_S),
    # Restarts are the driver's affair (runtime.elastic): Ray need not watch for pre-emption.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Noise on a terminal that belongs to the progress line.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
}
"""Ray reads these from the driver's environment; it has no other way to set them."""


def run_tasks(
    tasks: Sequence[TrainTask],
    on_event: Callable[[dict[str, Any]], None],
    error_file: Path,
    collective_timeout: timedelta = COLLECTIVE_TIMEOUT,
    should_stop: Callable[[], bool] | None = None,
) -> list[dict[str, Any]]:
    """Run tasks in turn with one set of workers on the connected Ray cluster.

    The tasks' plans must be for the same cluster. Events go to ``on_event`` as they arrive, on
    another thread: ``placed`` from every worker, then from rank 0 of every task ``started``,
    ``metrics`` and ``result``, with the task's index. If workers fail in a way that is no user's
    error, ``error_file`` gets their tracebacks.

    Args:
        should_stop: asked every few seconds, on the events' thread; once it says so, the task at
            work saves a checkpoint and ends with ``stopped_early``.

    Returns:
        One ``result`` event per task.

    Raises:
        UsageError: the Ray cluster lacks nodes that a plan needs.
        JobFailed: a worker failed; HwplanErrors that a worker raised come back as they were.
    """
    plans = [task.plan for task in tasks]
    os.environ.update(RAY_SETTINGS)
    slots = slots_for(plans, live_nodes())
    address = own_address()
    store = JobStore.host(address)
    folder = tempfile.mkdtemp(prefix="hwplan-train-")
    trainer = _Trainer(
        run_worker,
        train_loop_config={
            "job": Job(
                tuple(tasks), slots, address, store.port, Path(folder).name, collective_timeout
            )
        },
        scaling_config=ScalingConfig(
            num_workers=len(slots),
            use_gpu="GPU" in resources_per_worker(plans),
            resources_per_worker=resources_per_worker(plans),
            label_selector=label_selectors(slots),
        ),
        torch_config=_WorkersOnly(),
        run_config=RunConfig(  # type: ignore[arg-type]
            name="hwplan",
            storage_path=folder,
            failure_config=FailureConfig(
                max_failures=0, controller_failure_limit=0, max_preemption_failures=0
            ),
        ),
    )
    ray_error: Exception | None = None
    with _Follower(store, on_event, should_stop) as follower:
        try:
            trainer.fit()
        except Exception as error:  # whatever it is, it ends the job and is explained below
            ray_error = error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if ray_error is not None or follower.errors:
        raise explain(
            follower.errors,
            ray_error,
            slots,
            error_file,
            beats=beats(store, len(slots)),
            plan=tasks[min(len(follower.results), len(tasks) - 1)].plan,
        )
    return follower.results


class _Follower:
    """Reads the job's events on a thread, because Ray needs the main one.

    An error in ``on_event`` interrupts the main thread and comes back from there.
    """

    def __init__(
        self,
        store: JobStore,
        on_event: Callable[[dict[str, Any]], None],
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self.results: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []
        self._store = store
        self._on_event = on_event
        self._should_stop = should_stop
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job-events", daemon=True)

    def __enter__(self) -> _Follower:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asked_at = time.monotonic()
            while not self._stop.wait(POLL_S):
                self._take()
                if self._should_stop is not None and time.monotonic() - asked_at > STOP_POLL_S:
                    if self._should_stop():
                        self._store.ask_to_stop()
                    asked_at = time.monotonic()
            self._take()
        except Exception as error:  # raised again on the main thread
            self._failure = error
            if not self._stop.is_set():
                _thread.interrupt_main()

    def _take(self) -> None:
        for event in self._store.new_events():
            if event["kind"] == "error":
                self.errors.append(event)
                continue
            if event["kind"] == "result":
                self.results.append(event)
            self._on_event(event)


class _Trainer(TorchTrainer):
    """Leaves Ctrl-C to the caller.

    Ray's own handler aborts the job and reports success. ``fit`` must not run on another thread
    either: a thread that calls Ray after ``ray.shutdown`` ends the whole process.
    """

    def _register_sigint_handler(self, controller: Any) -> None:
        return


class _WorkersOnly(TorchConfig):
    """Ray's torch set-up without its process group: a mixed job builds its own."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _SharedDevices


class _SharedDevices(Backend):
    """Every worker sees all GPUs of its node that belong to the job, as Ray's device index assumes.

    Ray 2.58 does that for CUDA_VISIBLE_DEVICES only; on AMD nodes HIP_VISIBLE_DEVICES would leave
    one visible GPU, and the index of the second worker would be out of range.
    """

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_share_hip_devices)


def _share_hip_devices() -> None:
    if "HIP_VISIBLE_DEVICES" in os.environ and "CUDA_VISIBLE_DEVICES" in os.environ:
        os.environ["HIP_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
