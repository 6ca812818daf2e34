from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.splits import SplitSpace, equal_split

ranks = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)
repeatable = settings(derandomize=True, deadline=None)


@repeatable
@given(ranks, st.integers(1, 120))
def test_root_box_is_the_hull_of_all_splits(pools: tuple[int, ...], batch: int) -> None:
    space = SplitSpace(pools, batch)
    splits = list(space.all())
    assert (space.root is None) == (not splits)
    for split in splits:
        assert sum(n * b for n, b in zip(pools, split, strict=True)) == batch
        assert space.root is not None
        assert all(low <= b <= high for b, (low, high) in zip(split, space.root, strict=True))


@repeatable
@given(ranks, st.integers(1, 120), st.data())
def test_nearest_finds_a_split_of_the_box(
    pools: tuple[int, ...], batch: int, data: st.DataObject
) -> None:
    space = SplitSpace(pools, batch)
    bounds = [sorted(data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))) for _ in pools]
    box = tuple((low, high) for low, high in bounds)
    inside = [
        split
        for split in space.all()
        if all(low <= b <= high for b, (low, high) in zip(split, box, strict=True))
    ]
    target = [data.draw(st.floats(0, 40)) for _ in pools]
    assert (space.nearest(box, target) in inside) if inside else not space.nearest(box, target)
    assert (space.tighten(box) is None) == (not inside)


def test_nearest_batches_around_one_that_no_split_reaches() -> None:
    space = SplitSpace((4, 6), 21)
    assert space.root is None
    assert space.nearest_batches() == (20, 22)


def test_nothing_below_the_smallest_batch() -> None:
    assert SplitSpace((8,), 5).nearest_batches() == (None, 8)


def test_equal_split_is_equal_where_the_batch_divides() -> None:
    assert equal_split({"a": 32, "b": 16}, 48 * 1024) == {"a": 1024, "b": 1024}


def test_equal_split_keeps_the_sum_where_it_does_not() -> None:
    # 65536 / 48 = 1365.3: the larger pool takes the nearest that leaves the other a whole number.
    split = equal_split({"a": 32, "b": 16}, 65536)
    assert split == {"a": 1365, "b": 1366}


def test_equal_split_of_an_unreachable_batch() -> None:
    assert equal_split({"a": 4, "b": 6}, 21) is None


def test_a_batch_that_no_split_reaches_is_refused_whatever_its_size() -> None:
    assert SplitSpace((32, 16), 65_537).root is None
    assert SplitSpace((32, 16), 65_537).nearest_batches() == (65_536, 65_552)


def test_residues_that_differ_shrink_the_box_step_by_step() -> None:
    space = SplitSpace((32, 16, 24), 65_536)
    assert space.root is not None
    found = space.nearest(space.root, [900.0, 900.0, 900.0])
    assert (
        found is not None and sum(n * b for n, b in zip((32, 16, 24), found, strict=True)) == 65_536
    )
