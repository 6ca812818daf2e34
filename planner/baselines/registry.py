"""Every baseline by name."""

from __future__ import annotations

from planner.baselines.balanced import lookup_balanced, size_balanced
from planner.baselines.greedy import torchrec_greedy
from planner.baselines.hugectr import hugectr
from planner.baselines.problem import Baseline
from planner.baselines.uniform import row_wise, table_wise

BASELINES: dict[str, Baseline] = {
    "torchrec_greedy": torchrec_greedy,
    "hugectr": hugectr,
    "table_wise": table_wise,
    "row_wise": row_wise,
    "size_balanced": size_balanced,
    "lookup_balanced": lookup_balanced,
}
