"""The search against every plan there is: nodes, splits, groups, intervals, policies, tables."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings

from planner.search import Search, SearchOptions
from planner.specs.errors import InfeasibleError
from planner.specs.load import standing_in
from tests.planner.small_jobs import Job, single_pool, two_pools
from tests.planner.whole_space import Best, shortest

EQUAL = 1e-9
NUMBERS = count()
OPTIONS = SearchOptions(mip_gap=0.0, kernels="vendor", cures=False)
each = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def found(job: Job, options: SearchOptions) -> tuple[float, float]:
    """Step and bound of the search, before ties are settled and the interval is shortened; both
    infinite where it finds nothing."""
    search = Search(job.cluster, job.model, options, time.monotonic() + options.time_limit_s)
    try:
        bound_s = search.run()
        search.offer_naive()
        search.spare_devices(bound_s)
        search.take_any()
    except InfeasibleError:
        return float("inf"), float("inf")
    return (search.best.step_s if search.best else float("inf")), bound_s


def enumerated(job: Job) -> Best:
    """The best of all plans, which is checked to be one."""
    best = shortest(job.cluster, job.model)
    if best.ways is not None:
        evaluation = best.evaluation()
        assert evaluation.step_s == pytest.approx(best.step_s, rel=1e-12)
        assert not evaluation.overfull
    return best


def check(job: Job) -> None:
    """The search's step is the least of all, its bound none too large, and it finds nothing only
    where there is nothing."""
    # Models are looked up by their costs' caches: quickly if no other one is like it.
    job = replace(job, model=job.model.model_copy(update={"name": f"job_{next(NUMBERS)}"}))
    with standing_in(job.profiles):
        best = enumerated(job)
        step_s, bound_s = found(job, OPTIONS)
    assert step_s == pytest.approx(best.step_s, rel=EQUAL)
    assert bound_s <= best.step_s * (1 + EQUAL)


@settings(each, max_examples=180)
@given(single_pool())
def test_search_of_one_pool_equals_enumeration(job: Job) -> None:
    check(job)


@settings(each, max_examples=120)
@given(two_pools())
def test_search_of_two_pools_equals_enumeration(job: Job) -> None:
    check(job)
