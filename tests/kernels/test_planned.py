"""The plan's list of kernels: complete, ranked, counted, and the same every time."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from planner.cost.context import PoolContext
from planner.cost.dense import Linear, Product, dense_network
from planner.cost.dense_time import product_seconds
from planner.kernels.planned import TOP_K, planned_kernels
from planner.search import SearchOptions, plan_job
from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.kernels import Backend, Gemm, Layout
from planner.specs.load import load_device, load_model
from planner.specs.plan import MemoryPolicy, Plan, load_plan, plan_json, save_plan
from planner.specs.units import Dtype

BATCH = 1024


def pool(device: str, devices: int = 8) -> PoolSpec:
    cores = (0,) if load_device(device).is_cpu else None
    return PoolSpec(name="p", device=device, nodes=1, devices_per_node=devices, cpu_cores=cores)


def context(model: str, recompute: tuple[str, ...] = ()) -> PoolContext:
    policy = MemoryPolicy(
        compute_precision=Dtype.BF16,
        recompute=recompute,
        kernels="preselected",
    )
    return PoolContext(pool("h200"), load_device("h200"), load_model(model), BATCH, policy)


def layers(model: str, recompute: tuple[str, ...]) -> Counter[Gemm]:
    """One after another, from the layers' sizes."""
    found: Counter[Gemm] = Counter()
    for block in dense_network(load_model(model)).blocks:
        again = 2 if block.name in recompute else 1
        for item in block.products:
            if isinstance(item, Linear):
                rows = BATCH * item.rows
                found[Gemm(rows, item.outputs, item.inputs, 1, Layout.NT, item.epilogue)] += again
                found[Gemm(item.outputs, item.inputs, rows, 1, Layout.TN)] += 1
                if item.input_gradient:
                    found[Gemm(rows, item.inputs, item.outputs, 1, Layout.NN)] += 1
            else:
                assert isinstance(item, Product)
                first = Layout.NT if item.with_itself else Layout.NN
                found[Gemm(item.m, item.n, item.k, BATCH, first)] += 1
                second = Layout.NN if item.with_itself else Layout.NT
                found[Gemm(item.m, item.k, item.n, BATCH, second)] += 1
                if not item.with_itself:
                    found[Gemm(item.k, item.n, item.m, BATCH, Layout.TN)] += 1
    return found


@pytest.mark.parametrize("model", ["dlrm", "dlrm_kaggle", "deepfm_criteo", "wukong_criteo"])
@pytest.mark.parametrize("recompute", [(), ("top",), ("bottom", "top")])
def test_every_product_in_every_precision_and_no_other(
    model: str, recompute: tuple[str, ...]
) -> None:
    precisions = (Dtype.BF16, Dtype.TF32)
    items = planned_kernels(context(model, recompute), precisions)
    assert Counter(item.dtype for item in items) == dict.fromkeys(precisions, len(items) / 2)
    for precision in precisions:
        counts = {item.gemm: item.count for item in items if item.dtype is precision}
        assert counts == layers(model, recompute)


def test_candidates_are_ranked_and_the_vendor_is_among_them() -> None:
    ctx = context("dlrm_kaggle")
    margin = ctx.device.triton.margin.value if ctx.device.triton else 0.0
    items = planned_kernels(ctx, (Dtype.BF16,))
    own = 0
    for item in items:
        vendors = [c for c in item.candidates if c.backend is Backend.VENDOR]
        tiles = [c for c in item.candidates if c.backend is Backend.TRITON]
        assert len(vendors) == 1 and vendors[0].tile is None
        assert all(c.tile is not None for c in tiles)
        assert [c.predicted_us for c in tiles] == sorted(c.predicted_us for c in tiles)
        if item.batch > 1:
            assert not tiles
            continue
        assert len(item.candidates) == TOP_K
        chosen = item.candidates[0]
        own += chosen.backend is Backend.TRITON
        fastest_us = tiles[0].predicted_us * (1 + margin)
        assert (chosen.backend is Backend.TRITON) == (fastest_us < vendors[0].predicted_us)
    assert 0 < own < len(items), "both backends have products of their own here"


