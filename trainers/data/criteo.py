"""Click logs in Criteo's format: label, 13 integers, 26 hexadecimal categories, tab-separated.

Plain or gzip, several files, read as a stream. Lines are shuffled as raw bytes and only a rank's
own slice is parsed, so that reading costs each rank little however many ranks there are.
"""

from __future__ import annotations

import gzip
import hashlib
import random
import re
import zlib
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from planner.specs.errors import SpecError, UsageError
from planner.specs.model import ModelSpec
from trainers.data.batch import Batch
from trainers.data.source import ReadReport, Slice
from trainers.task import TrainTask

INTEGERS = 13
CATEGORIES = 26
EXAMPLES = 5
"""Malformed lines named in the report."""

_LINE = re.compile(rb"[01](?:\t(?:-?\d{1,18})?){13}(?:\t[0-9a-fA-F]{0,16}){26}")
_HOLDOUT_KEY = b"4"
_GZIP_MAGIC = b"\x1f\x8b"
_LONGEST_LINE_BYTES = 4096
"""Longer ones are no click log; the bound keeps a file without newlines out of memory."""
_COLUMN_CRC = [zlib.crc32(f"C{column}:".encode()) for column in range(CATEGORIES)]


def check_model(model: ModelSpec) -> None:
    """Refuse a model that does not read 13 dense features and 26 one-hot tables.

    Raises:
        UsageError: saying what the model has instead.
    """
    poolings = [factor for table in model.all_tables for factor in table.pooling_factors]
    if model.dense_features != INTEGERS or poolings != [1.0] * CATEGORIES:
        raise UsageError(
            f"Criteo files have {INTEGERS} dense features and {CATEGORIES} one-hot categories; "
            f"model {model.name} reads {model.dense_features} and {len(poolings)} features with "
            f"{sum(poolings):g} ids a sample",
            field="--data",
            fix="train this model on synthetic data, or choose a one-hot Criteo model such as "
            "dlrm_criteo_small",
        )


def parse_lines(lines: list[bytes], model: ModelSpec) -> Batch:
    """Well-formed lines to a batch.

    Dense features become sign(x) log(1 + |x|), missing ones 0. A category becomes row
    crc32("C<column>:<text>") mod rows of its table, a missing one like any other text: the same
    in every run and on every machine.
    """
    rows = [table.num_embeddings for table in model.all_tables]
    labels = np.empty(len(lines), dtype=np.float32)
    integers = np.zeros((len(lines), INTEGERS), dtype=np.float64)
    ids = np.empty((CATEGORIES, len(lines)), dtype=np.int64)
    for sample, line in enumerate(lines):
        fields = line.split(b"\t")
        labels[sample] = fields[0] == b"1"
        for column, text in enumerate(fields[1 : 1 + INTEGERS]):
            if text:
                integers[sample, column] = int(text)
        for column, text in enumerate(fields[1 + INTEGERS :]):
            ids[column, sample] = zlib.crc32(text, _COLUMN_CRC[column]) % rows[column]
    dense = np.sign(integers) * np.log1p(np.abs(integers))
    return Batch(
        dense=torch.from_numpy(dense.astype(np.float32)),
        sparse=KeyedJaggedTensor.from_lengths_sync(
            keys=[name for table in model.all_tables for name in table.feature_names],
            values=torch.from_numpy(ids.reshape(-1)),
            lengths=torch.ones(ids.size, dtype=torch.int32),
        ),
        labels=torch.from_numpy(labels),
    )


def is_held_out(line: bytes, fraction: float) -> bool:
    """Whether a sample belongs to the hold-out: a hash of its features alone.

    Neither label, file order nor the run's seed matters: equal features never stand on both
    sides, and runs with different seeds are measured on the same samples.
    """
    features = line.split(b"\t", 1)[1]
    digest = hashlib.blake2b(features, digest_size=8, key=_HOLDOUT_KEY).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def _shuffled(lines: Iterator[bytes], size: int, generator: random.Random) -> Iterator[bytes]:
    """Each next line drawn from a buffer of ``size``: a full shuffle where all lines fit."""
    buffer = list(islice(lines, size))
    for line in lines:
        index = int(generator.random() * size)
        yield buffer[index]
        buffer[index] = line
    generator.shuffle(buffer)
    yield from buffer


