from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from planner.specs.cluster import BridgeSpec, ClusterSpec, PoolSpec
from planner.specs.errors import UsageError
from planner.specs.load import DEVICES
from planner.whatif.size import batches_of
from planner.whatif.vary import Axis, parse_axes, parse_axis, parse_max_nodes, points, with_nodes

MIXED = ClusterSpec(
    name="mixed",
    pools=(
        PoolSpec(
            name="amd",
            device="mi350x",
            nodes=4,
            devices_per_node=8,
            min_nodes=2,
            dollars_per_device_hour=3.0,
        ),
        PoolSpec(
            name="nvidia",
            device="b200",
            nodes=2,
            devices_per_node=8,
            dollars_per_device_hour=6.0,
            watts_per_device=900.0,
        ),
    ),
    bridge=BridgeSpec(gbps=40.0, latency_us=50.0),
)
ALONE = MIXED.model_copy(update={"pools": MIXED.pools[:1], "bridge": None})
TWINS = MIXED.model_copy(
    update={"pools": (*MIXED.pools, MIXED.pools[0].model_copy(update={"name": "more"}))}
)


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("nodes:amd=1..4", "nodes:amd", (1, 2, 3, 4)),
        ("nodes:mi350x=1,2,4", "nodes:amd", (1, 2, 4)),
        ("nodes:amd=0..2,8,2", "nodes:amd", (0, 1, 2, 8)),
        ("global_batch=8192,16384", "global_batch", (8192, 16384)),
        ("nic_gbps:nvidia=200,4e2", "nic_gbps:nvidia", (200.0, 400.0)),
        ("bridge_gbps=9.7", "bridge_gbps", (9.7,)),
        ("device:amd=h200, b200", "device:amd", ("h200", "b200")),
    ],
)
def test_axes_are_read(text: str, name: str, values: tuple[object, ...]) -> None:
    axis = parse_axis(text, MIXED)
    assert (axis.name, axis.values) == (name, values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["unknown axis", "nodes:POOL=1..8"]),
        ("node:amd=1", ["unknown axis"]),
        ("nodes=1..8", ["nodes:POOL=1..8"]),
        ("nodes:=1..8", ["nodes:POOL=1..8"]),
        ("nodes:amd", ["nodes:POOL=1..8"]),
        ("nodes:amd=", ["nodes:POOL=1..8"]),
        ("global_batch:amd=8192", ["global_batch=8192"]),
        ("global_batch:=8192", ["global_batch=8192"]),
        ("nodes:tpu=1", ["no pool 'tpu'", "amd (mi350x), nvidia (b200)"]),
        ("nodes:amd=8..1", ["'8..1'", "1..8"]),
        ("nodes:amd=1..", ["'1..'"]),
        ("nodes:amd=1,,2", ["''"]),
        ("nodes:amd=-1", ["'-1'"]),
        ("nodes:amd=1.5", ["'1.5'"]),
        ("nodes:amd=٣", ["'٣'"]),
        ("nodes:amd=1..999999999", ["not between 0 and 100,000"]),
        ("nodes:amd=1..99999", ["more than 10,000 values"]),
        ("global_batch=1..10000,20000", ["more than 10,000 values"]),
        ("global_batch=0", ["not between 1 and"]),
        ("nic_gbps:amd=0", ["above 0"]),
        ("nic_gbps:amd=nan", ["finite"]),
        ("bridge_gbps=fast", ["'fast'"]),
        ("device:amd=h300", ["unknown device", "h200"]),
        ("device:amd=no/such.yaml", ["unknown device", "no/such.yaml", "does not exist"]),
        ("device:amd=h200,", ["empty device"]),
        ("device:amd=cpu", ["cannot turn from mi350x into cpu"]),
    ],
)
def test_bad_axes_name_themselves(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_axis(text, MIXED)
    shown = str(caught.value)
    assert f"--vary {text}" in shown and "To fix: " in shown
    assert any(word in shown for word in words), shown


def test_an_axis_that_the_cluster_cannot_have() -> None:
    with pytest.raises(UsageError, match="no bridge"):
        parse_axis("bridge_gbps=40", ALONE)
    with pytest.raises(UsageError, match=r"several pools have device mi350x.*\n.*name the pool"):
        parse_axis("nodes:mi350x=1", TWINS)
    assert parse_axis("nodes:more=1", TWINS).pool == "more"
    with pytest.raises(UsageError, match="nodes:amd is given twice"):
        parse_axes(["nodes:amd=1", "nodes:mi350x=2"], MIXED)


def test_points_are_the_product_last_axis_fastest() -> None:
    axes = parse_axes(["nodes:amd=1,3", "global_batch=64,128"], MIXED)
    every = points(MIXED, 7, axes, most=4)
    assert [tuple(point.settings.values()) for point in every] == [
        (1, 64), (1, 128), (3, 64), (3, 128),
    ]  # fmt: skip
    assert [point.global_batch for point in every] == [64, 128, 64, 128]
    assert every[2].nodes == (3, 2) and every[2].devices == 40
    assert points(MIXED, 7, (), most=1)[0].global_batch == 7


def test_too_many_points_are_refused_with_their_number() -> None:
    axes = parse_axes(["nodes:amd=1..10", "global_batch=1..100"], MIXED)
    with pytest.raises(UsageError, match=r"1,000 points: 10 \(nodes:amd\) x 100 \(global_batch\)"):
        points(MIXED, 7, axes, most=999)


def test_every_axis_reaches_the_cluster() -> None:
    axes = parse_axes(
        ["nodes:amd=1", "nic_gbps:amd=200", "bridge_gbps=100", "device:nvidia=h200"], MIXED
    )
    (point,) = points(MIXED, 64, axes, most=1)
    cluster = point.cluster
    assert cluster is not None and cluster.bridge is not None
    amd, nvidia = cluster.pools
    assert (amd.nodes, amd.min_nodes, amd.nic_gbps_per_device) == (1, 1, 200.0)
    assert cluster.bridge.gbps == 100.0 and cluster.bridge.latency_us == 50.0
    assert (nvidia.device, nvidia.nic_gbps_per_device) == ("h200", None)
    assert ClusterSpec.model_validate(cluster.model_dump()) == cluster


def test_a_swapped_device_takes_price_and_power_from_the_cluster_file() -> None:
    axes = parse_axes(["device:amd=mi350x,b200,h200"], MIXED)
    pools = [point.frame.pools[0] for point in points(MIXED, 64, axes, most=3)]
    assert [pool.dollars_per_device_hour for pool in pools] == [3.0, 6.0, None]
    assert [pool.watts_per_device for pool in pools] == [None, 900.0, None]


def test_a_device_may_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(DEVICES / "h200.yaml", tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    assert parse_axis("device:amd=mine.yaml", MIXED).values == (str(tmp_path / "mine.yaml"),)


def test_pools_without_nodes_are_left_out() -> None:
    cluster = with_nodes(MIXED, (0, 2))
    assert cluster is not None and [pool.name for pool in cluster.pools] == ["nvidia"]
    assert with_nodes(MIXED, (0, 0)) is None


def test_max_nodes_and_batches() -> None:
    assert parse_max_nodes((), MIXED) == {}
    assert parse_max_nodes(["8", "b200=3"], MIXED) == {"amd": 8, "nvidia": 3}
    for text, words in {"0": "not a number", "amd=x": "not a number", "tpu=1": "no pool"}.items():
        with pytest.raises(UsageError, match=words) as caught:
            parse_max_nodes([text], MIXED)
        assert f"--max-nodes {text}" in str(caught.value)
    assert batches_of(["global_batch=64,128"], MIXED) == (64, 128)
    with pytest.raises(UsageError, match="only the global batch may vary"):
        batches_of(["nodes:amd=1"], MIXED)


def test_axis_names() -> None:
    assert Axis("nodes", "amd", (1,)).name == "nodes:amd"
    assert Axis("global_batch", None, (1,)).name == "global_batch"
