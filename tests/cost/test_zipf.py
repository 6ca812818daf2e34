import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.zipf import expected_distinct, top_mass


@pytest.mark.parametrize("rows", [1, 7, 64, 65, 1000, 100_000])
@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.3, 3.0])
def test_equals_the_sum_over_every_rank(rows: int, exponent: float) -> None:
    probability = np.arange(1.0, rows + 1) ** -exponent
    probability /= probability.sum()
    for draws in (1, 30, 5000, 1e6):
        exact = float(np.sum(1 - (1 - probability) ** draws))
        assert expected_distinct(rows, exponent, draws) == pytest.approx(exact, rel=0.005)
    for top in (1, rows // 3, rows):
        if top:
            exact = float(probability[:top].sum())
            assert top_mass(rows, exponent, top) == pytest.approx(exact, rel=0.02)


def test_equals_simulation() -> None:
    random = np.random.default_rng(0)
    probability = np.arange(1.0, 20_001) ** -1.05
    probability /= probability.sum()
    seen = [np.unique(random.choice(20_000, size=40_000, p=probability)).size for _ in range(20)]
    assert expected_distinct(20_000, 1.05, 40_000) == pytest.approx(np.mean(seen), rel=0.005)


def test_huge_tables_stay_finite_and_sensible() -> None:
    # 1e6 draws from 5e9 uniform rows practically never meet again: n^2 / 2R = 100 pairs do.
    assert expected_distinct(5 * 10**9, 0.0, 1e6) == pytest.approx(1e6 - 100, abs=2)
    assert 1e4 < expected_distinct(5 * 10**9, 1.1, 1e6) < 5e5


def test_cached_and_missed_rows_add_up() -> None:
    whole = expected_distinct(10_000, 1.1, 5000)
    missed = expected_distinct(10_000, 1.1, 5000, 1000)
    hot = 10_000 - 9_000
    assert 0 < missed < whole
    assert whole - missed <= hot


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 10**9),
    exponent=st.floats(0, 4),
    draws=st.floats(1, 1e8),
    more=st.floats(1, 10),
)
def test_more_draws_touch_more_rows(rows: int, exponent: float, draws: float, more: float) -> None:
    few = expected_distinct(rows, exponent, draws)
    many = expected_distinct(rows, exponent, draws * more)
    assert 0 < few <= many * (1 + 1e-12)
    assert many <= min(rows, draws * more) * (1 + 1e-9)