class CriteoSource:
    """Streams files in Criteo's format.

    Raises:
        UsageError: the model does not fit. SpecError: a path that cannot be read, an empty file,
            one without a single well-formed line among its first (checked on construction), a
            file that ends early (while reading).
    """

    def __init__(self, task: TrainTask) -> None:
        check_model(task.plan.model)
        self.report = ReadReport()
        self._task = task
        self._global_batch = task.plan.global_batch
        for path in task.data.paths:
            next(self._well_formed(path, None))

    def train_batches(self, part: Slice, first_step: int = 0) -> Iterator[Batch]:
        """The rank's slice of every global batch from one on; those before are read, not parsed.

        Raises:
            SpecError: the files hold fewer training samples than one global batch.
        """
        steps, epochs = self._task.steps, self._task.epochs
        lines = self._training_lines(None if steps is not None else epochs or 1)
        step = 0
        while steps is None or step < steps:
            batch = list(islice(lines, self._global_batch))
            if len(batch) < self._global_batch:
                self.report.dropped_samples += len(batch)
                if step == 0:
                    raise SpecError(
                        f"{len(batch)} training samples are fewer than one global batch of "
                        f"{self._global_batch}",
                        file=self._task.data.paths[0],
                        fix="give more data, hold out less, or plan a smaller global batch",
                    )
                return
            step += 1
            if step > first_step:
                mine = batch[part.first : part.first + part.count]
                yield parse_lines(mine, self._task.plan.model)

    def holdout_batches(self, part: Slice) -> Iterator[tuple[Batch, int]]:
        """The rank's slice of every held-out global batch, the last one padded."""
        lines = (
            line
            for path in self._task.data.paths
            for line in self._well_formed(path, None)
            if is_held_out(line, self._task.eval_fraction)
        )
        while batch := list(islice(lines, self._global_batch)):
            count = len(batch)
            batch += batch[-1:] * (self._global_batch - count)
            mine = batch[part.first : part.first + part.count]
            yield parse_lines(mine, self._task.plan.model), count

    def _training_lines(self, epochs: int | None) -> Iterator[bytes]:
        """Shuffled training lines of all epochs (None: for ever), malformed ones counted once."""
        epoch = 0
        while epochs is None or epoch < epochs:
            report = self.report if epoch == 0 else None
            lines = (
                line
                for path in self._task.data.paths
                for line in self._well_formed(path, report)
                if not is_held_out(line, self._task.eval_fraction)
            )
            generator = random.Random(f"{self._task.seed}/{epoch}")
            empty = True
            for line in _shuffled(lines, self._task.shuffle_buffer, generator):
                empty = False
                yield line
            if empty:
                return
            epoch += 1

    def _well_formed(self, path: str, report: ReadReport | None) -> Iterator[bytes]:
        """Lines of one file without their end, malformed ones left out and noted in ``report``.

        Raises:
            SpecError: see the class.
        """
        number, usable, first_bad = 0, 0, 0
        with closing(_open(path)) as stream:
            while True:
                try:
                    line = stream.readline(_LONGEST_LINE_BYTES)
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    raise SpecError(
                        f"the gzip data is truncated or damaged after line {number}: {error}",
                        file=path,
                        fix="copy or download the file again",
                    ) from None
                except OSError as error:
                    raise _unreadable(path, error) from None
                if not line:
                    break
                number += 1
                line = line.rstrip(b"\r\n")
                if _LINE.fullmatch(line):
                    usable += 1
                    yield line
                    continue
                first_bad = first_bad or number
                if report is not None:
                    report.malformed_lines += 1
                    if len(report.malformed_examples) < EXAMPLES:
                        report.malformed_examples.append(f"{path}:{number}")
        if number == 0:
            raise SpecError("the file is empty", file=path, fix="give a file with samples")
        if usable == 0:
            raise SpecError(
                f"none of its {number} lines is label, {INTEGERS} integers and {CATEGORIES} "
                "hexadecimal categories, separated by tabs",
                file=path,
                field=f"line {first_bad}",
                fix="give a file in Criteo's format, without a header",
            )


def _open(path: str) -> IO[bytes]:
    """A plain or gzip file, told apart by content.

    Raises:
        SpecError: it does not exist or cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            zipped = stream.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        return gzip.open(path, "rb") if zipped else open(path, "rb")
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str, error: OSError) -> SpecError:
    if not Path(path).exists():
        return SpecError(
            "this data file does not exist", file=path, fix="check the path given to --data"
        )
    return SpecError(
        f"this data file cannot be read: {error.strerror}",
        file=path,
        fix="name a readable file, not a folder",
    )
