"""Where checkpoints lie: one folder each, whole or not there.

    <checkpoint_dir>/step-00001000/            a checkpoint
        manifest.json                          what it is of; size and SHA-256 of every other file
        index.json, __0_0.distcp, ...          see ``trainers.checkpoint.storage``
    <checkpoint_dir>/step-00002000.partial/    one that is being written, or never was finished

The manifest is written last, then the folder gets its name: a folder without the ending is whole,
unless a disk or a person damaged it, and then a digest says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from planner.specs.base import NonNegativeInt, PositiveInt, Spec, read_text, sha256, validate
from planner.specs.errors import HwplanError, SpecError, UsageError
from trainers.task import TrainTask

FORMAT = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"
_NAME = re.compile(r"step-(\d{8,})")
_BLOCK_BYTES = 1 << 20


class StoredFile(Spec):
    """A file of a checkpoint."""

    bytes: NonNegativeInt
    sha256: str


class Manifest(Spec):
    """What a checkpoint is of."""

    format: PositiveInt = FORMAT
    run: str
    """Digest of what must not change when a run goes on (``run_identity``)."""
    model: str
    plan_fingerprint: str
    step: PositiveInt
    samples: PositiveInt
    """Position in the data: the samples of all global batches so far."""
    seed: NonNegativeInt
    files: dict[str, StoredFile]


def run_identity(task: TrainTask) -> str:
    """Digest of model, global batch, seed and data: with these, global batch k is the same samples
    and means the same, whatever the plan."""
    return sha256(
        {
            "model": task.plan.model.model_dump(mode="json", exclude={"description", "source"}),
            "global_batch": task.plan.global_batch,
            "seed": task.seed,
            "data": list(task.data.paths),
            "eval_fraction": task.eval_fraction,
            "shuffle_buffer": task.shuffle_buffer,
        }
    )


def name_of(step: int) -> str:
    """Folder name; names sort by step."""
    return f"step-{step:08d}"


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints there, newest first."""
    if not folder.is_dir():
        return []
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir() if not path.is_symlink())
    return sorted((int(name[1]) for name in names if name), reverse=True)


def read_manifest(checkpoint: Path) -> Manifest:
    """
    Raises:
        SpecError: it is missing, damaged or of another format, or names files that are not plain
            files of its own folder.
    """
    path = checkpoint / MANIFEST
    try:
        data = json.loads(read_text(path, "manifest"))
    except ValueError:
        raise SpecError("not valid JSON", file=path) from None
    manifest = validate(Manifest, data, path)
    if manifest.format != FORMAT:
        raise SpecError(
            "a checkpoint of another version of hwplan", file=path, value=manifest.format
        )
    for name in manifest.files:
        if Path(name).name != name or (checkpoint / name).is_symlink():
            raise SpecError("not a file of this folder", file=path, field="files", value=name)
    return manifest


def digest(path: Path) -> StoredFile:
    """Size and SHA-256 of a file.

    Raises:
        SpecError: it cannot be read.
    """
    found, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                found.update(block)
                size += len(block)
    except OSError as error:
        raise SpecError(f"cannot be read: {error.strerror}", file=path) from None
    return StoredFile(bytes=size, sha256=found.hexdigest())


def check_files(checkpoint: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """Whether the files are those that were saved; rank ``part`` of ``parts`` checks its share.

    Raises:
        SpecError: naming the first one that is not.
    """
    for name in sorted(manifest.files)[part::parts]:
        if digest(checkpoint / name) != manifest.files[name]:
            raise SpecError("not what was saved (size or SHA-256 differ)", file=checkpoint / name)


def damage(checkpoint: Path, part: int = 0, parts: int = 1) -> str:
    """What is wrong with a checkpoint; empty if nothing."""
    try:
        check_files(checkpoint, read_manifest(checkpoint), part, parts)
    except HwplanError as error:
        return error.render()
    return ""


def check_same_run(manifest: Manifest, task: TrainTask, folder: Path) -> None:
    """
    Raises:
        UsageError: the checkpoint is of another run.
    """
    if manifest.run == run_identity(task):
        return
    changed = "its data, its global batch or a setting of the model"
    if manifest.model != task.plan.model.name:
        changed = f"it is of model {manifest.model}"
    elif manifest.seed != task.seed:
        changed = f"it has seed {manifest.seed}"
    raise UsageError(
        f"the checkpoint of step {manifest.step} is of another run: {changed}",
        field="--checkpoint-dir",
        value=str(folder),
        fix="give the same model, data, seed and batch to go on, or another folder to start anew",
    )


def start_writing(folder: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into.

    Raises:
        SpecError: it cannot be made.
    """
    partial = folder / (name_of(step) + PARTIAL)
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise SpecError(
            f"cannot be made: {error.strerror}", file=partial, fix="give another --checkpoint-dir"
        ) from None
    return partial


def publish(partial: Path, manifest: Manifest) -> Path:
    """Write the manifest and give the folder its name."""
    with (partial / MANIFEST).open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(manifest.model_dump(mode="json"), indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    if final.exists():
        # Of an attempt that got this far and was sent back further.
        shutil.rmtree(final)
    os.replace(partial, final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return final


def retain(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints, and what was never finished before them."""
    steps = saved_steps(folder)
    for step in steps[keep:]:
        shutil.rmtree(folder / name_of(step), ignore_errors=True)
    for path in folder.glob(f"step-*{PARTIAL}"):
        name = _NAME.fullmatch(path.name.removesuffix(PARTIAL))
        if name and steps and int(name[1]) <= steps[0]:
            shutil.rmtree(path, ignore_errors=True)
