"""The comparison's report and JSON, predicted and measured."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from spec_samples import PLAN, changed

from planner.compare import Comparison, Contest, Lever, Outcome, compare
from planner.report.compare import render_comparison
from planner.specs.base import validate
from planner.specs.cluster import ClusterSpec
from planner.specs.load import load_model
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan
from planner.specs.units import Dtype
from runtime.comparison import MeasuredContest, comparison_json
from runtime.measure import Measurement

PLANNED = validate(Plan, PLAN, None)
NAIVE = validate(Plan, changed(PLAN, "kind", "naive"), None)
ALONE = validate(
    Plan,
    changed(PLAN, "pools", {"nvidia": changed(PLAN["pools"]["nvidia"], "local_batch", 96)}),
    None,
)


def outcome(plan: Plan, step_ms: float) -> Outcome:
    return Outcome(samples_per_s=96e3 / step_ms, step_ms=step_ms, plan=plan)


def comparison(free: Plan) -> Comparison:
    naive = outcome(NAIVE, 3.0)
    return Comparison(
        matched=Contest(planned=outcome(PLANNED, 2.0), naive=naive, speedup=1.5),
        free=Contest(planned=outcome(free, 1.0), naive=naive, speedup=3.0),
        waterfall=(
            Lever(name="naive port", step_ms=3.0),
            Lever(name="batch split", step_ms=2.0),
            Lever(name="devices left out", step_ms=2.0),
        ),
    )


def measurement(step_ms: float) -> Measurement:
    return Measurement(
        step_ms=step_ms, samples_per_s=96e3 / step_ms, predicted_step_ms=1.0, rounds_ms=(step_ms,)
    )


MEASURED = {
    "matched": MeasuredContest(planned=measurement(2.5), naive=measurement(4.0)),
    "free": MeasuredContest(planned=measurement(1.25), naive=measurement(4.0)),
}


def rendered(free: Plan, measured: dict[str, MeasuredContest] | None = None) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False, emoji=False)
    render_comparison(comparison(free), console, measured)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line) for line in text.splitlines()) <= 80
    return text


def test_predictions_alone() -> None:
    text = rendered(ALONE)
    assert text.splitlines()[0] == "toy on two: 1.50x the naive port, predicted"
    assert "free: 3.00x predicted, with 1 x 1 in nvidia" in text
    assert "Measured" not in text


def test_measured_speedup_leads_and_errors_are_shown() -> None:
    text = rendered(ALONE, MEASURED)
    assert text.splitlines()[0] == "toy on two: 1.60x the naive port, measured"
    assert "predicted: 1.50x" in text
    measured = text.split("Measured")[1].split("\n\n")[0].splitlines()
    rows = {line[2:20].strip(): line.split() for line in measured}
    assert rows["planned, matched"][-4:] == ["k", "1.60x", "-20", "%"]
    assert rows["planned, free"][-4:] == ["k", "3.20x", "-20", "%"]
    assert rows["naive port"][-4:] == ["k", "1.00x", "-25", "%"]


def test_an_equal_free_plan_is_said_to_be_the_same() -> None:
    found_elsewhere = PLANNED.model_copy(update={"considered": ()})
    assert "free: the same plan" in rendered(found_elsewhere)


def test_waterfall_shows_what_each_lever_brings() -> None:
    lines = {line.split("  ")[1]: line.rstrip() for line in rendered(ALONE).splitlines()[-3:]}
    assert lines["batch split"].endswith("-33 %")
    assert lines["devices left out"].endswith("·") and "naive port" in lines


def test_json_has_the_contract_fields() -> None:
    data = json.loads(json.dumps(comparison_json(comparison(ALONE), MEASURED)))
    for terms, predicted, measured in (("matched", 1.5, 1.6), ("free", 3.0, 3.2)):
        assert data[terms]["speedup"] == predicted
        assert data[terms]["measured"]["speedup"] == pytest.approx(measured)
        for side in ("planned", "naive"):
            assert data[terms][side]["samples_per_s"] > 0
            assert data[terms]["measured"][side]["samples_per_s"] > 0
    assert "measured" not in comparison_json(comparison(ALONE))["matched"]
    assert data["waterfall"][0]["name"] == "naive port"


def test_a_naive_port_that_does_not_run_leaves_the_plan_alone() -> None:
    alone = Comparison(
        matched=Contest(planned=outcome(PLANNED, 2.0), naive=None, speedup=None),
        free=Contest(planned=outcome(ALONE, 1.0), naive=None, speedup=None),
        waterfall=(),
        why_no_naive="it lacks 3 bytes",
    )
    measured = {
        terms: MeasuredContest(planned=measurement(2.0), naive=None)
        for terms in ("matched", "free")
    }
    console = Console(file=io.StringIO(), width=100, color_system=None)
    render_comparison(alone, console, measured)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.splitlines()[0] == (
        "toy on two: 48.00 k samples/s, measured; the naive port does not run"
    )
    assert "it lacks 3 bytes" in text and "each lever" not in text and "None" not in text
    data = json.loads(json.dumps(comparison_json(alone, measured)))
    assert data["why_no_naive"] == "it lacks 3 bytes" and data["waterfall"] == []
    for terms in ("matched", "free"):
        assert data[terms]["naive"] is data[terms]["speedup"] is None
        assert data[terms]["measured"]["naive"] is data[terms]["measured"]["speedup"] is None
        assert data[terms]["planned"]["samples_per_s"] > 0


def test_compare_plans_where_the_naive_port_does_not_fit() -> None:
    """Two GiB of fp32 tables in two GiB of memory: only half-precision ones have room."""
    worker = {
        "name": "p", "device": "cpu", "nodes": 1, "devices_per_node": 1, "cpu_cores": [0],
        "host_memory_gib_per_node": 2.5,
    }  # fmt: skip
    cluster = validate(
        ClusterSpec, {"name": "one", "pools": [worker], "reference_device": "cpu"}, None
    )
    model = load_model("dlrm_criteo_small")
    rows = 2**31 // (4 * model.tables[0].embedding_dim)
    wide = model.tables[0].model_copy(update={"num_embeddings": rows, "count": 1})
    fields = {name: getattr(model, name) for name in ModelSpec.model_fields}
    precision = model.precision.model_copy(update={"embeddings": (Dtype.FP32, Dtype.FP16)})
    tight = ModelSpec(**{**fields, "tables": (wide,), "precision": precision, "global_batch": 64})
    result = compare(cluster, tight)
    assert result.matched.naive is None and "naive port does not fit" in result.why_no_naive
    assert result.matched.planned.plan.kind == "planned" and not result.waterfall
