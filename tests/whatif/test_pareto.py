from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.whatif.pareto import non_dominated

tables = st.integers(1, 4).flatmap(
    lambda criteria: st.lists(st.tuples(*[st.integers(0, 4).map(float)] * criteria), max_size=12)
)


@given(tables)
def test_front_equals_the_definition(costs: list[tuple[float, ...]]) -> None:
    def dominated(mine: tuple[float, ...]) -> bool:
        return any(
            max(a - b for a, b in zip(other, mine, strict=True)) <= 0 and other != mine
            for other in costs
        )

    assert non_dominated(costs) == [not dominated(mine) for mine in costs]


def test_a_worked_example() -> None:
    # Throughput 10, 10, 20, 5 on 4, 3, 8, 1 devices: the first needs more than the second.
    assert non_dominated([(-10, 4), (-10, 3), (-20, 8), (-5, 1)]) == [False, True, True, True]
    assert non_dominated([(1, 1), (1, 1)]) == [True, True]
    assert non_dominated([]) == []
