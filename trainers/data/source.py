"""The two sources behind one interface. Sample order depends on the data and the seed, never on
the plan: global batch k is the same samples in the same order, and each rank takes its slice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from trainers.data.batch import Batch
from trainers.task import TrainTask


@dataclass(frozen=True)
class Slice:
    """A rank's part of every global batch."""

    first: int
    count: int


@dataclass
class ReadReport:
    """What a source could not use."""

    malformed_lines: int = 0
    malformed_examples: list[str] = field(default_factory=list)
    """The first few, as ``file:line``."""
    dropped_samples: int = 0


class Source(Protocol):
    """Batches of one rank."""

    report: ReadReport

    def train_batches(self, part: Slice, first_step: int = 0) -> Iterator[Batch]:
        """The rank's slice of every global batch of the run, in order, from one on."""

    def holdout_batches(self, part: Slice) -> Iterator[tuple[Batch, int]]:
        """The rank's slice of every held-out global batch, and how many samples of that global
        batch count: the last one is padded by repeating its last sample."""


HOST = torch.device("cpu")


def open_source(task: TrainTask, device: torch.device = HOST) -> Source:
    """The task's source, checked: files exist and begin usably, and the model fits the data.

    Args:
        device: where synthetic samples are made; lines of files are read on the host.

    Raises:
        SpecError: a file that cannot be used. UsageError: a model that does not fit.
    """
    # Either import costs nothing that the other source would not need too.
    from trainers.data.criteo import CriteoSource
    from trainers.data.synthetic import SyntheticSource

    return SyntheticSource(task, device) if task.data.synthetic else CriteoSource(task)
