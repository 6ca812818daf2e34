import csv

import numpy as np
import pytest

from planner.cost.collectives import collective_seconds, fabric
from planner.specs.load import load_device
from tests.cost.helpers import context, data_file

TABLES = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
}
OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_to_all": "alltoall",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
}


def test_one_rank_needs_no_collective() -> None:
    assert collective_seconds(context(per_node=1), "all_reduce", 1e9) == 0.0


def test_all_reduce_by_hand() -> None:
    ctx = context("h200", per_node=8)
    constants = ctx.device.scale_up.collectives.all_reduce
    expected = (
        constants.latency_s.value
        + 7 * constants.per_rank_latency_s.value
        + 2 * 7 / 8 * 1e8 / (450e9 * constants.efficiency.value)
    )
    assert collective_seconds(ctx, "all_reduce", 1e8) == pytest.approx(expected)


def test_a_mesh_gives_a_subgroup_its_share_of_the_links() -> None:
    # Published for MI300X: all-reduce bus bandwidth 313 GB/s on 8 GPUs, 48 GB/s on 2.
    size = 16e9
    for ranks, published in ((8, 313e9), (2, 48e9)):
        seconds = collective_seconds(context("mi300x", per_node=ranks), "all_reduce", size)
        bus = 2 * (ranks - 1) / ranks * size / seconds
        assert bus == pytest.approx(published, rel=0.1)


def test_a_switch_does_not() -> None:
    four = fabric(context("h200", per_node=4), "all_reduce").link_bytes_per_s
    assert four == fabric(context("h200", per_node=8), "all_reduce").link_bytes_per_s


def test_the_nic_bounds_exchanges_between_nodes() -> None:
    ctx = context("h200", nodes=2)
    size = 1e9
    remote = size * 8 / 16
    network = ctx.device.network
    nic = 50e9 * network.efficiency.value
    seconds = collective_seconds(ctx, "all_to_all", size)
    assert seconds == pytest.approx(remote / nic, rel=0.05)
    assert seconds > 3 * collective_seconds(context("h200"), "all_to_all", size)


def test_hierarchical_all_reduce_by_hand() -> None:
    ctx = context("b200", nodes=4)
    constants, network = ctx.device.scale_up.collectives.all_reduce, ctx.device.network
    nic = 50e9 * network.efficiency.value
    size = 1e9
    expected = (
        constants.latency_s.value
        + 7 * constants.per_rank_latency_s.value
        + 2 * network.latency_s.value  # log2(4) rounds
        + network.half_bytes.value / nic
        + 2 * 7 / 8 * size / (900e9 * constants.efficiency.value)
        + 2 * 3 / 4 * (size / 8) / nic
    )
    assert collective_seconds(ctx, "all_reduce", size) == pytest.approx(expected)


def test_cpu_workers_that_share_a_core_copy_slower() -> None:
    shared = context("cpu", per_node=3)
    assert shared.compute_share == pytest.approx(1 / 3)
    alone = load_device("cpu").scale_up.collectives.all_reduce
    expected = 3 * (
        alone.latency_s.value
        + 2 * alone.per_rank_latency_s.value
        + 2 * 2 / 3 * 1e6 / (shared.device.scale_up.bytes_per_s.value * alone.efficiency.value)
    )
    assert collective_seconds(shared, "all_reduce", 1e6) == pytest.approx(expected)


@pytest.mark.parametrize("device", TABLES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_shipped_constants_predict_nccl(device: str, operation: str) -> None:
    with data_file("collectives/nccl_busbw_measured.csv").open() as stream:
        rows = [
            (int(row["gpus"]), float(row["bytes"]), float(row["latency_us"]) * 1e-6)
            for row in csv.DictReader(stream)
            if row["device"] == TABLES[device] and row["op"] == OPERATIONS[operation]
        ]
    assert len(rows) >= 40
    errors = [
        abs(collective_seconds(context(device, per_node=gpus), operation, size) / seconds - 1)
        for gpus, size, seconds in rows
        if size >= 4096
    ]
    assert np.mean(errors) < 0.2