def test_the_list_and_the_step_model_say_the_same() -> None:
    ctx = context("dlrm")
    assert ctx.device.triton is not None
    network = dense_network(ctx.model)
    step = product_seconds(ctx.device, Dtype.BF16, "preselected", network, BATCH)
    for item in planned_kernels(ctx, (Dtype.BF16,)):
        chosen = item.candidates[0]
        margin = ctx.device.triton.margin.value if chosen.tile else 0.0
        assert step[item.gemm] == pytest.approx(chosen.predicted_us * (1 + margin) / 1e6, rel=1e-9)


def test_vendor_policy_lists_nothing() -> None:
    assert planned_kernels(context("dlrm").with_kernels("vendor"), (Dtype.BF16,)) == ()


@pytest.fixture(scope="module")
def cluster() -> ClusterSpec:
    return ClusterSpec(name="one", pools=(pool("h200", 2),), reference_device="h200")


@pytest.fixture(scope="module")
def plan(cluster: ClusterSpec) -> Plan:
    return plan_job(cluster, load_model("dlrm_kaggle"), 2 * BATCH)


def test_a_plan_names_kernels_for_every_allowed_precision(plan: Plan) -> None:
    planned = plan.pools["p"]
    allowed = [
        dtype
        for dtype in plan.model.precision.compute
        if dtype in load_device("h200").compute.peak_flops_per_s
    ]
    assert planned.policy.kernels == "preselected"
    assert list(dict.fromkeys(item.dtype for item in planned.kernels)) == allowed
    assert {item.dtype for item in planned.own_kernels} == {planned.policy.compute_precision}
    assert all(item.candidates[0].tile is not None for item in planned.own_kernels)


def test_equal_inputs_give_equal_kernels_and_they_survive_the_file(
    plan: Plan, cluster: ClusterSpec, tmp_path_factory: pytest.TempPathFactory
) -> None:
    again = plan_job(cluster, load_model("dlrm_kaggle"), 2 * BATCH)
    assert json.dumps(plan_json(again)) == json.dumps(plan_json(plan))
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    save_plan(plan, path)
    kept = load_plan(path).pools["p"].kernels
    assert [(k.gemm, k.dtype, k.count) for k in kept] == [
        (k.gemm, k.dtype, k.count) for k in plan.pools["p"].kernels
    ]
    assert [[c.tile for c in k.candidates] for k in kept] == [
        [c.tile for c in k.candidates] for k in plan.pools["p"].kernels
    ]


def test_without_preselection_a_plan_is_no_faster(plan: Plan, cluster: ClusterSpec) -> None:
    vendor = plan_job(
        cluster, load_model("dlrm_kaggle"), 2 * BATCH, SearchOptions(kernels="vendor")
    )
    assert vendor.pools["p"].kernels == () and vendor.pools["p"].policy.kernels == "vendor"
    assert plan.predicted.step_ms <= vendor.predicted.step_ms * (1 + SearchOptions().mip_gap)


def test_cpu_pools_keep_the_vendor_kernels() -> None:
    cluster = ClusterSpec(name="cpus", pools=(pool("cpu", 1),), reference_device="cpu")
    plan = plan_job(cluster, load_model("dlrm_criteo_small"), 64)
    assert plan.pools["p"].policy.kernels == "vendor" and plan.pools["p"].kernels == ()


def test_larger_sizes_than_the_kernels_take_go_to_the_vendor() -> None:
    ctx = replace(context("dlrm_kaggle"), local_batch=2**33)
    network = dense_network(ctx.model)
    own, vendor = (
        product_seconds(ctx.device, Dtype.BF16, kernels, network, ctx.local_batch)
        for kernels in ("preselected", "vendor")
    )
    assert own == vendor
