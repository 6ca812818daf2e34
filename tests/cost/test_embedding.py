import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fit_embedding import device_seconds, measured_rows, measured_seconds
from planner.cost.embedding import option_pieces
from planner.cost.load import TIME_COMPONENTS, Scope
from planner.cost.tbe import Rates, Shard, backward_seconds, fetch_seconds, forward_seconds, rates
from planner.cost.zipf import expected_distinct
from planner.specs.errors import UsageError
from planner.specs.load import load_device, load_model
from planner.specs.model import ComputeKernel, ShardingType
from planner.specs.units import Dtype
from tests.cost.helpers import context, data_file

SPEED = Rates(
    table_s=1e-6,
    read_bytes_per_s=1e12,
    update_bytes_per_s=5e11,
    l2_bytes_per_s=1e13,
    cache_bytes=0.0,
    access_bytes=32,
    sort_s_per_id=1e-10,
    uvm_bytes_per_s=5e10,
    cache_lookup_s_per_id=1e-9,
)
SHARD = Shard(
    table_rows=10**9,
    table_draws=20_000,
    row_share=1.0,
    zipf_exponent=0.0,
    bags=2000,
    columns=100,
    element_bytes=2,
    state_floats_per_row=1,
)
HOST_FORWARD_S, HOST_BACKWARD_S = 2.4e-4, 6.4e-4
"""What the measuring loop's Python needs to launch one pass (benchmarks/fit_embedding.py)."""


def test_forward_by_hand() -> None:
    # A row of 200 bytes takes 7 sectors of 32; no cache, so each of 20,000 draws reads memory.
    bytes_moved = 8 * (20_000 + 2000) + 20_000 * 224 + 2000 * 100 * 4
    expected = 1e-6 + bytes_moved / 1e12
    assert forward_seconds(SHARD, SPEED, ComputeKernel.FUSED) == pytest.approx(expected)


def test_backward_by_hand() -> None:
    distinct = expected_distinct(10**9, 0.0, 20_000)
    bytes_moved = 2 * 8 * 20_000 + 2000 * 100 * 4 + 2 * distinct * (224 + 32)
    expected = 1e-6 + 20_000 * 1e-10 + bytes_moved / 5e11
    assert backward_seconds(SHARD, SPEED, ComputeKernel.FUSED) == pytest.approx(expected)


def test_uvm_reads_over_the_host_link() -> None:
    stream = (8 * 22_000 + 2000 * 400) / 1e12
    expected = 1e-6 + stream + 20_000 * 224 / 5e10
    assert forward_seconds(SHARD, SPEED, ComputeKernel.FUSED_UVM) == pytest.approx(expected)


def test_software_cache_moves_missed_rows_only() -> None:
    fused = forward_seconds(SHARD, SPEED, ComputeKernel.FUSED)
    cached = forward_seconds(SHARD, SPEED, ComputeKernel.FUSED_UVM_CACHING)
    missed = 0.75 * expected_distinct(10**9, 0.0, 20_000)
    assert cached - fused == pytest.approx(20_000 * 1e-9)
    assert fetch_seconds(SHARD, SPEED, 0.25) == pytest.approx(missed * 224 / 5e10, rel=1e-3)


def test_skew_saves_memory_reads_only_as_far_as_the_cache_reaches() -> None:
    skewed = Shard(10**7, 10**6, 1.0, 1.1, 10**5, 128, 4, 1)
    none = forward_seconds(skewed, SPEED, ComputeKernel.FUSED)
    some = forward_seconds(skewed, SPEED._replace(cache_bytes=1e6), ComputeKernel.FUSED)
    all_ = forward_seconds(skewed, SPEED._replace(cache_bytes=1e12), ComputeKernel.FUSED)
    assert all_ < 0.75 * some < 0.75 * none


@pytest.mark.parametrize("index", range(10))
def test_measured_h200_rows(index: int) -> None:
    """Within 20 % where the device decides, within 45 % where the launching host does."""
    data_file("embedding_tbe_h200.csv")
    row = measured_rows()[index]
    forward, backward = device_seconds(row, rates(load_device("h200"), 1.0))
    seen_forward = max(forward, HOST_FORWARD_S)
    predicted = np.array([seen_forward, seen_forward + max(backward, HOST_BACKWARD_S)])
    errors = np.abs(predicted / measured_seconds(row) - 1)
    assert errors[0] < (0.2 if forward > HOST_FORWARD_S else 0.46)
    assert errors[1] < (0.2 if backward > HOST_BACKWARD_S else 0.3)


def _option(ctx, sharding, kernel=ComputeKernel.FUSED, **rest):  # type: ignore[no-untyped-def]
    table = ctx.model.all_tables[0]
    return option_pieces(ctx, table, sharding, kernel, Dtype.FP32, **rest)


def test_table_wise_traffic_by_hand() -> None:
    ctx = context(local_batch=64, communication=Dtype.FP16)
    (piece,) = _option(ctx, ShardingType.TABLE_WISE)
    constants = ctx.device.scale_up.collectives.all_to_all
    link = 450e9 * constants.efficiency.value
    # Three ids and one length of 8 bytes per sample; 4 columns of 2 bytes; 7 peers.
    assert piece.scope is Scope.RANK
    assert piece.owner.input_receive_s == pytest.approx(7 * 64 * 8 * (3 + 1) / link)
    assert piece.owner.output_send_s == pytest.approx(7 * 64 * 4 * 2 / link)
    assert piece.everyone.output_receive_s == pytest.approx(64 * 4 * 2 / link)
    assert piece.everyone.gradient_send_s == piece.everyone.output_receive_s
    assert piece.owner.gradient_receive_s == piece.owner.output_send_s
    assert piece.owner.output_receive_s == 0


