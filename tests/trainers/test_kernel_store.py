"""Kernels compiled without a GPU: what is kept, what is dropped, and what a store refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from planner.search import SearchOptions, plan_job
from planner.specs.base import sha256
from planner.specs.cluster import BridgeSpec, ClusterSpec, PoolSpec
from planner.specs.errors import SpecError, UsageError
from planner.specs.kernels import Backend, Gemm, Layout, PlannedGemm, RankedKernel, TileConfig
from planner.specs.load import load_device, load_model
from planner.specs.plan import Plan, load_plan, save_plan
from planner.specs.units import Dtype
from trainers.kernels import build
from trainers.kernels.build import KernelKey, output_dtype
from trainers.kernels.offline import (
    Request,
    compile_all,
    compile_plan,
    compile_request,
    pool_keys,
    requests,
)
from trainers.kernels.store import MANIFEST, KernelStore

SMALL = TileConfig(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=2)
SPLIT = TileConfig(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=2, split_k=4)


def planned(layout: Layout, m: int, n: int, k: int, *tiles: TileConfig) -> PlannedGemm:
    kernels = [RankedKernel(backend=Backend.TRITON, tile=tile, predicted_us=1.0) for tile in tiles]
    vendor = RankedKernel(backend=Backend.VENDOR, predicted_us=9.0)
    return PlannedGemm(
        layout=layout, m=m, n=n, k=k, dtype=Dtype.BF16, count=1, candidates=(*kernels, vendor)
    )


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Two GPU pools with three kernels each, saved and loaded as a worker loads it."""
    pools = tuple(
        PoolSpec(name=device, device=device, nodes=1, devices_per_node=1)
        for device in ("mi350x", "h200")
    )
    cluster = ClusterSpec(name="two", pools=pools, bridge=BridgeSpec(gbps=40.0, latency_us=50.0))
    found = plan_job(
        cluster,
        load_model("dlrm_criteo_small"),
        options=SearchOptions(matched=True, mip_gap=0.2),
    )
    kernels = (
        planned(Layout.NT, 64, 16, 13, SMALL),
        planned(Layout.TN, 16, 13, 4096, SPLIT, SMALL),
    )
    mine = {
        name: pool.model_copy(
            update={
                "kernels": kernels,
                "policy": pool.policy.model_copy(update={"compute_precision": Dtype.BF16}),
            }
        )
        for name, pool in found.pools.items()
    }
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    save_plan(found.model_copy(update={"pools": mine}), path)
    return load_plan(path)


