"""Levers, limits and rivals against evaluate() on plans changed by hand; the command."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_run import ROOT, assert_fails, hwplan
from explain_plans import (
    BIG,
    FP32,
    groups,
    host_bound,
    make_plan,
    model,
    on,
    one_pool,
    pool,
    rows_over,
    two_pools,
)
from rich.console import Console

from planner.assemble import contexts_of
from planner.baselines.naive import naive_port
from planner.cost.context import PoolContext
from planner.evaluate import evaluate
from planner.explain.change import Change
from planner.explain.job import job_of
from planner.explain.limits import Limit
from planner.explain.plan import Explanation, explain_plan
from planner.explain.rivals import policies
from planner.explain.samples import in_one_group, on_more_nodes, shared_out
from planner.report.explain import render_explanation, render_summary, signed, stepped
from planner.specs.model import ComputeKernel, ShardingType
from planner.specs.plan import Alternative, MemoryPolicy, Plan, save_plan
from planner.specs.units import Dtype

Change_ = Callable[[PoolContext], PoolContext]


def step_ms(plan: Plan, change: Change_ = lambda ctx: ctx, **placements: Any) -> float:
    """evaluate() with all contexts changed, and placements of some pools."""
    contexts = {name: change(ctx) for name, ctx in contexts_of(plan).items()}
    chosen = {name: dict(one.placements) for name, one in plan.pools.items()} | placements
    return evaluate(contexts, chosen).step_s * 1e3


def under(**update: Any) -> Change_:
    return lambda ctx: replace(ctx, policy=ctx.policy.model_copy(update=update))


def lever(plan: Plan, name: str) -> Change:
    return next(one for one in explain_plan(plan).levers if one.what == name)


def limit(plan: Plan, name: str) -> Limit:
    return next(one for one in explain_plan(plan).limits if one.what == name)


def tuned() -> Plan:
    """Two unlike pools whose every lever is off the plain value."""
    recipe = {"compute": (Dtype.FP32, Dtype.BF16), "communication": (Dtype.FP32, Dtype.FP16),
              "embeddings": (Dtype.FP32, Dtype.FP16)}  # fmt: skip
    policy = MemoryPolicy(
        compute_precision=Dtype.BF16,
        communication_precision=Dtype.FP16,
        recompute=("bottom",),
        kernels="preselected",
    )
    half = on(0, data_type=Dtype.FP16)
    return make_plan(
        (pool("amd", "mi350x", 2, 2), pool("nvidia", "b200", 1, 2)),
        model(BIG, 786_432, interval=8, **recipe),
        {"amd": 98_304, "nvidia": 196_608},
        {
            "amd": {"t0": half, "t1": on(1), "t2": rows_over(4)},
            "nvidia": {"t0": half, "t1": on(1), "t2": on(1)},
        },
        policies={"amd": policy, "nvidia": policy},
        interval=4,
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("batch split", lambda ctx: replace(ctx, local_batch=131_072)),
        ("compute precision", under(compute_precision=Dtype.FP32)),
        ("wire precision", under(communication_precision=Dtype.FP32)),
        ("recompute", under(recompute=())),
        ("kernels", under(kernels="vendor")),
    ],
)
def test_a_lever_is_the_plan_with_that_alone_switched(name: str, change: Change_) -> None:
    plan = tuned()
    found = lever(plan, name)
    assert found.made
    assert found.step_ms == pytest.approx(step_ms(plan, change), rel=1e-9)
    assert found.delta_ms == pytest.approx(found.step_ms - step_ms(plan), abs=1e-9)


@pytest.mark.parametrize(
    "update",
    [
        {"compute_precision": Dtype.FP32},
        {"recompute": ()},
        {"kernels": "vendor"},
        {"dense_parallelism": "sharded_optimizer"},
        {"communication_precision": Dtype.FP32},
        {"prefetch_depth": 1},
    ],
)
def test_memory_and_loads_under_another_policy_are_those_of_evaluate(
    update: dict[str, Any],
) -> None:
    plan = tuned()
    contexts = {name: under(**update)(ctx) for name, ctx in contexts_of(plan).items()}
    placements = {name: one.placements for name, one in plan.pools.items()}
    expected = evaluate(contexts, placements)
    before = job_of(plan)
    assert before.step_s > 0, "priced, so that it could be carried over"
    after = before.with_contexts(contexts)
    assert after.step_s == pytest.approx(expected.step_s, rel=1e-12)
    for name, state in after.pools.items():
        assert tuple(state.memory) == expected.pools[name].memory_bytes


def test_weights_go_back_to_the_recipes_precision() -> None:
    plan = tuned()
    found = lever(plan, "weight precision")
    wide = {
        name: {t: p.model_copy(update={"data_type": Dtype.FP32}) for t, p in one.placements.items()}
        for name, one in plan.pools.items()
    }
    assert (found.planned, found.instead) == ("fp16+fp32", "fp32")
    assert found.step_ms == pytest.approx(step_ms(plan, **wide), rel=1e-9)


def test_levers_at_their_plain_value_change_nothing() -> None:
    plan = one_pool()
    for name in ("batch split", "compute precision", "recompute", "kernels", "replica groups"):
        found = lever(plan, name)
        assert not found.made and found.delta_ms == 0 and found.fits


def test_a_placement_worse_than_the_greedy_one_has_a_negative_worth() -> None:
    found = lever(one_pool(), "placement")
    assert found.made and found.delta_ms < 0, "all look-ups of this plan are on one rank"


def test_a_pool_left_out_gives_its_samples_to_the_others() -> None:
    plan = two_pools()
    found = lever(plan, "pool nvidia")
    ctx = replace(contexts_of(plan)["amd"], local_batch=196_608, pools_in_job=1)
    ctx = replace(ctx, embedding_interval_steps=1)
    alone = evaluate({"amd": ctx}, {"amd": plan.pools["amd"].placements})
    assert found.step_ms == pytest.approx(alone.step_s * 1e3, rel=1e-9)


def resting() -> Plan:
    """One of two nodes works."""
    return make_plan(
        (pool("amd", "mi350x", 2, 2),),
        model(BIG, 1_048_576),
        {"amd": 524_288},
        {"amd": {"t0": on(0), "t1": on(1), "t2": rows_over(2)}},
        working={"amd": 1},
    )


def test_nodes_that_rest_are_put_to_work() -> None:
    plan = resting()
    found = lever(plan, "devices of amd left out")
    whole = plan.cluster.pool("amd")
    wider = replace(contexts_of(plan)["amd"], pool=whole, local_batch=262_144)
    placed = {**plan.pools["amd"].placements, "t2": rows_over(4)}
    expected = evaluate({"amd": wider}, {"amd": placed}).step_s * 1e3
    assert (found.planned, found.instead) == ("1 of 2 nodes", "all 2 nodes")
    assert found.step_ms == pytest.approx(expected, rel=1e-9)


def test_what_the_search_found_for_resting_nodes_counts_if_it_is_better() -> None:
    row = Alternative(
        description="all", pools=("amd",), local_batch={"amd": 262_144}, step_ms=0.5,
        samples_per_s=1e9,
    )  # fmt: skip
    plan = resting().model_copy(update={"considered": (row,)})
    assert lever(plan, "devices of amd left out").step_ms == 0.5


def test_one_copy_of_the_tables_instead_of_replica_groups() -> None:
    """Tables in turn: t0 stays in group 0, t1 goes to group 1, t2 lies on all four ranks."""
    plan = groups()
    ctx = contexts_of(plan)["amd"]
    placed = in_one_group(ctx, plan.pools["amd"].placements)
    assert placed == {"t0": on(0), "t1": on(3), "t2": rows_over(4)}
    expected = evaluate({"amd": replace(ctx, replica_groups=1)}, {"amd": placed}).step_s * 1e3
    found = lever(plan, "replica groups")
    assert (found.planned, found.instead) == ("2", "1")
    assert found.step_ms == pytest.approx(expected, rel=1e-9)


def test_node_wide_placements_grow_with_their_node() -> None:
    """Two groups of two on one node of four."""
    plan = make_plan(
        (pool("amd", "mi350x", 1, 4),),
        model(BIG, 4096),
        {"amd": 1024},
        {
            "amd": {
                "t0": on(0, sharding_type=ShardingType.TABLE_ROW_WISE, ranks=(0, 1)),
                "t1": on(1),
                "t2": on(0),
            }
        },
        groups={"amd": 2},
    )
    placed = in_one_group(contexts_of(plan)["amd"], plan.pools["amd"].placements)
    assert [placed[t].ranks for t in ("t0", "t1", "t2")] == [(0, 1, 2, 3), (3,), (0,)]


def test_batches_are_shared_out_in_proportion() -> None:
    assert shared_out(1200, {"a": 4, "b": 2}, {"a": 10, "b": 40}) == {"a": 100, "b": 400}
    assert shared_out(7, {"a": 2}, {"a": 10}) is None
    ctx = replace(contexts_of(one_pool())["amd"], local_batch=1)
    assert on_more_nodes(ctx, {"t": on(1), "r": rows_over(2)}) == {"t": on(1), "r": rows_over(4)}


def test_memory_binds_where_something_is_done_to_save_it() -> None:
    spilled = on(0, compute_kernel=ComputeKernel.FUSED_UVM)
    plan = make_plan(
        (pool("amd", "mi350x", 1, 2),),
        model(BIG, 524_288),
        {"amd": 262_144},
        {"amd": {"t0": spilled, "t1": on(1), "t2": on(1)}},
        policies={"amd": FP32.model_copy(update={"recompute": ("bottom", "top")})},
    )
    found = limit(plan, "memory of amd")
    inside = {**plan.pools["amd"].placements, "t0": on(0)}
    expected = step_ms(plan, under(recompute=()), amd=inside)
    assert found.relaxed == "without recompute, 1 table in host memory"
    assert found.binds and found.note == "it would fit"
    assert found.step_ms == pytest.approx(expected, rel=1e-9)
    idle = limit(one_pool(), "memory of amd")
    assert not idle.binds and idle.step_ms is None and "more would change nothing" in idle.note


def test_memory_that_lacks_room_says_whether_a_tenth_more_would_do() -> None:
    """Rows of 250 GiB do not fit into an MI350X's 247; those of 1,000 not into a tenth more."""
    gib = (1 << 30) // (64 * 4)
    spilled = on(0, compute_kernel=ComputeKernel.FUSED_UVM)
    for size, answer in ((250, "would do"), (1000, "would not do")):
        plan = make_plan(
            (pool("amd", "mi350x", 1, 1, host_memory_gib_per_node=4096.0),),
            model([(size * gib, 64, 20.0)], 65_536),
            {"amd": 65_536},
            {"amd": {"t0": spilled}},
        )
        found = limit(plan, "memory of amd")
        assert found.binds and "rank 0 of amd lacks" in found.note
        assert found.note.endswith(answer), found.note


