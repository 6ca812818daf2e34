"""Made-up samples: Zipf ids as the model spec says, labels from a planted model.

Every number is a function of (seed, what it is, sample), so a rank makes its own slice alone, on
its own device: on one host core, ids for a GPU would take longer than its step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torchrec import KeyedJaggedTensor

from planner.specs.model import ModelSpec
from trainers.counter_rng import normal, text_counter, uniform
from trainers.data.batch import Batch
from trainers.data.source import HOST, ReadReport, Slice
from trainers.task import DEFAULT_SYNTHETIC_STEPS, TrainTask

HEAD_RANKS = 4096
"""Most popular ids whose probabilities are summed exactly; the tail is an integral."""
BASE_LOGIT = -1.2
"""Gives a click rate of about a quarter, as in Criteo's log."""

_HOLDOUT_FIRST_SAMPLE = 1 << 48
"""Held-out samples are numbered from here: no run trains on that many."""


class ZipfLaw:
    """Ids with P(rank r) ~ r^-exponent over ``rows`` ranks; ranks are scattered over the rows.

    Scattering keeps popular rows from all landing in one row shard, as hashing does in real data.
    """

    def __init__(self, rows: int, exponent: float) -> None:
        self.rows = rows
        self.exponent = exponent
        head = torch.arange(1, min(rows, HEAD_RANKS) + 1, dtype=torch.float64)
        self._head = torch.cumsum(head**-exponent, 0)
        self._tail_from = len(head) + 0.5
        self._total = float(self._head[-1]) + self._integral(rows + 0.5)
        self._stride = _coprime_stride(rows)

    def _integral(self, end: float) -> float:
        """Integral of x^-s from the end of the head."""
        start, power = self._tail_from, 1.0 - self.exponent
        logs = torch.tensor([start, end], dtype=torch.float64).log()
        if power == 0.0:
            return float(logs[1] - logs[0])
        powers = torch.exp(power * logs) / power
        return float(powers[1] - powers[0])

    def rank(self, u: torch.Tensor) -> torch.Tensor:
        """Popularity ranks from 0 for uniform numbers in [0, 1), by the inverse CDF."""
        mass = u * self._total
        in_head = torch.searchsorted(self._head, mass, right=True)
        beyond = (mass - self._head[-1]).clamp(min=0.0)
        power = 1.0 - self.exponent
        if power == 0.0:
            x = self._tail_from * torch.exp(beyond)
        else:
            x = (self._tail_from**power + power * beyond) ** (1.0 / power)
        rank = torch.where(in_head < len(self._head), in_head, (x + 0.5).long() - 1)
        return rank.clamp(max=self.rows - 1)

    def row(self, u: torch.Tensor) -> torch.Tensor:
        """Rows of the table for uniform numbers in [0, 1)."""
        return self.rank(u) * self._stride % self.rows


def _coprime_stride(rows: int) -> int:
    """A stride near rows / golden ratio that visits every row once (rows < 3e9: fits int64)."""
    stride = max(1, int(rows * 0.6180339887))
    while torch.gcd(torch.tensor(stride), torch.tensor(rows)) != 1:
        stride += 1
    return stride


class SyntheticSource:
    """Endless samples for any model; ``steps`` of the task says how many are used."""

    def __init__(self, task: TrainTask, device: torch.device) -> None:
        self.report = ReadReport()
        self._seed = task.seed
        self._global_batch = task.plan.global_batch
        self._steps = task.steps or DEFAULT_SYNTHETIC_STEPS
        fraction = task.eval_fraction
        holdout = self._steps * fraction / (1.0 - fraction)
        self._holdout_batches = max(1, round(holdout)) if fraction else 0
        self.samples = SampleMaker(task.plan.model, task.seed, device)

    def train_batches(self, part: Slice, first_step: int = 0) -> Iterator[Batch]:
        """The rank's slice of every global batch from one on."""
        for step in range(first_step, self._steps):
            yield self.samples.batch(step * self._global_batch + part.first, part.count)

    def holdout_batches(self, part: Slice) -> Iterator[tuple[Batch, int]]:
        """The rank's slice of every held-out global batch; none is short."""
        for step in range(self._holdout_batches):
            first = _HOLDOUT_FIRST_SAMPLE + step * self._global_batch + part.first
            yield self.samples.batch(first, part.count), self._global_batch