def test_row_wise_shares_the_look_ups() -> None:
    ctx = context(local_batch=4096, model=load_model("dlrm"))
    (whole,) = _option(ctx, ShardingType.TABLE_WISE)
    (part,) = _option(ctx, ShardingType.ROW_WISE)
    assert part.scope is Scope.POOL
    assert part.owner.lookup_backward_s < whole.owner.lookup_backward_s
    assert part.owner.hbm_bytes < whole.owner.hbm_bytes / 4
    # Every rank sends partial sums for the whole pool: as much as the owner of a whole table.
    assert part.owner.output_send_s == pytest.approx(whole.owner.output_send_s, rel=0.3)


def test_columns_split_the_work_and_repeat_the_ids() -> None:
    ctx = context(local_batch=4096, model=load_model("dlrm"))
    (whole,) = _option(ctx, ShardingType.TABLE_WISE)
    pieces = _option(ctx, ShardingType.COLUMN_WISE, column_widths=(96, 32))
    assert [piece.columns for piece in pieces] == [96, 32]
    sent = sum(piece.owner.output_send_s for piece in pieces)
    assert sent == pytest.approx(whole.owner.output_send_s)
    for piece in pieces:
        assert piece.owner.input_receive_s == pytest.approx(whole.owner.input_receive_s)


def test_node_wise_keeps_partial_sums_off_the_nic() -> None:
    ctx = context(nodes=4, local_batch=4096, model=load_model("dlrm"))
    (node,) = _option(ctx, ShardingType.TABLE_ROW_WISE)
    (pool,) = _option(ctx, ShardingType.ROW_WISE)
    grid = _option(ctx, ShardingType.GRID_SHARD, column_widths=(64, 64))
    assert node.scope is Scope.NODE and {piece.scope for piece in grid} == {Scope.NODE}
    assert (
        node.owner.input_receive_s < _option(ctx, ShardingType.TABLE_WISE)[0].owner.input_receive_s
    )
    sums = [sum(piece.owner.output_send_s for piece in grid), node.owner.output_send_s]
    assert sums[0] == pytest.approx(sums[1])
    assert pool.owner.output_send_s > 0


def test_data_parallel_all_reduces_the_whole_table() -> None:
    ctx = context(local_batch=64)
    (piece,) = _option(ctx, ShardingType.DATA_PARALLEL, ComputeKernel.DENSE)
    efficiency = ctx.device.scale_up.collectives.all_reduce.efficiency.value
    wire = 2 * 7 / 8 * 1000 * 4 * 4
    assert piece.owner.table_all_reduce_s == pytest.approx(wire / (450e9 * efficiency))
    assert piece.owner.output_send_s == piece.everyone.output_receive_s == 0


def test_a_cpu_counts_both_directions_on_its_core() -> None:
    gpu, cpu = context("h200", per_node=2), context("cpu", per_node=2)
    (on_gpu,) = _option(gpu, ShardingType.ROW_WISE)
    (on_cpu,) = _option(cpu, ShardingType.ROW_WISE)
    assert on_gpu.owner.output_send_s == on_gpu.owner.output_receive_s > 0
    assert on_cpu.owner.output_send_s == 0 < on_cpu.owner.output_receive_s


@pytest.mark.parametrize(
    ("sharding", "kernel", "rest"),
    [
        (ShardingType.DATA_PARALLEL, ComputeKernel.FUSED, {}),
        (ShardingType.TABLE_WISE, ComputeKernel.DENSE, {}),
        (ShardingType.TABLE_WISE, ComputeKernel.FUSED_UVM_CACHING, {}),
        (ShardingType.TABLE_WISE, ComputeKernel.FUSED, {"cache_load_factor": 0.2}),
        (ShardingType.TABLE_WISE, ComputeKernel.FUSED, {"column_widths": (2, 2)}),
        (ShardingType.COLUMN_WISE, ComputeKernel.FUSED, {"column_widths": (4, 4)}),
    ],
)
def test_what_cannot_run_is_refused(sharding, kernel, rest) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError) as caught:
        _option(context(), sharding, kernel, **rest)
    assert "To fix:" in str(caught.value)


def test_a_cpu_has_no_uvm() -> None:
    with pytest.raises(UsageError, match="CPU"):
        _option(context("cpu"), ShardingType.TABLE_WISE, ComputeKernel.FUSED_UVM)


@settings(max_examples=100, deadline=None)
@given(
    batch=st.integers(1, 20_000),
    more=st.integers(1, 20_000),
    device=st.sampled_from(["h200", "mi350x", "cpu"]),
    nodes=st.integers(1, 3),
    sharding=st.sampled_from(list(ShardingType)),
    table=st.integers(0, 1),
)
def test_more_samples_never_cost_less(
    batch: int, more: int, device: str, nodes: int, sharding: ShardingType, table: int
) -> None:
    dense = sharding is ShardingType.DATA_PARALLEL
    kernel = ComputeKernel.DENSE if dense else ComputeKernel.FUSED
    few, many = (context(device, nodes=nodes, local_batch=size) for size in (batch, batch + more))
    spec = few.model.all_tables[table]
    (small,) = option_pieces(few, spec, sharding, kernel, Dtype.FP32)
    (large,) = option_pieces(many, spec, sharding, kernel, Dtype.FP32)
    for name in (*TIME_COMPONENTS, "hbm_bytes"):
        for load in ("owner", "everyone"):
            low, high = (getattr(getattr(piece, load), name) for piece in (small, large))
            assert low <= high * (1 + 1e-9)