def test_the_interval_binds_only_at_the_models_limit() -> None:
    def doubled(ctx: PoolContext) -> PoolContext:
        return replace(ctx, embedding_interval_steps=8)

    loose = two_pools()
    found = limit(loose, "exchange interval")
    assert found.step_ms == pytest.approx(step_ms(loose, doubled), rel=1e-9)
    assert not found.binds and found.saved_ms > 0 and found.note == "the model allows it"
    tight = loose.model_copy(
        update={"model": loose.model.model_copy(update={"max_exchange_interval_steps": 4})}
    )
    assert limit(tight, "exchange interval").binds
    with pytest.raises(StopIteration):
        limit(one_pool(), "exchange interval")


def test_precisions_that_the_model_does_not_allow() -> None:
    plan = two_pools()
    wire = limit(plan, "wire precision")
    expected = step_ms(plan, under(communication_precision=Dtype.FP16))
    assert wire.binds and wire.relaxed == "fp16 allowed"
    assert wire.step_ms == pytest.approx(expected, rel=1e-9)
    compute = limit(plan, "compute precision")
    assert compute.binds and compute.relaxed in ("fp8 allowed", "fp16 allowed", "bf16 allowed")
    allowed = limit(tuned(), "weight precision")
    assert allowed.step_ms is None and not allowed.binds


