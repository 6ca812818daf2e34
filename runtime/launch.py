"""Start training tasks on Ray and follow them from the driver."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

# What ray.train offers under Ray Train V2, which its type annotations do not know.
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig

from runtime.failures import explain
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
WORKER_START_TIMEOUT_S = 180

RAY_SETTINGS = {
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(WORKER_START_TIMEOUT_S),
    # Nobody restarts a job here, so that nothing needs to watch for pre-emption.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Noise on a terminal that belongs to the progress line.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
}
"""Ray reads these from the driver's environment; it has no other way to set them."""


def run_tasks(
    tasks: Sequence[TrainTask], on_event: Callable[[dict[str, Any]], None], error_file: Path
) -> list[dict[str, Any]]:
    """Run tasks in turn with one set of workers on the connected Ray cluster.

    The tasks' plans must be for the same cluster. Events go to ``on_event`` as they arrive, in the
    calling thread: ``placed`` from every worker, then from rank 0 of every task ``started``,
    ``metrics`` and ``result``, with the task's index. If workers fail in a way that is no user's
    error, ``error_file`` gets their tracebacks.

    Returns:
        One ``result`` event per task.

    Raises:
        UsageError: the Ray cluster lacks nodes that a plan needs.
        RunError: a worker failed; HwplanErrors that a worker raised come back as they were.
    """
    plans = [task.plan for task in tasks]
    os.environ.update(RAY_SETTINGS)
    slots = slots_for(plans, live_nodes())
    address = own_address()
    store = JobStore.host(address)
    folder = tempfile.mkdtemp(prefix="hwplan-train-")
    trainer = TorchTrainer(
        run_worker,
        train_loop_config={"job": Job(tuple(tasks), slots, address, store.port)},
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
    results: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []

    def take_events() -> None:
        for event in store.new_events():
            if event["kind"] == "error":
                errors.append(event)
            elif event["kind"] == "result":
                results.append(event)
                on_event(event)
            else:
                on_event(event)

    fit = _Fit(trainer)
    try:
        while not fit.wait(POLL_S):
            take_events()
        take_events()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if fit.error is not None or errors:
        raise explain(errors, fit.error, slots, error_file)
    return results


class _Fit:
    """``trainer.fit()`` on a thread, so that the main thread can show progress and be interrupted
    (on the main thread Ray would take over Ctrl-C)."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(trainer,), daemon=True)
        self._thread.start()

    def _run(self, trainer: TorchTrainer) -> None:
        try:
            trainer.fit()
        except Exception as error:  # whatever it is, it ends the job and is explained there
            self.error = error

    def wait(self, seconds: float) -> bool:
        """Whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


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
