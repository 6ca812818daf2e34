"""Saves a job now and then while it trains on, and finds the newest checkpoint that is whole.

Every rank makes one and calls the same methods in the same order. Saving copies this rank's pieces
to host memory, which training waits for; a thread then writes them, over process groups of its own,
because collectives of two threads in one group would be matched up wrongly.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from planner.specs.errors import RunError, UsageError
from trainers.checkpoint.folder import (
    Manifest,
    StoredFile,
    check_same_run,
    damage,
    digest,
    name_of,
    publish,
    read_manifest,
    retain,
    run_identity,
    saved_steps,
    start_writing,
)
from trainers.checkpoint.pieces import (
    Piece,
    combined,
    dense_pieces,
    distinct,
    row_states,
    sources,
    table_pieces,
)
from trainers.checkpoint.planners import PieceReader, PieceWriter, check_pieces
from trainers.checkpoint.storage import INDEX, IndexReader, IndexWriter
from trainers.optimizers import materialise
from trainers.rank import RankEnv
from trainers.setup import Trainable
from trainers.shards import flush_caches, write_back_caches
from trainers.task import TrainTask

Tell = Callable[[dict[str, Any]], None]
WRITE_TIMEOUT = timedelta(hours=1)
"""A rank that writes slowly is waited for by the others' threads, not by training."""


@dataclass(frozen=True)
class _Copy:
    """A rank's pieces at one step."""

    step: int
    pieces: list[Piece]
    staged_s: float