def test_min_nodes_bind_where_the_job_is_faster_without() -> None:
    plan = two_pools({"amd": 192_000, "nvidia": 9216})
    asked = plan.cluster.model_copy(
        update={
            "pools": tuple(
                one.model_copy(update={"min_nodes": 1}) if one.name == "nvidia" else one
                for one in plan.cluster.pools
            )
        }
    )
    plan = plan.model_copy(update={"cluster": asked})
    found = limit(plan, "min_nodes of nvidia")
    assert found.now == "1 asked for, 1 work" and found.relaxed == "nvidia left out"
    assert found.step_ms == pytest.approx(lever(plan, "pool nvidia").step_ms)
    assert found.binds == (found.saved_ms > 0)


def test_the_gap_is_what_the_search_may_have_missed() -> None:
    found = limit(one_pool(), "search")
    assert found.binds and found.note == "at most"
    assert found.saved_ms == pytest.approx(job_of(one_pool()).step_ms * (1 - 1 / 1.02), rel=1e-6)


def test_other_policies_differ_in_one_thing_and_are_priced() -> None:
    plan = tuned()
    job = job_of(plan)
    found = list(policies(job, "amd"))
    assert len(found) > 5
    precise = next(one for one in found if one.instead == "fp32" and "compute" in one.what)
    contexts = contexts_of(plan)
    contexts["amd"] = under(compute_precision=Dtype.FP32)(contexts["amd"])
    placements = {name: one.placements for name, one in plan.pools.items()}
    expected = evaluate(contexts, placements).step_s * 1e3
    assert precise.step_ms == pytest.approx(expected, rel=1e-9)
    fitting = [one.step_ms for one in found if one.fits]
    assert fitting == sorted(fitting)
    assert explain_plan(plan).second_policies["amd"] == found[0]


