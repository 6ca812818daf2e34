import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.dense import dense_network, parameters
from planner.cost.dense_time import product_seconds
from planner.cost.elementwise import elementwise_seconds
from planner.cost.exchange import (
    bridge_seconds,
    dense_exchange_bytes,
    embedding_exchange_bytes,
)
from planner.cost.gemm import _fastest_seconds
from planner.cost.graph import (
    bucket_bytes,
    host_operators,
    host_seconds,
    pool_step_graph,
    sharding_copy_seconds,
)
from planner.cost.step import EXCHANGE_PREFIX
from planner.cost.zipf import expected_distinct
from planner.specs.load import load_device, load_model
from planner.specs.plan import KernelPolicy
from planner.specs.units import Dtype
from tests.cost.helpers import BRIDGE, context, small_model

LOADS = {
    "lookup_forward_s": 1e-3,
    "lookup_backward_s": 2e-3,
    "input_send_s": 1e-4,
    "input_receive_s": 2e-4,
    "output_send_s": 3e-4,
    "output_receive_s": 1e-4,
    "gradient_send_s": 1e-4,
    "gradient_receive_s": 3e-4,
    "table_all_reduce_s": 5e-5,
}


def test_exchange_bytes_by_hand() -> None:
    model = small_model()
    dense = 4 * parameters(dense_network(model).blocks)
    assert dense_exchange_bytes(model) == dense
    rows = expected_distinct(1000, 0.0, 2 * 64 * 3) + expected_distinct(50, 1.1, 2 * 64)
    assert embedding_exchange_bytes(model, 64, 2) == int(rows * 4 * (4 + 1))
    # The same rows come back: an exchange every second step moves less than two exchanges.
    assert embedding_exchange_bytes(model, 64, 2) < 2 * embedding_exchange_bytes(model, 64, 1)


def test_bridge_by_hand() -> None:
    ctx = context("h200", pools=2)
    link = 55e9 * ctx.device.host.link_efficiency.value
    # Two pools: two rounds of half of the buffer at 1 GB/s, staged out and in.
    expected = 2 * 1e8 / link + 2 * (1e-4 + 0.5e8 / 1e9)
    assert bridge_seconds(ctx, 1e8) == pytest.approx(expected)
    assert bridge_seconds(context("h200"), 1e8) == 0
    assert BRIDGE.bytes_per_s == 1e9


def test_dependencies_and_overlap_on_a_gpu() -> None:
    graph = pool_step_graph(context(local_batch=4096))
    spans = graph.schedule(LOADS)
    order = ["embedding_forward", "output_exchange", "top_forward", "loss", "top_backward"]
    order += ["gradient_exchange", "embedding_backward", "dense_optimizer"]
    for before, after in pairwise(order):
        assert spans[before].end_s <= spans[after].start_s + 1e-15
    # The next batch's ids travel while this batch is looked up; the bottom MLP overlaps too.
    assert spans["input_exchange"].start_s == spans["embedding_forward"].start_s == 0
    assert spans["bottom_forward"].start_s < spans["output_exchange"].end_s
    assert graph.step_s(LOADS) >= host_seconds(context(local_batch=4096))


def test_a_cpu_does_one_thing_at_a_time() -> None:
    ctx = context("cpu", per_node=3)
    graph = pool_step_graph(ctx)
    assert {operation.stream for operation in graph.operations} == {"compute"}
    total = sum(operation.duration(LOADS) for operation in graph.operations)
    assert graph.step_s(LOADS) == pytest.approx(total)


def test_sharing_a_core_divides_it() -> None:
    alone, shared = context("cpu", per_node=1), context("cpu", per_node=3)
    for name in ("bottom_forward", "top_backward", "dense_optimizer", "loss"):
        durations = [
            next(item for item in pool_step_graph(ctx).operations if item.name == name).seconds
            for ctx in (alone, shared)
        ]
        assert durations[1] == pytest.approx(3 * durations[0])


def test_a_cpu_worker_reads_its_ids_and_pays_for_sharding() -> None:
    framework = load_device("cpu").framework
    assert framework.id_s is not None and framework.sharded_s is not None
    per_step = framework.step_s.value + host_operators(small_model()) * framework.op_s.value
    ids = 64 * (3 + 1) * framework.id_s.value
    assert host_seconds(context("cpu", per_node=1)) == pytest.approx(per_step + ids)
    shared = 3 * (per_step + ids + framework.sharded_s.value)
    assert host_seconds(context("cpu", per_node=3)) == pytest.approx(shared)
    # 64 x 8 pooled floats are read and written twice forward, four times backward.
    pooled = context("cpu", per_node=3)
    one = elementwise_seconds(pooled.device, 2 * 64 * 8 * 4)
    assert sharding_copy_seconds(pooled) == pytest.approx((3 * 2 * one, 3 * 4 * one))
    assert sharding_copy_seconds(context("cpu", per_node=1)) == (0.0, 0.0)
    assert sharding_copy_seconds(context("h200")) == (0.0, 0.0)


def test_small_gradients_leave_together() -> None:
    model = small_model()
    assert bucket_bytes(model) == (0, dense_exchange_bytes(model))
    large = load_model("dlrm")
    assert sum(bucket_bytes(large)) == dense_exchange_bytes(large)
    assert min(bucket_bytes(large)) > 0


def test_pools_of_a_job_share_the_names_of_their_bridge_operations() -> None:
    names = [
        [
            operation.name
            for operation in pool_step_graph(context(device, pools=2)).operations
            if operation.name.startswith(EXCHANGE_PREFIX)
        ]
        for device in ("h200", "cpu")
    ]
    assert names[0] == names[1] and {"bridge:dense", "bridge:embedding"} <= set(names[0])
    single = pool_step_graph(context()).operations
    assert not any(operation.name.startswith(EXCHANGE_PREFIX) for operation in single)


@pytest.mark.parametrize("kernels", ["vendor", "preselected"])
def test_a_whole_model_takes_milliseconds(kernels: KernelPolicy) -> None:
    ctx = context(model=load_model("dlrm"), local_batch=6912, precision=Dtype.BF16)
    ctx = ctx.with_kernels(kernels)
    pool_step_graph(ctx)
    _fastest_seconds.cache_clear()
    product_seconds.cache_clear()
    start = time.thread_time()
    pool_step_graph(ctx)
    assert time.thread_time() - start < 0.02


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 10_000),
    more=st.integers(1, 10_000),
    device=st.sampled_from(["h200", "b200", "mi350x", "cpu"]),
    name=st.sampled_from(["dlrm", "deepfm_criteo", "de_medium", "wukong_criteo"]),
    recompute=st.sampled_from([(), ("top",), ("bottom", "top")]),
    kernels=st.sampled_from(["vendor", "preselected"]),
)
def test_more_samples_never_take_less_time(
    batch: int, more: int, device: str, name: str, recompute: tuple[str, ...], kernels: KernelPolicy
) -> None:
    model = load_model(name)
    few, many = (
        pool_step_graph(
            context(
                device, model=model, local_batch=size, recompute=recompute, pools=2
            ).with_kernels(kernels)
        )
        for size in (batch, batch + more)
    )
    for small, large in zip(few.operations, many.operations, strict=True):
        assert small.seconds <= large.seconds * (1 + 1e-9), small.name
