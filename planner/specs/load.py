"""Find and read cluster, device and model files: shipped ones by name, others by path."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import cluster_configs
from planner.specs.base import load_yaml, validate
from planner.specs.cluster import ClusterSpec
from planner.specs.device import DeviceProfile
from planner.specs.errors import SpecError, UsageError
from planner.specs.model import ModelSpec

MODELS = Path(__file__).parent.parent / "models"
CLUSTERS = Path(cluster_configs.__file__).parent
DEVICES = CLUSTERS / "devices"


def names_in(folder: Path) -> list[str]:
    """Names of the YAML files of a folder, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _locate(name: str, shipped: Path, what: str, relative_to: Path | None = None) -> Path:
    """A path for something that looks like one (``relative_to`` a folder, and failing that to the
    current one), else the shipped file of that name."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name)
        beside = path if relative_to is None else relative_to / path
        return path if os.path.exists(path) and not os.path.exists(beside) else beside
    path = shipped / f"{name}.yaml"
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or not os.path.isfile(path):
        raise UsageError(
            f"unknown {what}",
            value=name,
            fix=f"use one of {', '.join(names_in(shipped))}, or the path of a {what} YAML file",
        )
    return path


def load_model(name: str) -> ModelSpec:
    """A built-in model by name, or a model file by path.

    Raises:
        UsageError: unknown name. SpecError: unusable file.
    """
    path = _locate(name, MODELS, "model")
    return validate(ModelSpec, load_yaml(path, "model file"), path)


def load_cluster(name: str) -> ClusterSpec:
    """A cluster file by path (or a shipped one by name); its devices are checked too.

    Device paths inside are made absolute, so that a plan carries them usably.

    Raises:
        UsageError: unknown name. SpecError: unusable file.
    """
    path = _locate(name, CLUSTERS, "cluster")
    cluster = validate(ClusterSpec, load_yaml(path, "cluster file"), path)
    pools = []
    for index, pool in enumerate(cluster.pools):
        field = f"pools.{index}.device"
        try:
            located = _locate(pool.device, DEVICES, "device", path.parent)
        except UsageError as error:
            raise UsageError(
                error.problem, fix=error.fix, file=path, field=field, value=pool.device
            ) from None
        profile = load_device(str(located))
        if profile.is_cpu != (pool.cpu_cores is not None):
            raise UsageError(
                "a CPU pool needs cpu_cores" if profile.is_cpu else "cpu_cores is for CPU pools",
                fix="add cpu_cores: [0, …]" if profile.is_cpu else "remove cpu_cores",
                file=path,
                field=f"pools.{index}.cpu_cores",
            )
        is_path = located.parent.resolve() != DEVICES.resolve()
        pools.append(
            pool.model_copy(update={"device": str(located.resolve()) if is_path else profile.name})
        )
    try:
        _locate(cluster.reference_device, DEVICES, "device", path.parent)
    except UsageError as error:
        raise UsageError(
            error.problem,
            fix=error.fix,
            file=path,
            field="reference_device",
            value=cluster.reference_device,
        ) from None
    _check_cores(cluster, path)
    return cluster.model_copy(update={"pools": tuple(pools)})


def _check_cores(cluster: ClusterSpec, path: Path) -> None:
    """Every pool is priced as if its cores were its own.

    Raises:
        SpecError: two pools are pinned to the same cores.
    """
    owners: dict[int, str] = {}
    for index, pool in enumerate(cluster.pools):
        shared = [core for core in pool.cpu_cores or () if core in owners]
        if shared:
            other = owners[shared[0]]
            both = [core for core in shared if owners[core] == other]
            raise SpecError(
                f"pools {other} and {pool.name} are both pinned to "
                f"core{'s' if len(both) > 1 else ''} {', '.join(map(str, both))}",
                file=path,
                field=f"pools.{index}.cpu_cores",
                value=list(pool.cpu_cores or ()),
                fix="give each pool cores of its own",
            )
        owners.update(dict.fromkeys(pool.cpu_cores or (), pool.name))


_NONE: Mapping[str, DeviceProfile] = MappingProxyType({})
_STAND_INS: ContextVar[Mapping[str, DeviceProfile]] = ContextVar("_STAND_INS", default=_NONE)


@contextmanager
def standing_in(profiles: Mapping[str, DeviceProfile]) -> Iterator[None]:
    """Inside, ``load_device`` answers these names with these profiles: what if they were so?

    The profiles need names of their own, since results are cached by profile.
    """
    token = _STAND_INS.set(profiles)
    try:
        yield
    finally:
        _STAND_INS.reset(token)


def load_device(name: str) -> DeviceProfile:
    """A shipped device profile by name, or a profile file by path.

    Raises:
        UsageError: unknown name. SpecError: unusable file.
    """
    return _STAND_INS.get().get(name) or _read_device(name)


@lru_cache(maxsize=64)
def _read_device(name: str) -> DeviceProfile:
    path = _locate(name, DEVICES, "device")
    return validate(DeviceProfile, load_yaml(path, "device profile"), path)