def test_the_next_best_is_the_best_priced_row_that_was_not_chosen() -> None:
    def row(step: float | None, **more: Any) -> Alternative:
        fields = {"description": f"{step}", "pools": ("amd",), "local_batch": {"amd": 1}}
        return Alternative(step_ms=step, samples_per_s=step, **fields, **more)  # type: ignore[arg-type]

    rows = (row(1.0, chosen=True), row(None, note="excluded"), row(3.0), row(2.0))
    plan = one_pool().model_copy(update={"considered": rows})
    assert explain_plan(plan).next_best == rows[3]
    assert explain_plan(one_pool()).next_best is None


def test_every_plan_is_explained_alike_twice_and_survives_json(any_plan: Plan) -> None:
    found = explain_plan(any_plan)
    assert found == explain_plan(any_plan)
    assert Explanation.model_validate_json(found.model_dump_json()) == found
    total = sum(part.ms for part in found.critical_path)
    assert total == pytest.approx(found.step_ms, rel=1e-5)
    text = rendered(found)
    for part in ("What the step is made of", "What binds", "each lever", "next best"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100


def rendered(found: Explanation, render: Any = render_explanation) -> str:
    console = Console(file=io.StringIO(), width=100, highlight=False, emoji=False)
    render(found, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_naive_port_is_explained_too() -> None:
    plan = two_pools()
    naive = naive_port(plan.cluster, plan.model)
    found = explain_plan(naive)
    assert found.kind == "naive"
    assert {one.what for one in found.worth} <= {"pool amd", "pool nvidia", "placement"}
    search = next(one for one in found.limits if one.what == "search")
    assert search.now.startswith("no search was made")


def test_the_summary_says_what_decides_and_what_binds() -> None:
    text = rendered(explain_plan(host_bound()), render_summary)
    assert "decided by: host launches of amd (10 % faster: -" in text
    assert "all else is done after" in text
    text = " ".join(rendered(explain_plan(two_pools()), render_summary).split())
    assert "limits that bind: compute precision (" in text


def test_a_plan_that_a_single_change_would_shorten_says_so() -> None:
    found = explain_plan(one_pool())
    (better,) = (one for name, one in found.improvements.items() if name.startswith("placement"))
    assert better.delta_ms < 0
    text = " ".join(rendered(found, render_summary).split())
    assert (
        f"a single change would be shorter: placement greedy planner's {signed(better.delta_ms)}"
        in text
    )
    assert not explain_plan(host_bound()).improvements


def test_cells_explain_their_arithmetic() -> None:
    assert stepped(10.16, 9.06) == "10.2 (=9.06+1.10)"
    assert stepped(9.06, 9.06) == "9.06"
    assert (signed(-0.482), signed(1e-7)) == ("-0.482", "0")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_plan(two_pools(), tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_the_command_prints_and_gives_json(saved: Path) -> None:
    whole = hwplan("explain", str(saved))
    assert whole.code == 0 and "why this plan" in whole.out
    data = json.loads(hwplan("explain", str(saved), "--json").out)
    assert Explanation.model_validate_json(json.dumps(data)).step_ms > 0
    table = hwplan("explain", str(saved), "--table", "t1")
    assert table.code == 0 and "Why: " in table.out and "In nvidia: table_wise" in table.out
    assert json.loads(hwplan("explain", str(saved), "--table", "t1", "--json").out)["table"] == "t1"


def test_the_command_refuses_damaged_plans_and_unknown_tables(saved: Path) -> None:
    assert_fails(hwplan("explain", str(saved), "--table", "t7"), 2, "--table", "t7", "t0")
    saved.write_text(saved.read_text().replace('"t1"', '"t9"', 1))
    assert_fails(hwplan("explain", str(saved)), 2, "digest")
    assert_fails(hwplan("explain", str(saved.parent / "none.json")), 2, "none.json")


def test_explaining_needs_neither_torch_nor_ray(saved: Path) -> None:
    code = (
        "import sys; from runtime.cli.explain import explain; from pathlib import Path; "
        f"explain(Path({str(saved)!r})); explain(Path({str(saved)!r}), table='t0'); "
        "print({'torch', 'ray', 'torchrec'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stderr.strip() == "set()", done.stderr
