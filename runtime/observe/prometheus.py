"""A rank's metrics, through Ray's own exporter: Prometheus finds them on every node of the cluster.

Ray puts ``ray_`` before each name. Labels: ``job``, ``pool``, ``rank`` (of the world).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge

LABELS = ("job", "pool", "rank")


class RankMetrics:
    """One rank's gauges and counters.

    Args:
        job: tells the jobs of one Ray cluster apart.
        local_batch: samples that this rank trains in a step.
    """

    def __init__(self, job: str, pool: str, rank: int, local_batch: int) -> None:
        self._local_batch = local_batch
        self._step = 0
        self._bridge_bytes = 0
        self._bridge_s = 0.0
        labels = {"job": job, "pool": pool, "rank": str(rank)}

        def labelled(kind: type[Any], name: str, text: str) -> Any:
            metric = kind(name, description=text, tag_keys=LABELS)
            metric.set_default_tags(labels)
            return metric

        self._measured = labelled(Gauge, "hwplan_step_seconds", "Mean step after warm-up.")
        self._predicted = labelled(
            Gauge, "hwplan_predicted_step_seconds", "Step that the plan predicts."
        )
        self._loss = labelled(Gauge, "hwplan_loss", "Loss of the last window, over all ranks.")
        self._auc = labelled(Gauge, "hwplan_auc", "AUC of the last window, over all ranks.")
        self._samples = labelled(
            Counter, "hwplan_samples_total", "Samples that this rank has trained."
        )
        self._sent = labelled(
            Counter, "hwplan_bridge_bytes_total", "Bytes that this rank sent to other pools."
        )
        self._waited = labelled(
            Counter, "hwplan_bridge_seconds_total", "Wall time of this rank's exchanges."
        )

    def observe(self, record: Mapping[str, Any], bridge_bytes: int, bridge_s: float) -> None:
        """Publish a training record and the bridge's totals of this rank so far."""
        if record["measured_step_ms"] is not None:
            self._measured.set(record["measured_step_ms"] / 1e3)
        self._predicted.set(record["predicted_step_ms"] / 1e3)
        for gauge, name in ((self._loss, "loss"), (self._auc, "auc")):
            if record[name] is not None:
                gauge.set(record[name])
        # A run that goes on from a checkpoint counts what this process trained.
        trained = record["step"] - (self._step or record.get("resumed_at_step") or 0)
        self._step = record["step"]
        for counter, amount in (
            (self._samples, trained * self._local_batch),
            (self._sent, bridge_bytes - self._bridge_bytes),
            (self._waited, bridge_s - self._bridge_s),
        ):
            if amount > 0:  # Ray refuses to add nothing
                counter.inc(amount)
        self._bridge_bytes, self._bridge_s = bridge_bytes, bridge_s
