"""The three places that pin versions for a CPU install have to agree."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "install" / "fbgemm-gpu-cpu-shim" / "pyproject.toml"


def _project(path: Path) -> dict:
    return tomllib.loads(path.read_text(encoding="utf-8"))["project"]


def _constraints() -> dict[str, str]:
    lines = (ROOT / "install" / "constraints-cpu.txt").read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins}


def test_constraints_satisfy_every_requirement_of_the_cpu_environment():
    project = _project(ROOT / "pyproject.toml")
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["train-cpu"], *extras["kernels"], *extras["dev"]]
    pinned = _constraints()
    for requirement in map(Requirement, wanted):
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), (requirement, version)


def test_shim_stands_in_for_the_fbgemm_build_that_is_pinned():
    shim, pinned = _project(SHIM), _constraints()
    assert shim["version"] == pinned["fbgemm-gpu"]
    assert shim["dependencies"] == [f"fbgemm-gpu-cpu=={pinned['fbgemm-gpu-cpu']}"]


def test_cpu_and_gpu_extras_pin_the_same_releases():
    extras = _project(ROOT / "pyproject.toml")["optional-dependencies"]
    cpu, gpu, kernels = (
        {r.name: str(r.specifier) for r in map(Requirement, extras[name])}
        for name in ("train-cpu", "train", "kernels")
    )
    for name in ("ray", "torch", "torchrec"):
        assert cpu[name] == gpu[name]
    assert cpu["fbgemm-gpu"] == gpu["fbgemm-gpu"] + "+cpu"
    assert kernels["triton"] == gpu["triton"]