class Checkpointer:
    """Of one rank.

    Args:
        tell: gets the events ``checkpoint``, ``resumed`` and ``damaged``, on rank 0 alone; the
            first comes from the thread that writes.
    """

    def __init__(self, task: TrainTask, rank: RankEnv, trainable: Trainable, tell: Tell) -> None:
        assert task.checkpoint_dir is not None
        self.saved = 0
        """Checkpoints that were finished."""
        self.last_step = 0
        """Of the last that was begun or restored."""
        self._task, self._rank, self._trainable, self._tell = task, rank, trainable, tell
        self._folder = Path(task.checkpoint_dir)
        self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._row_wise = task.plan.model.optimizer.sparse.name == "rowwise_adagrad"
        self._network = trainable.model.module.head.network

    @property
    def _leads(self) -> bool:
        return self._rank.world_rank == 0

    def save(self, step: int) -> None:
        """Save the state after ``step`` steps; waits for the checkpoint before, if it is still
        being written, and for the copy to host memory.

        Raises:
            RunError: the one before could not be written.
        """
        self._wait()
        if self._trainable.embedding_exchange is not None:
            # Copies of the tables are equal after it, so one of them stands for all.
            self._trainable.embedding_exchange.exchange()
        begin = time.perf_counter()
        flush_caches(self._trainable.shards)
        pieces = [
            Piece(p.name, p.size, p.offsets, p.tensor.detach().to("cpu", copy=True))
            for p in self._own_pieces()
        ]
        self.last_step = step
        copy = _Copy(step, pieces, time.perf_counter() - begin)
        self._writing = self._thread.submit(self._write, copy)

    def close(self) -> None:
        """Wait for the last checkpoint; end the thread.

        Raises:
            RunError: it could not be written.
        """
        try:
            self._wait()
        finally:
            self._thread.shutdown(wait=True)

    def abandon(self) -> None:
        """End the thread without waiting for others: this rank has failed."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def restore(self) -> int:
        """Load the newest checkpoint that is whole; the steps it has, 0 if there is none.

        Raises:
            UsageError: it is of another run, or the ranks see different folders.
            SpecError: it lacks a tensor that the model needs.
            RunError: there are checkpoints, but none is whole.
        """
        steps = self._agreed_steps()
        for step in steps:
            checkpoint = self._folder / name_of(step)
            problem = self._any(damage(checkpoint, self._rank.world_rank, self._group.size()))
            if not problem:
                check_same_run(read_manifest(checkpoint), self._task, self._folder)
                problem = self._load(checkpoint)
            if not problem:
                self._set_step(step)
                self._say("resumed", checkpoint=str(checkpoint), step=step)
                return step
            self._say("damaged", checkpoint=str(checkpoint), why=problem)
        if steps:
            raise RunError(
                f"none of the {len(steps)} checkpoints in {self._folder} is whole",
                fix="restore them from a backup, or delete them to start anew",
            )
        return 0

    def _say(self, kind: str, **fields: object) -> None:
        if self._leads:
            self._tell({"kind": kind, **fields})

    def _own_pieces(self) -> list[Piece]:
        """What this rank writes: one replica group of the first pool writes for all."""
        plan, rank = self._task.plan, self._rank
        pool = plan.pools[rank.pool]
        if rank.pool != next(iter(plan.pools)) or rank.pool_rank >= pool.group_ranks:
            tables = []
        else:
            shards = [s for s in self._trainable.shards if not s.replicated or not rank.group_rank]
            specs = plan.model.all_tables
            tables = list(table_pieces(shards, specs, self._row_wise))
            if self._row_wise:
                tables += [state.piece for state in row_states(shards, specs)]
        dense = []
        if rank.pool == next(iter(plan.pools)):
            dense = [
                piece
                for piece, alone in dense_pieces(self._network, self._trainable.optimizer.dense)
                if alone or rank.pool_rank == 0
            ]
        return distinct([*tables, *dense])

    def _write(self, copy: _Copy) -> None:
        begin = time.perf_counter()
        partial = self._folder / f"{name_of(copy.step)}.partial"
        if self._leads:
            partial = start_writing(self._folder, copy.step)
        dist.barrier(self._group)
        dcp.save(
            {},
            storage_writer=IndexWriter(partial),
            planner=PieceWriter(copy.pieces),
            process_group=self._group,
        )
        own = {
            path.name: digest(path).model_dump()
            for path in partial.glob(f"__{self._rank.world_rank}_*")
        }
        gathered: list[Any] = [None] * self._group.size()
        dist.all_gather_object(gathered, json.dumps(own), group=self._group)
        if self._leads:
            files = {
                name: StoredFile(**stored)
                for one in gathered
                for name, stored in json.loads(one).items()
            }
            _check_shared(partial, files)
            files[INDEX] = digest(partial / INDEX)
            plan = self._task.plan
            manifest = Manifest(
                run=run_identity(self._task),
                model=plan.model.name,
                plan_fingerprint=plan.fingerprint,
                step=copy.step,
                samples=copy.step * plan.global_batch,
                seed=self._task.seed,
                files=files,
            )
            publish(partial, manifest)
            retain(self._folder, self._task.keep_checkpoints)
            self._tell(
                {
                    "kind": "checkpoint",
                    "step": copy.step,
                    "bytes": sum(stored.bytes for stored in files.values()),
                    "staged_s": copy.staged_s,
                    "written_s": time.perf_counter() - begin,
                }
            )
        self.saved += 1

    def _wait(self) -> None:
        if self._writing is None:
            return
        try:
            self._writing.result()
        except (dcp.CheckpointException, OSError) as error:
            first = error
            if isinstance(error, dcp.CheckpointException):
                first = next(iter(error.failures.values()))[0]
            raise RunError(
                f"the checkpoint could not be written: {first}",
                fix="see that the folder of --checkpoint-dir has room and can be written",
            ) from None
        finally:
            self._writing = None

    def _agreed_steps(self) -> list[int]:
        """Steps of the checkpoints, newest first, as all ranks see them.

        Raises:
            UsageError: they do not see the same.
        """
        steps = saved_steps(self._folder)
        seen: list[Any] = [None] * self._group.size()
        dist.all_gather_object(seen, steps, group=self._group)
        if any(other != seen[0] for other in seen):
            raise UsageError(
                f"ranks see different checkpoints here: rank 0 {seen[0] or 'none'}, others "
                f"{next(other for other in seen if other != seen[0]) or 'none'}",
                field="--checkpoint-dir",
                value=str(self._folder),
                fix="name a folder that all nodes share",
            )
        return steps

    def _any(self, own: str) -> str:
        """What some rank finds wrong."""
        found: list[Any] = [None] * self._group.size()
        dist.all_gather_object(found, own, group=self._group)
        return next((problem for problem in found if problem), "")

    def _load(self, checkpoint: Path) -> str:
        """Fill the model; what cannot be read after all, empty if nothing.

        Raises:
            SpecError: a tensor that the model needs is not there.
        """
        specs, shards = self._task.plan.model.all_tables, self._trainable.shards
        optimizer = self._trainable.optimizer.dense
        materialise(optimizer)
        reader = IndexReader(checkpoint)
        metadata = reader.read_metadata()
        pieces = list(table_pieces(shards, specs, self._row_wise))
        pieces += [piece for piece, _ in dense_pieces(self._network, optimizer)]
        states = list(row_states(shards, specs)) if self._row_wise else []
        parts = [sources(state, metadata.state_dict_metadata) for state in states]
        read: dict[tuple[str, int], Piece] = {}
        for state, names in zip(states, parts, strict=True):
            for name, _ in names:
                into = torch.empty(state.tensor.shape, dtype=state.tensor.dtype)
                piece = Piece(name, (state.table_rows,), (state.first_row,), into)
                read.setdefault((name, state.first_row), piece)
        pieces = distinct([*pieces, *read.values()])
        check_pieces(pieces, metadata)
        # Rows that a cache still holds would be written over those that are read.
        write_back_caches(shards)
        try:
            dcp.load(
                {}, storage_reader=reader, planner=PieceReader(pieces), process_group=self._group
            )
        except dcp.CheckpointException as error:  # on every rank alike
            return f"{checkpoint}: {next(iter(error.failures.values()))[0]}"
        for state, names in zip(states, parts, strict=True):
            known = [(read[name, state.first_row].tensor, weight) for name, weight in names]
            state.tensor.copy_(combined(known))
        return ""

    def _set_step(self, step: int) -> None:
        """Counters that live outside of tensors."""
        self.last_step = step
        for kernel in {id(shard.kernel): shard.kernel for shard in self._trainable.shards}.values():
            if getattr(kernel, "iter", torch.empty(0)).numel():
                kernel.set_optimizer_step(step)
        if self._trainable.embedding_exchange is not None:
            self._trainable.embedding_exchange.steps = step


def _check_shared(partial: Path, files: Mapping[str, StoredFile]) -> None:
    """
    Raises:
        UsageError: rank 0 does not see what the others wrote.
    """
    for name, stored in files.items():
        path = partial / name
        if not path.is_file() or path.stat().st_size != stored.bytes:
            raise UsageError(
                f"rank 0 does not find {name}, which another rank wrote",
                field="--checkpoint-dir",
                value=str(partial.parent),
                fix="name a folder that all nodes share",
            )