class SampleMaker:
    """Samples by number, made on ``device``."""

    def __init__(self, model: ModelSpec, seed: int, device: torch.device = HOST) -> None:
        self._model = model
        self._seed = seed
        self._device = device
        with self._on_device():
            self._prepare(model, seed)

    def _prepare(self, model: ModelSpec, seed: int) -> None:
        features = [
            (name, table, pooling)
            for table in model.all_tables
            for name, pooling in zip(table.feature_names, table.pooling_factors, strict=True)
        ]
        self._names = [name for name, _, _ in features]
        self._feature_counter = torch.tensor([text_counter(name) for name in self._names])
        self._table_counter = torch.tensor([text_counter(table.name) for _, table, _ in features])
        self._pooling = torch.tensor([pooling for _, _, pooling in features], dtype=torch.float64)
        self._one_hot = bool((self._pooling == 1.0).all())
        # One law for all features of equal tables: few large inversions instead of many small.
        groups: dict[tuple[int, float], list[int]] = defaultdict(list)
        for index, (_, table, _) in enumerate(features):
            groups[table.num_embeddings, table.zipf_exponent].append(index)
        self._laws = [(ZipfLaw(*key), torch.tensor(group)) for key, group in groups.items()]
        self._dense_weight = normal(seed, text_counter("dense weight"), _arange(0, self._width))

    @property
    def _width(self) -> int:
        return self._model.dense_features

    def batch(self, first: int, count: int) -> Batch:
        """Samples ``first`` to ``first + count - 1``."""
        with self._on_device():
            return self._batch(_arange(first, count))

    def _on_device(self) -> AbstractContextManager[Any]:
        """Context in which tensors are made on the device. The host is where they are made anyway,
        and PyTorch's context intercepts every operator in Python: on a CPU rank, a third of the
        time of a batch."""
        return nullcontext() if self._device.type == "cpu" else self._device

    def _batch(self, sample: torch.Tensor) -> Batch:
        dense = normal(
            self._seed, text_counter("dense"), sample[:, None], _arange(0, self._width)[None, :]
        )
        lengths = self._lengths(sample)
        values = self._ids(sample, lengths)
        chance = torch.sigmoid(self._logits(dense, lengths, values))
        labels = uniform(self._seed, text_counter("label"), sample) < chance
        return Batch(
            dense=dense.float(),
            sparse=KeyedJaggedTensor.from_lengths_sync(
                keys=self._names, values=values, lengths=lengths.view(-1).int()
            ),
            labels=labels.float(),
        )

    def _lengths(self, sample: torch.Tensor) -> torch.Tensor:
        """Ids per [feature, sample]: the pooling factor, rounded up as often as its fraction."""
        whole = self._pooling.floor()
        lengths = whole.long()[:, None].expand(-1, len(sample))
        fraction = (self._pooling - whole)[:, None]
        if self._one_hot or not fraction.any():
            return lengths.contiguous()
        drawn = uniform(
            self._seed, text_counter("length"), self._feature_counter[:, None], sample[None, :]
        )
        return lengths + (drawn < fraction)

    def _ids(self, sample: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Rows, feature by feature and sample by sample."""
        if self._one_hot:
            grid = uniform(self._seed, self._feature_counter[:, None], sample[None, :], 0)
            drawn = grid.view(-1)
        else:
            flat = lengths.reshape(-1)
            bag = torch.repeat_interleave(torch.arange(len(flat)), flat)
            slot = torch.arange(len(bag)) - (torch.cumsum(flat, 0) - flat)[bag]
            feature = bag // len(sample)
            drawn = uniform(
                self._seed, self._feature_counter[feature], sample[bag % len(sample)], slot
            )
        if len(self._laws) == 1:
            return self._laws[0][0].row(drawn)
        # Features are contiguous in the values: cut them out, invert, put them back.
        per_feature = lengths.sum(1)
        pieces = list(torch.split(drawn, per_feature.tolist()))
        rows: list[torch.Tensor] = [torch.empty(0)] * len(pieces)
        for law, group in self._laws:
            members = group.tolist()
            inverted = law.row(torch.cat([pieces[index] for index in members]))
            for index, part in zip(
                members, torch.split(inverted, per_feature[group].tolist()), strict=True
            ):
                rows[index] = part
        return torch.cat(rows)

    def _logits(
        self, dense: torch.Tensor, lengths: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The planted model: linear in the dense features, one effect per row of each bag's first
        id; about half of the variance from each."""
        if self._one_hot:
            first_id = values.view(lengths.shape)
            effect = normal(
                self._seed, text_counter("effect"), self._table_counter[:, None], first_id
            )
        else:
            flat = lengths.reshape(-1)
            starts = torch.cumsum(flat, 0) - flat
            present = flat > 0
            table = self._table_counter.repeat_interleave(lengths.shape[1])[present]
            effect = torch.zeros(len(flat), dtype=torch.float64)
            effect[present] = normal(
                self._seed, text_counter("effect"), table, values[starts[present]]
            )
            effect = effect.view(lengths.shape)
        logit = BASE_LOGIT + effect.sum(0) / len(self._names) ** 0.5
        if self._width:
            logit = logit + dense @ self._dense_weight / self._width**0.5
        return logit


def _arange(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int64)
