"""Compile a plan's kernels for its GPUs on a machine that has none, into a kernel store."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import triton
from triton.compiler import CompiledKernel

from planner.specs.base import canonical_json
from planner.specs.errors import SpecError, UsageError
from planner.specs.load import load_device
from planner.specs.plan import Plan, PoolPlan
from trainers.kernels.build import KernelKey, compiled, gpu_target, output_dtype
from trainers.kernels.store import (
    MANIFEST,
    DroppedKernel,
    KernelName,
    Manifest,
    StoredBinary,
    StoredKernel,
    binary_extension,
    content_digest,
    folder_name,
)
from trainers.kernels.usage import largest_lds_bytes, refusal, usage_of

Progress = Callable[[int, int], None]
"""Kernels done, kernels in all."""


@dataclass(frozen=True)
class Request:
    """One kernel to compile."""

    key: KernelKey
    lds_limit_bytes: int


@dataclass(frozen=True)
class Binary:
    """A compiled kernel's files, before they are written."""

    stored: StoredBinary
    metadata: bytes
    code: bytes


@dataclass(frozen=True)
class Outcome:
    """A request's binaries, or why there are none."""

    key: KernelKey
    reason: str
    main: Binary | None = None
    reduction: Binary | None = None


def pool_keys(pool: PoolPlan, arch: str) -> tuple[KernelKey, ...]:
    """Kernels of every Triton candidate in the pool's precision, those that run first."""
    dtype = pool.policy.compute_precision
    ranked = [
        (rank, KernelKey.of(arch, dtype, item.gemm, kernel.tile, output_dtype(dtype, item.layout)))
        for item in pool.kernels
        if item.dtype is dtype
        for rank, kernel in enumerate(item.candidates)
        if kernel.tile is not None
    ]
    return tuple(dict.fromkeys(key for _, key in sorted(ranked, key=lambda pair: pair[0])))


