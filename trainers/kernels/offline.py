"""Compile a plan's kernels for its GPUs on a machine that has none, into a kernel store."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.compiler import CompiledKernel

from planner.fingerprint import hwplan_version
from planner.specs.base import NonNegativeInt, Spec, canonical_json
from planner.specs.errors import SpecError, UsageError
from planner.specs.kernels import PlannedGemm
from planner.specs.load import load_device
from planner.specs.plan import Plan, PoolPlan
from trainers.kernels.build import KernelKey, compiled, gpu_target
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
from trainers.kernels.usage import Usage, largest_lds_bytes, refusal, usage_of

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
        (rank, KernelKey.of(arch, dtype, item.gemm, kernel.tile))
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
    for pool in plan.pools.values() if not pools else (plan.pools[name] for name in pools):
        if not pool.kernels:
            continue
        device = load_device(pool.device)
        gpu_target(device.arch)
        limit = largest_lds_bytes(device)
        for key in pool_keys(pool, device.arch):
            found.setdefault(key, Request(key, limit))
    return tuple(found.values())


class PoolKernels(Spec):
    """A store's kernels from the side of one pool."""

    pool: str
    arch: str
    products: NonNegativeInt
    """Of a step, in the pool's precision, that the plan gives to Triton."""
    next_instead: NonNegativeInt
    """Products whose first kernel was dropped, so that another Triton kernel runs."""
    vendor_instead: NonNegativeInt
    """Products whose kernels before the vendor's library were all dropped."""
    compiled: NonNegativeInt
    """Kernels, shared ones in every pool that has them."""
    dropped: NonNegativeInt
    most_registers: NonNegativeInt
    most_lds_bytes: NonNegativeInt


def summarise(plan: Plan, manifest: Manifest, pools: Sequence[str] = ()) -> tuple[PoolKernels, ...]:
    """What the store means for each pool that has kernels (of ``pools``; none: of all)."""
    mains = {item.name: item.main for item in manifest.kernels}
    found = []
    for name, pool in plan.pools.items():
        if (pools and name not in pools) or not pool.kernels:
            continue
        arch = load_device(pool.device).arch
        names = [KernelName.of(key) for key in pool_keys(pool, arch)]
        own = [mains[item] for item in names if item in mains]
        runs = Counter(_place_that_runs(item, arch, mains) for item in pool.own_kernels)
        found.append(
            PoolKernels(
                pool=name,
                arch=arch,
                products=len(pool.own_kernels),
                next_instead=sum(n for place, n in runs.items() if place),
                vendor_instead=runs[None],
                compiled=len(own),
                dropped=len(names) - len(own),
                most_registers=max((main.registers for main in own), default=0),
                most_lds_bytes=max((main.lds_bytes for main in own), default=0),
            )
        )
    return tuple(found)


def _place_that_runs(item: PlannedGemm, arch: str, made: Container[KernelName]) -> int | None:
    """Place among the candidates of the Triton kernel that a worker runs; None: the vendor's."""
    for place, candidate in enumerate(item.candidates):
        if candidate.tile is None:
            return None
        key = KernelKey.of(arch, item.dtype, item.gemm, candidate.tile)
        if KernelName.of(key) in made:
            return place
    return None


def compile_request(request: Request) -> Outcome:
    """Compile, read what the kernel takes, and refuse one that spills or does not fit."""
    key = request.key
    try:
        binaries = compiled.__wrapped__(key)
    except Exception as error:  # the compiler's own, of many types: the kernel is left out
        text = str(error).strip() or "no message"
        return Outcome(key, f"does not compile: {type(error).__name__}: {text.splitlines()[0]}")
    kernels = [kernel for kernel in (binaries.main, binaries.reduction) if kernel is not None]
    usages = [usage_of(kernel) for kernel in kernels]
    for usage in usages:
        reason = refusal(usage, request.lds_limit_bytes)
        if reason:
            return Outcome(key, reason)
    made = [
        _binary(key, reduction, kernel, usage)
        for reduction, kernel, usage in zip((False, True), kernels, usages, strict=False)
    ]
    return Outcome(key, "", *made)


def _binary(key: KernelKey, reduction: bool, kernel: CompiledKernel, usage: Usage) -> Binary:
    folder = folder_name(key, reduction)
    facts = kernel.metadata._asdict()
    # Triton's hash covers paths of this machine's libraries; the store's files must not.
    facts |= {"hash": folder, "target": vars(facts["target"]), "extern_libs": []}
    metadata = canonical_json(facts).encode()
    code = kernel.asm[binary_extension(key.arch)]
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
        # Both folders lie beside the target, so that renaming is one step of the file system.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as beside:
            _write_files(Path(beside) / "new", manifest, outcomes)
            if target.exists():
                target.rename(Path(beside) / "old")
            (Path(beside) / "new").rename(target)
    except OSError as error:
        raise SpecError(
            f"cannot be written: {error.strerror}",
            file=target,
            fix="check that the folder it lies in exists, is writable and has space",
        ) from None
    return manifest


def _write_files(folder: Path, manifest: Manifest, outcomes: Sequence[Outcome]) -> None:
    folder.mkdir()
    for outcome in outcomes:
        for binary in (outcome.main, outcome.reduction):
            if binary is not None:
                _write_binary(folder / binary.stored.folder, outcome.key.arch, binary)
    text = json.dumps(manifest.model_dump(mode="json"), indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _write_binary(folder: Path, arch: str, binary: Binary) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.json").write_bytes(binary.metadata)
    (folder / f"kernel.{binary_extension(arch)}").write_bytes(binary.code)


def _manifest(plan: Plan, outcomes: Sequence[Outcome]) -> Manifest:
    return Manifest(
        hwplan_version=hwplan_version(),
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
