"""What a training job is asked to do and what it answers. Plain data: no torch, picklable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.specs.errors import UsageError
from planner.specs.plan import Plan

SYNTHETIC = "synthetic"
CRITEO = "criteo:"
DEFAULT_SYNTHETIC_STEPS = 100


@dataclass(frozen=True)
class DataSpec:
    """Where samples come from."""

    paths: tuple[str, ...] = ()
    """Criteo files, in order; none: the synthetic source."""

    @property
    def synthetic(self) -> bool:
        """Whether samples are made up."""
        return not self.paths


def parse_data(text: str) -> DataSpec:
    """``synthetic`` or ``criteo:PATH[,PATH...]``.

    Paths are made absolute here, on the driver: Ray's workers run in another folder.

    Raises:
        UsageError: anything else.
    """
    if text == SYNTHETIC:
        return DataSpec()
    paths = tuple(
        str(Path(path).absolute()) for path in text.removeprefix(CRITEO).split(",") if path
    )
    if not text.startswith(CRITEO) or not paths:
        raise UsageError(
            "unknown data source",
            field="--data",
            value=text,
            fix=f"use {SYNTHETIC}, or {CRITEO}PATH[,PATH...]",
        )
    return DataSpec(paths)


@dataclass(frozen=True)
class TrainTask:
    """One training job, the same on every rank.

    ``steps`` and ``epochs`` may both be left out: one epoch of files, or
    ``DEFAULT_SYNTHETIC_STEPS`` of synthetic samples. With ``steps``, files are read again as often
    as it takes.
    """

    plan: Plan
    data: DataSpec = DataSpec()
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    eval_fraction: float = 0.1
    """Share of the samples held out of training; 0: none."""
    warmup_steps: int = 5
    """Steps before the clock starts (at most half of the run)."""
    log_interval_steps: int = 10
    shuffle_buffer: int = 65_536
    """Samples among which the next one is drawn; bounds the reader's memory (~0.3 kB each)."""
    checkpoint_dir: str | None = None
    """Folder that all nodes share; None: no checkpoints. If it holds one of this run, training goes
    on from there."""
    checkpoint_interval_steps: int = 1000
    keep_checkpoints: int = 3
    kernel_store: str | None = None
    """Folder of kernels compiled ahead of time, the same on every node; None: every rank compiles
    its own before the first step."""

    def __post_init__(self) -> None:
        for field, value in (
            ("--steps", self.steps),
            ("--epochs", self.epochs),
            ("--checkpoint-interval", self.checkpoint_interval_steps),
            ("--keep", self.keep_checkpoints),
        ):
            if value is not None and value < 1:
                raise UsageError("must be positive", field=field, value=value, fix="give 1 or more")
        if self.steps is not None and self.epochs is not None:
            raise UsageError("--steps and --epochs exclude each other", fix="give one of them")
        if self.data.synthetic and self.epochs is not None:
            raise UsageError(
                "the synthetic source has no epochs", field="--epochs", fix="give --steps instead"
            )
        if not 0.0 <= self.eval_fraction < 1.0:
            raise UsageError(
                "the held-out share must be at least 0 and below 1",
                field="--eval-fraction",
                value=self.eval_fraction,
                fix="give a fraction such as 0.1",
            )


@dataclass(frozen=True)
class TrainResult:
    """Outcome of a job; equal on every rank."""

    steps: int
    samples: int
    samples_per_s: float
    """After warm-up, wall clock, everything included."""
    step_ms: float
    """After warm-up, median over whole exchange intervals of their mean step."""
    metrics_on: str
    """What the next five were measured on: ``holdout`` or ``training`` (the last window)."""
    loss: float | None
    auc: float | None
    """None where it is undefined (one class only, or no sample)."""
    ne: float | None
    """Normalised entropy: loss over the entropy of the base rate."""
    calibration: float | None
    """Mean prediction over mean label."""
    eval_samples: int
    malformed_lines: int
    malformed_examples: tuple[str, ...]
    """The first few, as ``file:line``."""
    dropped_samples: int
    """Left over at the end, fewer than one global batch."""
    dense_exchange_bytes: int
    """Gradient bytes given to the bridge by this rank."""
    dense_exchange_s: float
    """Wall time of this rank's gradient exchange, waits for other ranks included."""
    dense_exchange_exposed_s: float
    """The part of it after the end of backward."""
    embedding_exchange_bytes: int
    """Embedding buffer bytes given to the bridge by this rank."""
    stopped_early: bool = False
    """It saved and ended because it was asked to."""
    resumed_at_step: int = 0
    """Of the checkpoint that it went on from; 0: none."""
    checkpoints: int = 0
    """Saved."""
