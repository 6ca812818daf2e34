"""Kernels compiled ahead of time: a folder that may be copied anywhere, and what reads it.

``manifest.json`` names the plan, the Triton version and every kernel; each binary lies in a folder
of its own with Triton's metadata. Nothing is compiled from it or after it: a kernel that was
dropped does not run, and one that was never compiled is an error.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated

import triton
from pydantic import Field
from triton.compiler import CompiledKernel

from planner.specs.base import NonNegativeInt, PositiveInt, Spec, read_text, sha256, validate
from planner.specs.errors import RunError, SpecError
from planner.specs.kernels import Epilogue, Layout, TileConfig
from planner.specs.plan import Plan
from planner.specs.units import Dtype
from trainers.kernels.build import (
    Compiled,
    KernelKey,
    compile_options,
    main_source,
    reduce_options,
    reduce_source,
)

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
AGAIN = "compile again with hwplan kernels compile"


class StoredBinary(Spec):
    """One binary and what it takes of a compute unit."""

    folder: str
    """Inside the store; holds the metadata and the binary."""
    sha256: str
    """Of metadata and binary, one after the other."""
    registers: NonNegativeInt
    spilled: NonNegativeInt
    lds_bytes: NonNegativeInt


class KernelName(Spec):
    """A ``KernelKey`` as it is written down."""

    arch: str
    dtype: Dtype
    layout: Layout
    epilogue: Epilogue
    output: Dtype
    tile: TileConfig
    alignment: Annotated[tuple[PositiveInt, ...], Field(min_length=3, max_length=3)]

    @classmethod
    def of(cls, key: KernelKey) -> KernelName:
        """The name of ``key``."""
        return cls(**{name: getattr(key, name) for name in cls.model_fields})


class StoredKernel(Spec):
    """A kernel that can be loaded."""

    name: KernelName
    main: StoredBinary
    reduction: StoredBinary | None = None
    """Where k is split."""


class DroppedKernel(Spec):
    """A kernel of the plan that is not run."""

    name: KernelName
    reason: str


class Manifest(Spec):
    """What a store holds."""

    schema_version: PositiveInt = SCHEMA_VERSION
    hwplan_version: str
    triton_version: str
    plan_fingerprint: str
    plan_digest: str
    kernels: tuple[StoredKernel, ...]
    dropped: tuple[DroppedKernel, ...]


def content_digest(metadata: bytes, binary: bytes) -> str:
    """SHA-256 of a stored binary's files."""
    return hashlib.sha256(metadata + binary).hexdigest()


def folder_name(key: KernelKey, reduction: bool) -> str:
    """A function of everything that decides the binary."""
    source = reduce_source(key) if reduction else main_source(key)
    options = reduce_options() if reduction else compile_options(key)
    digest = sha256({"source": source.hash(), "options": options, "triton": triton.__version__})
    return f"{key.arch}/{digest[:32]}"


def binary_extension(arch: str) -> str:
    """Of the binary's file, as Triton names it."""
    return "hsaco" if arch.startswith("gfx") else "cubin"


class KernelStore:
    """A store opened for one plan."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._loaded: dict[KernelKey, Compiled | None] = {}
        self._kernels = {item.name.model_dump_json(): item for item in manifest.kernels}
        self._dropped = {item.name.model_dump_json() for item in manifest.dropped}

    @classmethod
    def open(cls, folder: str | Path, plan: Plan) -> KernelStore:
        """Check the manifest and every file.

        Raises:
            SpecError: no store, one of another plan or Triton version, or a damaged file.
        """
        path = Path(folder) / MANIFEST
        try:
            data = json.loads(read_text(path, "kernel store's manifest"))
        except ValueError:
            raise SpecError("not valid JSON", file=path, fix=AGAIN) from None
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
            raise SpecError(
                f"this hwplan reads kernel stores of schema {SCHEMA_VERSION}",
                file=path,
                field="schema_version",
                fix=AGAIN,
            )
        manifest = validate(Manifest, data, path)
        expected = {
            "triton_version": (manifest.triton_version, triton.__version__),
            "plan_fingerprint": (manifest.plan_fingerprint, plan.fingerprint),
            "plan_digest": (manifest.plan_digest, plan.digest),
        }
        for field, (found, wanted) in expected.items():
            if found != wanted:
                raise SpecError(
                    f"the kernels were compiled for another {field.replace('_', ' ')} "
                    f"(here: {wanted[:16]})",
                    file=path,
                    field=field,
                    value=found[:16],
                    fix=AGAIN,
                )
        store = cls(Path(folder), manifest)
        for kernel in manifest.kernels:
            for binary in (kernel.main, kernel.reduction):
                if binary is not None:
                    store._check(binary, kernel.name.arch)
        return store

    def find(self, key: KernelKey) -> Compiled | None:
        """The binaries of ``key``; None if it was dropped when the store was made.

        Raises:
            RunError: the store was made without this kernel: for other GPUs, or other pools.
        """
        if key not in self._loaded:
            name = KernelName.of(key).model_dump_json()
            item = self._kernels.get(name)
            if item is None and name not in self._dropped:
                raise self._never_compiled(key)
            self._loaded[key] = None if item is None else self._load(key, item)
        return self._loaded[key]

    def _never_compiled(self, key: KernelKey) -> RunError:
        made = (*self.manifest.kernels, *self.manifest.dropped)
        archs = sorted({item.name.arch for item in made})
        if key.arch in archs:
            return RunError(
                "the kernel store lacks a kernel of the plan",
                file=self.folder,
                field=f"{key.layout} {key.dtype}",
                value=str(key.tile),
                fix="compile the kernels of all pools: hwplan kernels compile without --pool",
            )
        return RunError(
            f"the kernel store has kernels for {', '.join(archs)} only",
            file=self.folder,
            field="arch",
            value=key.arch,
            fix="compile without --pool, or plan with the profile of the GPUs that are there",
        )

    def _load(self, key: KernelKey, item: StoredKernel) -> Compiled:
        main = self._kernel(main_source(key), item.main, key.arch)
        if item.reduction is None:
            return Compiled(main, None)
        return Compiled(main, self._kernel(reduce_source(key), item.reduction, key.arch))

    def _kernel(self, source: object, binary: StoredBinary, arch: str) -> CompiledKernel:
        metadata, code = self._files(binary, arch)
        return CompiledKernel(source, {f.name: str(f) for f in (metadata, code)}, binary.sha256)

    def _files(self, binary: StoredBinary, arch: str) -> tuple[Path, Path]:
        folder = self.folder / binary.folder
        return folder / "kernel.json", folder / f"kernel.{binary_extension(arch)}"

    def _check(self, binary: StoredBinary, arch: str) -> None:
        metadata, code = self._files(binary, arch)
        try:
            found = content_digest(metadata.read_bytes(), code.read_bytes())
        except OSError as error:
            raise SpecError(
                f"a kernel of the store cannot be read: {error.strerror}",
                file=metadata.parent,
                fix=AGAIN,
            ) from None
        if found != binary.sha256:
            raise SpecError(
                "a kernel of the store is damaged: its digest differs from the manifest's",
                file=code,
                field="sha256",
                fix=AGAIN,
            )
