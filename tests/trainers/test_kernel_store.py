"""Kernels compiled without a GPU: what is kept, what is dropped, and what a store refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from planner.search import SearchOptions, plan_job
from planner.specs.base import sha256
from planner.specs.cluster import BridgeSpec, ClusterSpec, PoolSpec
from planner.specs.errors import RunError, SpecError, UsageError
from planner.specs.kernels import Backend, Gemm, Layout, PlannedGemm, RankedKernel, TileConfig
from planner.specs.load import load_device, load_model
from planner.specs.plan import Plan, load_plan, save_plan
from planner.specs.units import Dtype
from trainers.kernels import build
from trainers.kernels import prepare as prepare_module
from trainers.kernels.build import Compiled, KernelKey, output_dtype
from trainers.kernels.linear import KernelTable
from trainers.kernels.offline import (
    Request,
    compile_all,
    compile_plan,
    compile_request,
    pool_keys,
    requests,
    summarise,
)
from trainers.kernels.store import MANIFEST, KernelName, KernelStore, Manifest
from trainers.kernels.usage import usage_of

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


def test_a_kernel_that_was_never_compiled_is_an_error(plan: Plan, tmp_path: Path) -> None:
    """A worker on other GPUs than planned must not fall back to the vendor's library unsaid."""
    compile_plan(plan, tmp_path / "half", pools=["h200"], jobs=1)
    opened = KernelStore.open(tmp_path / "half", plan)
    amd, nvidia = requests(plan, ["mi350x"])[0].key, requests(plan, ["h200"])[0].key
    with pytest.raises(RunError, match=r"for sm_90 only.*gfx950"):
        opened.find(amd)
    with pytest.raises(RunError, match="lacks a kernel of the plan"):
        opened.find(replace(nvidia, dtype=Dtype.FP16))


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

    # All 512 of CDNA's registers, and more.
    assert re.fullmatch(r"spills \d+ \(registers 512\)", outcome("mi300x", spilling))
    assert "shared memory" in outcome("mi300x", large) and not outcome("h200", large)
    assert "does not compile" in outcome("h200", broken)


def test_a_dropped_kernel_gives_way_to_the_next_candidate(plan: Plan, tmp_path: Path) -> None:
    spilling = TileConfig(
        block_m=256, block_n=256, block_k=64, num_warps=8, num_stages=2, matrix_instr_nonkdim=16
    )
    products = (
        planned(Layout.NT, 4096, 4096, 4096, spilling, SMALL),
        planned(Layout.NT, 2048, 4096, 4096, spilling),
        planned(Layout.NT, 64, 16, 13, SMALL),
    )
    pool = plan.pools["mi350x"].model_copy(update={"kernels": products})
    amd_only = plan.model_copy(update={"pools": {"mi350x": pool}})
    manifest = compile_plan(amd_only, tmp_path / "kernels", jobs=1)
    assert [item.reason.split()[0] for item in manifest.dropped] == ["spills"]
    (found,) = summarise(amd_only, manifest)
    assert (found.pool, found.arch, found.products) == ("mi350x", "gfx950", 3)
    assert (found.next_instead, found.vendor_instead) == (1, 1)
    assert (found.compiled, found.dropped) == (2, 1)
    table = KernelTable(products, Dtype.BF16, "gfx950", _find_in(manifest))
    assert [table.product(item.gemm) is not None for item in products] == [True, False, True]
    opened = KernelStore.open(tmp_path / "kernels", amd_only)
    assert opened.find(pool_keys(pool, "gfx950")[0]) is None


def _find_in(manifest: Manifest) -> Callable[[KernelKey], Compiled | None]:
    """Of a store, without loading: that takes a GPU."""
    made = {item.name for item in manifest.kernels}
    launchers: Any = defaultdict(object)
    return lambda key: Compiled(launchers, None) if KernelName.of(key) in made else None


def test_amd_registers_are_those_of_one_file() -> None:
    """512 at most, accumulation registers included."""
    tile = TileConfig(block_m=256, block_n=256, block_k=64, num_warps=4, num_stages=2)
    key = KernelKey.of("gfx950", Dtype.BF16, Gemm(4096, 4096, 4096), tile, Dtype.BF16)
    assert 256 < usage_of(build.compiled(key).main).registers <= 512


def test_ranks_share_the_compiling_before_the_first_step(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[KernelKey] = []
    monkeypatch.setattr(
        prepare_module, "compile_here", lambda key: tried.append(key) or Compiled(None, None)
    )
    pool = plan.pools["h200"].model_copy(update={"ranks": 2})
    first_choices = [key for key in pool_keys(pool, "sm_90") if key.tile in (SMALL, SPLIT)][:2]
    for rank, order in ((0, first_choices), (1, first_choices[::-1])):
        tried.clear()
        assert prepare_module.prepare(pool, "sm_90", rank) == 2
        assert tried == order


def test_an_older_store_is_replaced_and_nothing_is_left_beside_it(
    plan: Plan, store: Path, tmp_path: Path
) -> None:
    target = shutil.copytree(store, tmp_path / "kernels")
    (target / "old").write_text("")
    compile_plan(plan, target, pools=["h200"], jobs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["kernels"]
    assert sorted(path.name for path in target.iterdir()) == ["manifest.json", "sm_90"]


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
