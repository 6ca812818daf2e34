"""Explanations are tested on plans made by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "cli"))

from explain_plans import PLANS

from planner.specs.plan import Plan


@pytest.fixture(params=PLANS)
def any_plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]()