@pytest.fixture(scope="module")
def store(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "kernels"
    manifest = compile_plan(plan, folder, jobs=1)
    assert [item.name.arch for item in manifest.kernels] == ["gfx950"] * 3 + ["sm_90"] * 3
    assert manifest.dropped == ()
    return folder


def test_chosen_kernels_come_first_and_each_once(plan: Plan) -> None:
    keys = pool_keys(plan.pools["h200"], "sm_90")
    assert [(key.layout, key.tile) for key in keys] == [
        (Layout.NT, SMALL), (Layout.TN, SPLIT), (Layout.TN, SMALL),
    ]  # fmt: skip
    assert [key.output for key in keys] == [Dtype.BF16, Dtype.FP32, Dtype.FP32]
    assert [request.key for request in requests(plan, ["h200"])] == list(keys)
    assert pool_keys(plan.pools["h200"].model_copy(update={"kernels": ()}), "sm_90") == ()


def test_a_copied_store_loads_without_compiling(
    plan: Plan, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = shutil.copytree(store, tmp_path / "elsewhere")
    monkeypatch.setattr(triton, "compile", lambda *_, **__: pytest.fail("compiled"))
    opened = KernelStore.open(moved, plan)
    for request in requests(plan):
        binaries = opened.find(request.key)
        assert binaries is not None and binaries.main is not None
        assert (binaries.reduction is not None) == (request.key.tile.split_k > 1)
        assert binaries.main.metadata.name == "gemm" and len(binaries.main.kernel) > 1000
        assert opened.find(request.key) is binaries
    unknown = KernelKey.of("sm_90", Dtype.FP16, Gemm(8, 8, 8), SMALL, Dtype.FP16)
    assert opened.find(unknown) is None


def test_the_manifest_says_what_each_kernel_takes(store: Path) -> None:
    kernels = json.loads((store / MANIFEST).read_text())["kernels"]
    for item in kernels:
        assert 16 <= item["main"]["registers"] <= 255 and item["main"]["spilled"] == 0
        assert (item["reduction"] is not None) == (item["name"]["tile"]["split_k"] > 1)
    # Two stages of bf16 blocks of A and B; AMD keeps one of them in registers.
    operands = (32 + 32) * 32 * 2
    lds = {item["name"]["arch"]: item["main"]["lds_bytes"] for item in kernels}
    assert operands <= lds["gfx950"] <= lds["sm_90"] <= 2 * operands + 2048


def test_compiling_again_gives_the_same_files(plan: Plan, store: Path, tmp_path: Path) -> None:
    build.compiled.cache_clear()
    compile_plan(plan, tmp_path / "again", jobs=2)
    files = sorted(path.relative_to(store) for path in store.rglob("*") if path.is_file())
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (store / file).read_bytes(), file
    assert len(files) == 1 + 2 * 8


def test_what_spills_or_exceeds_shared_memory_or_fails_is_dropped() -> None:
    problem = Gemm(4096, 4096, 4096)
    spilling = TileConfig(block_m=256, block_n=256, block_k=64, num_warps=4, num_stages=2)
    large = TileConfig(block_m=256, block_n=128, block_k=64, num_warps=8, num_stages=3)
    broken = TileConfig(block_m=24, block_n=32, block_k=32, num_warps=4, num_stages=2)

    def outcome(device: str, tile: TileConfig) -> str:
        profile = load_device(device)
        output = output_dtype(Dtype.BF16, Layout.NT)
        key = KernelKey.of(profile.arch, Dtype.BF16, problem, tile, output)
        found = compile_request(Request(key, int(profile.compute.lds_bytes.value)))
        assert (found.main is None) == bool(found.reason)
        return found.reason

    assert "spills" in outcome("mi300x", spilling)
    assert "shared memory" in outcome("mi300x", large) and not outcome("h200", large)
    assert "does not compile" in outcome("h200", broken)


def _damage(change: Callable[[Path], None], store: Path, folder: Path) -> Path:
    copy = shutil.copytree(store, folder / "damaged")
    change(copy)
    return copy


def _edit(**fields: Any) -> Callable[[Path], None]:
    def change(copy: Path) -> None:
        data = json.loads((copy / MANIFEST).read_text()) | fields
        (copy / MANIFEST).write_text(json.dumps(data))

    return change


def _flip(copy: Path) -> None:
    binary = next(copy.rglob("*.cubin"))
    content = bytearray(binary.read_bytes())
    content[100] ^= 1
    binary.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_edit(triton_version="1.0.0"), "another triton version"),
        (_edit(plan_digest=sha256("other")), "another plan digest"),
        (_edit(schema_version=2), "schema 1"),
        (_flip, "damaged"),
        (lambda copy: next(copy.rglob("*.hsaco")).unlink(), "cannot be read"),
        (lambda copy: (copy / MANIFEST).write_text("{"), "not valid JSON"),
        (lambda copy: (copy / MANIFEST).unlink(), "does not exist"),
    ],
)
def test_stores_that_are_refused(
    change: Callable[[Path], None], words: str, plan: Plan, store: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=words):
        KernelStore.open(_damage(change, store, tmp_path), plan)


def test_errors_before_anything_is_compiled(plan: Plan, store: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such pool") as caught:
        requests(plan, ["b200"])
    assert "mi350x, h200" in str(caught.value)
    (tmp_path / "mine").mkdir()
    with pytest.raises(SpecError, match="no kernel store"):
        compile_plan(plan, tmp_path / "mine")
    with pytest.raises(SpecError, match="does not exist or is not writable"):
        compile_plan(plan, tmp_path / "no" / "folder")
    bare = {name: pool.model_copy(update={"kernels": ()}) for name, pool in plan.pools.items()}
    with pytest.raises(UsageError, match="nothing to compile"):
        compile_plan(plan.model_copy(update={"pools": bare}), tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_progress_counts_every_kernel(plan: Plan) -> None:
    seen: list[tuple[int, int]] = []
    compile_all(requests(plan, ["h200"]), jobs=1, progress=lambda *done: seen.append(done))
    assert seen == [(1, 3), (2, 3), (3, 3)]
