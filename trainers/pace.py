"""Which rank is slower than its like: work that waits for nobody, timed on every rank.

Collectives make all ranks of a step equally long, so a step time says nothing about who is slow.
Two parts of a step wait for no other rank: getting the next batch, and the forward passes of the
dense network's blocks (looked-up rows are waited for between them). A rank straggles where these
take ``TIMES_SLOWER`` as long as on the fastest rank of its pool, or as in its own best window
before (a pool may have one rank), and the difference is ``STEP_SHARE`` of a step at least, in
``IN_A_ROW`` windows in a row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from planner.specs.plan import Plan
from trainers.data.batch import Batch
from trainers.rank import RankEnv

TIMES_SLOWER = 1.5
STEP_SHARE = 0.1
IN_A_ROW = 2
PARTS = ("input", "dense forward")


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than its like."""

    rank: int
    pool: str
    pool_rank: int
    part: str
    """One of ``PARTS``: what takes it longest, compared."""
    own_ms: float
    """Per step."""
    usual_ms: float


class OwnWork:
    """Times this rank's own work; device work without waiting for the device."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._input_s = 0.0
        self._forward_s = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begin: Any = None
        for block in network.children():
            block.register_forward_pre_hook(self._before)
            block.register_forward_hook(self._after)

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, the time that each takes to come counted."""
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            self._input_s += time.perf_counter() - begin
            if batch is None:
                return
            yield batch

    def take(self, steps: int) -> tuple[float, float]:
        """Seconds per step of both ``PARTS`` since the last call. The device must be idle."""
        forward_s = self._forward_s + sum(a.elapsed_time(b) for a, b in self._spans) / 1e3
        taken = self._input_s / steps, forward_s / steps
        self._input_s, self._forward_s, self._spans = 0.0, 0.0, []
        return taken

    def _before(self, module: nn.Module, inputs: Any) -> None:
        self._begin = self._now()

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        end = self._now()
        if self._on_gpu:
            self._spans.append((self._begin, end))
        else:
            self._forward_s += end - self._begin

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Watch:
    """Compares the ranks' own work, window by window; alike on every rank."""

    def __init__(self, plan: Plan, rank: RankEnv) -> None:
        self._rank = rank
        self._pools = [(name, i) for name, pool in plan.pools.items() for i in range(pool.ranks)]
        self._best = torch.full((plan.world_size, len(PARTS)), float("inf"), dtype=torch.double)
        self._slow = torch.zeros(plan.world_size, dtype=torch.long)
        """Windows in a row in which the rank was slow."""

    def compare(self, own: tuple[float, float], step_s: float) -> list[Straggler]:
        """The ranks that straggle. Every rank must call it.

        Args:
            own: of ``OwnWork.take``. step_s: mean step of the window.
        """
        mine = torch.tensor([own], dtype=torch.double)
        all_ranks = torch.empty((len(self._pools), len(PARTS)), dtype=torch.double)
        if len(self._pools) > 1:
            dist.all_gather_into_tensor(all_ranks, mine, group=self._rank.world_group)
        else:
            all_ranks.copy_(mine)
        return self.judge(all_ranks, step_s)

    def judge(self, own_s: torch.Tensor, step_s: float) -> list[Straggler]:
        """The ranks that straggle, from all ranks' own work, [ranks, parts], seconds per step."""
        usual_s = torch.minimum(self._best, self._fastest_of_pool(own_s))
        self._best = torch.minimum(self._best, own_s)
        more_s = own_s - usual_s
        slow = (own_s > TIMES_SLOWER * usual_s) & (more_s > STEP_SHARE * step_s)
        self._slow = torch.where(slow.any(1), self._slow + 1, 0)
        found = []
        for rank in torch.nonzero(self._slow >= IN_A_ROW).flatten().tolist():
            pool, pool_rank = self._pools[rank]
            part = int((more_s[rank] * slow[rank]).argmax())
            found.append(
                Straggler(
                    rank,
                    pool,
                    pool_rank,
                    PARTS[part],
                    own_ms=1e3 * float(own_s[rank, part]),
                    usual_ms=1e3 * float(usual_s[rank, part]),
                )
            )
        return found

    def _fastest_of_pool(self, own_s: torch.Tensor) -> torch.Tensor:
        names = [name for name, _ in self._pools]
        fastest = {
            name: own_s[[i for i, other in enumerate(names) if other == name]].min(0).values
            for name in names
        }
        return torch.stack([fastest[name] for name in names])