def compile_plan(
    plan: Plan,
    folder: str | Path,
    *,
    pools: Sequence[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Compile the plan's kernels and write them to a kernel store.

    Args:
        pools: names; none: all pools.
        jobs: processes; all cores if left out.

    Raises:
        UsageError: a pool that the plan does not have, no kernels of its own in the plan, or a
            device that Triton has no backend for.
        SpecError: ``folder`` is something else than a kernel store, or cannot be written.
    """
    wanted = requests(plan, pools)
    if not wanted:
        raise UsageError(
            "the plan runs the vendor's library throughout: there is nothing to compile",
            field="kernels",
            fix="plan for GPUs whose device profile has a section triton",
        )
    check_target(folder)
    return write_store(plan, compile_all(wanted, jobs, progress), folder)


def requests(plan: Plan, pools: Sequence[str] = ()) -> tuple[Request, ...]:
    """What a plan wants compiled.

    Args:
        pools: names; none: all pools.

    Raises:
        UsageError: a pool that the plan does not have, or a device that Triton has no backend for.
    """
    unknown = [name for name in pools if name not in plan.pools]
    if unknown:
        raise UsageError(
            "the plan has no such pool",
            field="--pool",
            value=unknown[0],
            fix=f"use one of {', '.join(plan.pools)}",
        )
    found: dict[KernelKey, Request] = {}
    for name, pool in plan.pools.items():
        if (pools and name not in pools) or not pool.kernels:
            continue
        device = load_device(pool.device)
        gpu_target(device.arch)
        limit = largest_lds_bytes(device)
        for key in pool_keys(pool, device.arch):
            found.setdefault(key, Request(key, limit))
    return tuple(found.values())


def compile_request(request: Request) -> Outcome:
    """Compile, read what the kernel takes, and refuse one that spills or does not fit."""
    key = request.key
    try:
        binaries = compiled.__wrapped__(key)
    except Exception as error:  # the compiler's own, of many types: the kernel is left out
        text = str(error).strip() or "no message"
        return Outcome(key, f"does not compile: {type(error).__name__}: {text.splitlines()[0]}")
    main = _binary(key, False, binaries.main)
    reduction = None if binaries.reduction is None else _binary(key, True, binaries.reduction)
    reason = refusal(usage_of(binaries.main), request.lds_limit_bytes)
    return Outcome(key, reason) if reason else Outcome(key, "", main, reduction)


def _binary(key: KernelKey, reduction: bool, kernel: CompiledKernel) -> Binary:
    folder = folder_name(key, reduction)
    facts = kernel.metadata._asdict()
    # Triton's hash covers paths of this machine's libraries; the store's files must not.
    facts |= {"hash": folder, "target": vars(facts["target"]), "extern_libs": []}
    metadata = canonical_json(facts).encode()
    code = kernel.asm[binary_extension(key.arch)]
    usage = usage_of(kernel)
    stored = StoredBinary(
        folder=folder,
        sha256=content_digest(metadata, code),
        registers=usage.registers,
        spilled=usage.spilled,
        lds_bytes=usage.lds_bytes,
    )
    return Binary(stored, metadata, code)


def compile_all(
    wanted: Sequence[Request], jobs: int | None = None, progress: Progress | None = None
) -> list[Outcome]:
    """Outcomes in the order of ``wanted``, on ``jobs`` processes (all cores if left out)."""
    jobs = min(jobs or os.cpu_count() or 1, len(wanted))
    if jobs <= 1:
        return list(_counted(map(compile_request, wanted), len(wanted), progress))
    # A fork of a process that runs threads may hang; Triton's compiler has some.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return list(_counted(pool.imap(compile_request, wanted), len(wanted), progress))


def _counted(
    outcomes: Iterator[Outcome], total: int, progress: Progress | None
) -> Iterator[Outcome]:
    for done, outcome in enumerate(outcomes, start=1):
        if progress is not None:
            progress(done, total)
        yield outcome


def check_target(folder: str | Path) -> None:
    """Whether a store can be written there; before the minutes that compiling may take.

    Raises:
        SpecError: it is something else than a store, or what it lies in is no writable folder.
    """
    target = Path(folder)
    if target.exists() and not (target / MANIFEST).is_file():
        raise SpecError(
            "this is no kernel store: it is not replaced", file=target, fix="name a new folder"
        )
    if not os.access(target.absolute().parent, os.W_OK):
        raise SpecError(
            "the folder that it would lie in does not exist or is not writable",
            file=target,
            fix="make that folder, or name another one",
        )


def write_store(plan: Plan, outcomes: Sequence[Outcome], folder: str | Path) -> Manifest:
    """Write the store whole or not at all; an older store of that name is replaced.

    Raises:
        SpecError: ``folder`` is something else than a store, or cannot be written.
    """
    check_target(folder)
    target = Path(folder)
    manifest = _manifest(plan, outcomes)
    try:
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise SpecError(
            f"cannot be written: {error.strerror}",
            file=target,
            fix="check that the folder it lies in exists and is writable",
        ) from None
    try:
        for outcome in outcomes:
            for binary in (outcome.main, outcome.reduction):
                if binary is not None:
                    _write_binary(temporary / binary.stored.folder, outcome.key.arch, binary)
        text = json.dumps(manifest.model_dump(mode="json"), indent=1)
        (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")
        temporary.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return manifest


def _write_binary(folder: Path, arch: str, binary: Binary) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.json").write_bytes(binary.metadata)
    (folder / f"kernel.{binary_extension(arch)}").write_bytes(binary.code)


def _manifest(plan: Plan, outcomes: Sequence[Outcome]) -> Manifest:
    return Manifest(
        hwplan_version=version("hwplan"),
        triton_version=triton.__version__,
        plan_fingerprint=plan.fingerprint,
        plan_digest=plan.digest,
        kernels=tuple(
            StoredKernel(
                name=KernelName.of(outcome.key),
                main=outcome.main.stored,
                reduction=None if outcome.reduction is None else outcome.reduction.stored,
            )
            for outcome in outcomes
            if outcome.main is not None
        ),
        dropped=tuple(
            DroppedKernel(name=KernelName.of(outcome.key), reason=outcome.reason)
            for outcome in outcomes
            if outcome.main is None
        ),
    )
