"""The training loop of one rank."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from planner.specs.errors import RunError
from trainers.checkpoint.checkpointer import Checkpointer
from trainers.data.batch import Batch
from trainers.data.source import Slice, Source, open_source
from trainers.metrics import Quality, gather, quality
from trainers.pace import OwnWork, Straggler, Watch
from trainers.rank import Bridge, RankEnv
from trainers.setup import Trainable, prepare_host, set_up
from trainers.task import TrainResult, TrainTask

__all__ = ["Bridge", "RankEnv", "train_rank"]

Report = Callable[[dict[str, Any]], None]
StopAsked = Callable[[], bool]
Tell = Callable[[dict[str, Any]], None]
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Loss, logits and labels of one step."""


def rank_slice(task: TrainTask, rank: RankEnv) -> Slice:
    """Ranks take consecutive slices of a global batch, pools in the plan's order."""
    first = 0
    for name, pool in task.plan.pools.items():
        if name == rank.pool:
            return Slice(first + rank.pool_rank * pool.local_batch, pool.local_batch)
        first += pool.ranks * pool.local_batch
    raise KeyError(rank.pool)


class Stepper:
    """Runs steps: TorchRec's pipeline on a GPU, plainly on CPU workers.

    The pipeline distributes the next batch's ids while the device computes. A CPU worker has no
    device beside the core that would do both: there its bookkeeping only costs time (3 ms of a
    rank's step of 18).
    """

    def __init__(self, trainable: Trainable, rank: RankEnv, batches: Iterator[Batch]) -> None:
        self._trainable = trainable
        self._in_flight: deque[Batch] = deque()
        self._batches = self._remember(batches)
        self._pipeline: Any = None
        if rank.device.type != "cpu":
            self._pipeline = TrainPipelineSparseDist(
                trainable.model, trainable.optimizer, rank.device, execute_all_batches=True
            )

    def _remember(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The pipeline reads ahead; the exchange needs the ids of the batch that was trained."""
        for batch in batches:
            self._in_flight.append(batch)
            yield batch

    def step(self) -> Outputs:
        """One optimizer step, exchanges included.

        Raises:
            StopIteration: no batch is left.
        """
        outputs = self._plain_step() if self._pipeline is None else self._pipelined_step()
        trained = self._in_flight.popleft()
        if self._trainable.embedding_exchange is not None:
            self._trainable.embedding_exchange.after_step(trained.sparse)
        return outputs

    def _pipelined_step(self) -> Outputs:
        outputs: Outputs = self._pipeline.progress(self._batches)
        return outputs

    def _plain_step(self) -> Outputs:
        batch = next(self._batches)
        optimizer = self._trainable.optimizer
        optimizer.zero_grad()
        loss, outputs = self._trainable.model(batch)
        loss.backward()
        optimizer.step()
        return outputs

    def finish(self) -> None:
        """Combine what the pools trained since the last exchange; give the model back whole."""
        if self._trainable.embedding_exchange is not None:
            self._trainable.embedding_exchange.exchange()
        if self._pipeline is not None:
            self._pipeline.detach()


class Window:
    """Outputs of the steps since the last report."""

    def __init__(self, sizes: list[int], rank: RankEnv) -> None:
        self._sizes = sizes
        self._rank = rank
        self._outputs: list[Outputs] = []

    def add(self, outputs: Outputs) -> None:
        """Keep one step's outputs (on the device: nothing waits)."""
        self._outputs.append(outputs)

    def close(self, last_step: int) -> Quality:
        """Quality over all ranks' samples of the window, which starts anew.

        Raises:
            RunError: a loss is not finite, naming the first such step; on every rank alike.
        """
        steps = len(self._outputs)
        logits = torch.stack([logits for _, logits, _ in self._outputs], dim=1)
        labels = torch.stack([labels for _, _, labels in self._outputs], dim=1)
        self._outputs = []
        both = gather(
            torch.stack([logits.float(), labels], dim=-1), self._sizes, self._rank.world_group
        )
        finite = both[..., 0].isfinite().all(0)
        if not bool(finite.all()):
            first = last_step - steps + 1 + int((~finite).long().argmax())
            raise RunError(
                f"the predictions of step {first} are not finite: training diverged",
                fix="lower the learning rates in the model file, or train in fp32",
            )
        return quality(both[..., 0].reshape(-1), both[..., 1].reshape(-1))


_RECENT_STEPS = 1_000


class Clock:
    """Time per step, the warm-up left out (unless the run was no longer than that)."""

    def __init__(self, device: torch.device, warmup_steps: int) -> None:
        self._device = device
        self._warmup_steps = warmup_steps
        self._start = self._last = time.perf_counter()
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.step_s: list[float] = []

    def tick(self) -> None:
        """End of a step (on a GPU, of queueing it)."""
        now = time.perf_counter()
        self.step_s.append(now - self._last)
        self._recent.append(now - self._last)
        self._last = now
        if self._warmup_steps and len(self.step_s) == self._warmup_steps:
            self._synchronize()
            self.step_s, self._warmup_steps = [], 0
            self._start = self._last = time.perf_counter()

    def last_steps_s(self, steps: int) -> float:
        """Mean of the last steps, warm-up or not."""
        return statistics.fmean(list(self._recent)[-steps:])

    def seconds_per_step(self) -> float:
        """Mean, device work included; NaN before the first step."""
        self._synchronize()
        if not self.step_s:
            return math.nan
        return (time.perf_counter() - self._start) / len(self.step_s)

    def typical_step_s(self, interval_steps: int) -> float:
        """Median over whole exchange intervals of their mean step: an exchange belongs to all steps
        that it serves. The mean of all steps if they are fewer; NaN before the first."""
        means = [
            statistics.fmean(self.step_s[start : start + interval_steps])
            for start in range(0, len(self.step_s) - interval_steps + 1, interval_steps)
        ]
        return statistics.median(means or [statistics.fmean(self.step_s or [math.nan])])

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _never() -> bool:
    return False


def _silent(event: dict[str, Any]) -> None:
    pass


def train_rank(
    task: TrainTask,
    rank: RankEnv,
    report: Report,
    stop_asked: StopAsked = _never,
    tell: Tell = _silent,
) -> TrainResult:
    """Train as the plan says and evaluate on the hold-out. Runs on every rank.

    ``report`` is called on every rank with the same record every ``log_interval_steps`` and after
    the last step: step, samples, samples_per_s, loss, auc, predicted_step_ms, measured_step_ms,
    resumed_at_step, stragglers (``trainers.pace``).
    ``stop_asked`` is called as often, on rank 0 alone: once it says so, all ranks end there and
    evaluate nothing. ``tell`` gets the events of checkpoints, on rank 0 alone.

    Raises:
        SpecError: data or placements that cannot be used. UsageError: a model that cannot be
            trained here. RunError: training diverged.
    """
    prepare_host(rank.device)
    source = open_source(task, rank.device)
    part = rank_slice(task, rank)
    trainable = set_up(task.plan, rank, task.seed, task.kernel_store)
    checkpointer = None
    try:
        if task.checkpoint_dir is not None:
            checkpointer = Checkpointer(task, rank, trainable, tell)
        return _train(task, rank, report, stop_asked, source, part, trainable, checkpointer)
    except BaseException:
        if checkpointer is not None:
            checkpointer.abandon()
        raise
    finally:
        if trainable.dense_exchange is not None:
            trainable.dense_exchange.close()


def _train(
    task: TrainTask,
    rank: RankEnv,
    report: Report,
    stop_asked: StopAsked,
    source: Source,
    part: Slice,
    trainable: Trainable,
    checkpointer: Checkpointer | None,
) -> TrainResult:
    plan = task.plan
    sizes = [pool.local_batch for pool in plan.pools.values() for _ in range(pool.ranks)]
    start = checkpointer.restore() if checkpointer else 0
    own_work = OwnWork(trainable.model.module.head.network, rank.device)
    watch = Watch(plan, rank)
    stepper = Stepper(trainable, rank, own_work.timed(source.train_batches(part, start)))
    window = Window(sizes, rank)
    warmup = task.warmup_steps
    if task.steps is not None:
        warmup = max(min(warmup, (task.steps - start) // 2), 0)
    clock = Clock(rank.device, warmup)
    trainable.model.train()
    step, pending, last = start, 0, quality(torch.empty(0), torch.empty(0))
    stopped = False
    while not stopped:
        try:
            outputs = stepper.step()
        except StopIteration:
            break
        step, pending = step + 1, pending + 1
        window.add(outputs)
        clock.tick()
        due = checkpointer is not None and step % task.checkpoint_interval_steps == 0
        if due or pending == task.log_interval_steps:
            last = window.close(step)
            slow = watch.compare(own_work.take(pending), clock.last_steps_s(pending))
            report(_record(task, step, start, clock, last, slow))
            pending = 0
            stopped = _agreed(stop_asked, rank)
        if due and checkpointer is not None:  # after the losses before it were found finite
            checkpointer.save(step)
    seconds_per_step = clock.seconds_per_step()
    if pending:
        last = window.close(step)
        report(_record(task, step, start, clock, last))
    stepper.finish()
    if checkpointer is not None:
        if step > max(start, checkpointer.last_step):
            checkpointer.save(step)
        checkpointer.close()
    held_out = quality(torch.empty(0), torch.empty(0))
    if not stopped:
        held_out = evaluate(trainable, rank, source, part, sizes)
    shown, dense = held_out if held_out.samples else last, trainable.dense_exchange
    return TrainResult(
        steps=step,
        samples=step * plan.global_batch,
        samples_per_s=plan.global_batch / seconds_per_step,
        step_ms=1e3 * clock.typical_step_s(plan.exchange.embedding_interval_steps),
        metrics_on="holdout" if held_out.samples else "training",
        loss=shown.loss,
        auc=shown.auc,
        ne=shown.ne,
        calibration=shown.calibration,
        eval_samples=held_out.samples,
        malformed_lines=source.report.malformed_lines,
        malformed_examples=tuple(source.report.malformed_examples),
        dropped_samples=source.report.dropped_samples,
        dense_exchange_bytes=_bytes(trainable.dense_exchange),
        dense_exchange_s=dense.busy_s if dense else 0.0,
        dense_exchange_exposed_s=dense.exposed_s if dense else 0.0,
        embedding_exchange_bytes=_bytes(trainable.embedding_exchange),
        stopped_early=stopped,
        resumed_at_step=start,
        checkpoints=checkpointer.saved if checkpointer else 0,
    )


def _agreed(stop_asked: StopAsked, rank: RankEnv) -> bool:
    """Rank 0's answer, on every rank."""
    answer = torch.tensor([rank.world_rank == 0 and stop_asked()], dtype=torch.uint8)
    if rank.world_group.size() > 1:
        dist.broadcast(answer, 0, group=rank.world_group)
    return bool(answer)


def _bytes(exchange: Any) -> int:
    return 0 if exchange is None else int(exchange.bytes)


def _record(
    task: TrainTask,
    step: int,
    start: int,
    clock: Clock,
    window: Quality,
    slow: Sequence[Straggler] = (),
) -> dict[str, Any]:
    measured_s = clock.seconds_per_step()
    known = not math.isnan(measured_s)
    return {
        "step": step,
        "samples": step * task.plan.global_batch,
        "samples_per_s": task.plan.global_batch / measured_s if known else None,
        "loss": window.loss,
        "auc": window.auc,
        "predicted_step_ms": task.plan.predicted.step_ms,
        "measured_step_ms": 1e3 * measured_s if known else None,
        "resumed_at_step": start,
        "stragglers": [asdict(one) for one in slow],
    }


@torch.no_grad()
def evaluate(
    trainable: Trainable, rank: RankEnv, source: Source, part: Slice, sizes: list[int]
) -> Quality:
    """Quality on the hold-out, over all ranks; every rank must call it."""
    # The model under DDP's wrapper: there are no gradients to exchange.
    model = trainable.model.module.eval()
    logits, labels = [torch.empty(0)], [torch.empty(0)]
    for batch, count in source.holdout_batches(part):
        _, (_, own, _) = model(batch.to(rank.device))
        both = gather(torch.stack([own.cpu(), batch.labels.cpu()], dim=-1), sizes, rank.world_group)
        logits.append(both[:count, 0])
        labels.append(both[:count, 1])
    return quality(torch.cat(logits), torch.cat(labels))
