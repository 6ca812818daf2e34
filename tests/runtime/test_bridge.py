"""The bridge over real gloo processes, and the pure layout of its rails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from planner.specs.plan import Plan
from runtime.bridge import HierarchicalBridge, build_groups, rail_leaders
from tests.runtime.plans import cluster_of, plan_for


def _plan(ranks: list[int], rails: int) -> Plan:
    pools = {f"p{index}": (count, [0]) for index, count in enumerate(ranks)}
    return plan_for(cluster_of(pools, rails), dict.fromkeys(pools, 8))


@pytest.mark.parametrize(
    ("ranks", "rails", "expected"),
    [
        ([2, 1], 4, [(0, 2)]),
        ([2, 2], 2, [(0, 2), (1, 3)]),
        ([1, 3], 1, [(0, 1)]),
        ([2, 3, 2], 8, [(0, 2, 5), (1, 3, 6)]),
        ([3], 2, []),
    ],
)
def test_rails_join_equal_ranks_of_all_pools(ranks, rails, expected):
    assert rail_leaders(_plan(ranks, rails)) == expected


def _inputs(rank: int) -> list[torch.Tensor]:
    """Whole numbers, so that the expected sum is exact whatever the order of additions."""
    generator = torch.Generator().manual_seed(rank)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-1000, 1000, shape, generator=generator).float()

    return [
        whole(7, 5),
        whole(1),  # shorter than the number of rails
        whole(6, 4).t(),  # not contiguous
        whole(33).double(),
        whole(9).long(),
        whole(0),
    ]


def _sum_on_rank(rank: int, ranks: list[int], rails: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=sum(ranks))
    bridge = HierarchicalBridge(build_groups(_plan(ranks, rails), rank))
    tensors = _inputs(rank)
    for tensor in tensors:
        bridge.all_reduce_sum(tensor)
    torch.save((tensors, bridge.traffic.calls, bridge.traffic.bytes), f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "rails"), [([2, 1], 1), ([2, 2], 2), ([1, 3], 1), ([2], 1), ([1], 1)]
)
def test_sum_is_exact_on_every_rank(ranks, rails, tmp_path: Path):
    mp.spawn(
        _sum_on_rank, (ranks, rails, str(tmp_path / "store"), str(tmp_path)), nprocs=sum(ranks)
    )
    parts = [_inputs(rank) for rank in range(sum(ranks))]
    expected = [torch.stack(column).sum(0) for column in zip(*parts, strict=True)]
    wire_bytes = 0
    for rank in range(sum(ranks)):
        tensors, calls, sent = torch.load(tmp_path / f"{rank}.pt")
        assert calls == len(expected)
        assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
        wire_bytes += sent
    # Two leaders in a ring send each byte once each.
    payload = sum(tensor.nbytes for tensor in expected)
    assert wire_bytes == (2 * payload if len(ranks) == 2 else 0)


def _rounded_on_rank(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    bridge = HierarchicalBridge(build_groups(_plan([2, 1], 1), rank), wire=torch.bfloat16)
    kept, rounded = torch.full((8,), 1.0 + 2**-12), torch.full((8,), 1.0 + 2**-12)
    bridge.all_reduce_sum(kept)
    exact_bytes = bridge.traffic.bytes
    bridge.all_reduce_sum(rounded, exact=False)
    whole = torch.ones(4, dtype=torch.int64)
    bridge.all_reduce_sum(whole)
    torch.save(
        (kept, rounded, exact_bytes, bridge.traffic.bytes, whole, bridge.measure()),
        f"{out}/{rank}.pt",
    )
    dist.destroy_process_group()


def test_a_narrow_wire_rounds_only_what_may_be_rounded(tmp_path: Path):
    mp.spawn(_rounded_on_rank, (str(tmp_path / "store"), str(tmp_path)), nprocs=3)
    for rank in range(3):
        kept, rounded, exact, both, whole, bandwidth = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(kept, torch.full((8,), 3 * (1.0 + 2**-12)))
        # Pools send 2 (1 + 2^-12) and 1 + 2^-12, which bf16 holds as 2 and 1.
        assert torch.equal(rounded, torch.full((8,), 3.0))
        assert torch.equal(whole, torch.full((4,), 3))
        leads = rank in (0, 2)
        assert (exact, both) == ((32, 32 + 16 + 32) if leads else (0, 0))
        assert (bandwidth is None) != leads and (bandwidth is None or bandwidth > 1e6)
