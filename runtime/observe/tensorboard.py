"""A run's curves for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.specs.errors import SpecError

SCALARS = {
    "loss": "quality/loss",
    "auc": "quality/auc",
    "samples_per_s": "speed/samples_per_s",
    "measured_step_ms": "speed/step_ms_measured",
    "predicted_step_ms": "speed/step_ms_predicted",
}
"""Fields of a training record, and the names of their curves."""
HOLDOUT = ("loss", "auc", "ne", "calibration")
"""Fields of a result measured on the hold-out."""


class TensorBoard:
    """Writes a run's events as scalars over samples trained: steps differ between batch sizes."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            SpecError: the folder cannot be made.
        """
        from tensorboardX import SummaryWriter

        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise SpecError(
                f"cannot be written: {error.strerror}",
                file=folder,
                fix="give another --tensorboard",
            ) from None

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Add what the event says."""
        if event["kind"] == "metrics":
            for field, curve in SCALARS.items():
                self._add(curve, event[field], event["samples"])
        elif event["kind"] == "result":
            result = event["result"]
            for field in HOLDOUT:
                self._add(f"holdout/{field}", result[field], result["samples"])

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()

    def _add(self, curve: str, value: float | None, samples: int) -> None:
        if value is not None:
            self._writer.add_scalar(curve, value, samples)
