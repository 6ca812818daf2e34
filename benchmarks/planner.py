"""What the planner reaches: large jobs, TorchRec's planner, balance of the tables.

    python -m benchmarks.planner [--part scale|torchrec|balance] [--models dlrm,de_small]
        [--ranks 8,16,64,128] [--tightness 4,1.5,1.1] [--limit-s 60] [--out FILE]

``scale``: ``benchmarks/plan_scale.py``'s goals. ``torchrec``: the ILP on TorchRec's search space
and costs against TorchRec's planner, both rated by TorchRec's own estimators, and the ILP on ours
against its plan under our step model: pools of B200 nodes of 8, the model's global batch, weights
as in the recipe. ``balance``: the slowest rank's time on tables, over the ranks' mean, of plans.

Tightness T: each rank's device memory, less what is not tables, is T times an even share of what
TorchRec counts for all tables whole and in device memory (weights, optimizer state, buffers); each
node's host memory holds all tables. Its planner makes no new proposal after ``--limit-s``; a case
in which it was stopped is listed with the best that it had, and is not part of any mean.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import plan_scale
from planner.assemble import contexts_of
from planner.baselines.league import solve_alone
from planner.baselines.problem import recipe_type
from planner.baselines.torchrec_costs import (
    TorchRecTable,
    TorchRecWay,
    shard_bytes,
    torchrec_topology,
)
from planner.baselines.torchrec_ilp import torchrec_optimum
from planner.cost.context import PoolContext
from planner.cost.graph import pool_step_graph
from planner.cost.memory import base_memory_bytes
from planner.evaluate import evaluate, pool_loads
from planner.ilp.settle import rank_table_s, table_s
from planner.ilp.solve import SolverOptions
from planner.search import SearchOptions, plan_job
from planner.settle import settle_job
from planner.specs.cluster import PoolSpec
from planner.specs.errors import InfeasibleError
from planner.specs.load import load_cluster, load_device, load_model
from planner.specs.model import ComputeKernel, ShardingType
from planner.specs.plan import MemoryPolicy, Placement
from planner.specs.units import GIB

MODELS = (
    "dlrm",
    *(f"hugectr_{name}" for name in ("7t_470b_hot20", "180t_70b_hot80")),
    *(f"hugectr_{name}" for name in ("200t_100b_hot20", "510t_110b_hot5")),
    *(f"de_{name}" for name in ("tiny", "small", "medium", "large", "jumbo")),
)
RANKS = (8, 16, 64, 128)
TIGHTNESS = (4.0, 1.5, 1.1)
NODE_RANKS = 8
DEVICE = "b200"
GAP = 0.02
MS = 1e3


@dataclass(frozen=True)
class Rivals:
    """One case of part ``torchrec``; ms by TorchRec's estimators unless named otherwise."""

    model: str
    ranks: int
    tightness: float
    theirs_ms: float | None
    """None: it found no plan."""
    ours_ms: float
    bound_ms: float
    theirs_s: float
    """CPU time, as the next one: the machine may have other work."""
    ours_s: float
    stopped: bool
    theirs_step_ms: float | None
    """Under our step model, as the next three."""
    ours_step_ms: float
    theirs_tables_ms: float | None
    ours_tables_ms: float
    fits: bool
    """Whether TorchRec's storage estimator accepts our placements."""


def context(model_name: str, ranks: int, tightness: float) -> PoolContext:
    """The pool of a case."""
    model = load_model(model_name)
    precision = model.precision
    recipe = precision.model_copy(update={"embeddings": precision.embeddings[:1]})
    model = model.model_copy(update={"precision": recipe})
    pool = PoolSpec(
        name="pool", device=DEVICE, nodes=ranks // NODE_RANKS, devices_per_node=NODE_RANKS
    )
    device = load_device(DEVICE)
    policy = MemoryPolicy(compute_precision=precision.compute[0])
    ctx = PoolContext(pool, device, model, model.global_batch // ranks, policy)
    needed = whole_bytes(ctx)
    pool = pool.model_copy(update={"host_memory_gib_per_node": max(1.0, needed / GIB)})
    room = sum(base_memory_bytes(ctx).values()) + tightness * needed / ranks
    memory = device.memory
    capacity = math.ceil(room / (1 - memory.allocator_reserve.value))
    hbm = memory.hbm_bytes.model_copy(update={"value": float(capacity)})
    device = device.model_copy(update={"memory": memory.model_copy(update={"hbm_bytes": hbm})})
    return replace(ctx, pool=pool, device=device)


def whole_bytes(ctx: PoolContext) -> int:
    """What TorchRec counts for all tables, each whole on one rank."""
    topology, optimizer = torchrec_topology(ctx), ctx.model.optimizer.sparse.name
    total = 0
    for table in ctx.model.all_tables:
        seen = TorchRecTable(table, recipe_type(ctx.model, table).bytes, optimizer, ctx.local_batch)
        rows, columns = table.num_embeddings, table.embedding_dim
        way = TorchRecWay(ShardingType.TABLE_WISE, ComputeKernel.FUSED, rows, columns)
        total += sum(shard_bytes(topology, seen, way))
    return total


def rivals(model: str, ranks: int, tightness: float, limit_s: float) -> Rivals:
    """Run both planners on a case.

    Raises:
        InfeasibleError: ours finds no placement.
    """
    from runtime.torchrec_planner import torchrec_cost, torchrec_placements

    ctx = context(model, ranks, tightness)
    start_s = time.process_time()
    found = torchrec_optimum(ctx, SolverOptions(mip_gap=GAP, time_limit_s=limit_s))
    ours_s = time.process_time() - start_s
    if found.placements is None:
        raise InfeasibleError("the ILP finds no placement in TorchRec's space", fix="more memory")
    start_s = time.process_time()
    theirs: dict[str, Placement] | None = None
    stopped = False
    try:
        placed = torchrec_placements(ctx, limit_s)
        theirs, stopped = dict(placed.placements), bool(placed.note)
    except InfeasibleError:
        stopped = time.process_time() - start_s > limit_s
    theirs_s = time.process_time() - start_s

    def other_ms(placements: dict[str, Placement]) -> tuple[float, bool]:
        pool = evaluate({"pool": ctx}, {"pool": placements}).pools["pool"]
        cost = torchrec_cost(ctx, pool)
        return cost.step_ms, cost.fits

    step_ms, tables_ms = _under_our_model(ctx, _planned(ctx, limit_s))
    theirs_ours = (None, None) if theirs is None else _under_our_model(ctx, theirs)
    ours_ms, fits = other_ms(found.placements)
    return Rivals(
        model=model,
        ranks=ranks,
        tightness=tightness,
        theirs_ms=None if theirs is None else other_ms(theirs)[0],
        ours_ms=ours_ms,
        bound_ms=found.bound_s * MS,
        theirs_s=theirs_s,
        ours_s=ours_s,
        stopped=stopped,
        theirs_step_ms=theirs_ours[0],
        ours_step_ms=step_ms,
        theirs_tables_ms=theirs_ours[1],
        ours_tables_ms=tables_ms,
        fits=fits,
    )


def _planned(ctx: PoolContext, limit_s: float) -> dict[str, Placement]:
    """Our placements under our step model, ties broken as ``hwplan plan`` breaks them."""
    options = SearchOptions(mip_gap=0.01, time_limit_s=limit_s)
    _, placements = solve_alone(ctx, options)
    if placements is None:
        raise InfeasibleError("the ILP finds no placement under our model", fix="more memory")
    contexts = {ctx.pool.name: ctx}
    before = evaluate(contexts, {ctx.pool.name: placements})
    solver = SolverOptions(mip_gap=0.01, time_limit_s=limit_s)
    settled, _ = settle_job(contexts, {ctx.pool.name: placements}, before, solver)
    return dict(settled[ctx.pool.name])


def _under_our_model(ctx: PoolContext, placements: dict[str, Placement]) -> tuple[float, float]:
    """Step and table time, ms."""
    contexts = {ctx.pool.name: ctx}
    step_s = evaluate(contexts, {ctx.pool.name: placements}).step_s
    loads, _ = pool_loads(ctx, placements)
    return step_s * MS, table_s(pool_step_graph(ctx), loads) * MS


def run_torchrec(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    print(
        f"{'model':24} {'ranks':>5} {'T':>4} {'theirs':>9} {'ours':>9} {'bound':>9} {'ratio':>6} "
        f"{'gap':>6} {'their s':>7} {'our s':>6} | {'step':>5} {'tables':>6}"
    )
    cases = []
    for model in arguments.models:
        for ranks in arguments.ranks:
            for tightness in arguments.tightness:
                try:
                    case = rivals(model, ranks, tightness, arguments.limit_s)
                except InfeasibleError as error:
                    print(f"{model:24} {ranks:5} {tightness:4} {error.problem}", flush=True)
                    continue
                cases.append(case)
                print(_line(case), flush=True)
                yield asdict(case)
    print(summary(cases))


def _line(case: Rivals) -> str:
    def over(theirs: float | None, ours: float) -> str:
        return "-" if theirs is None else f"{theirs / ours:.2f}"

    theirs = "none" if case.theirs_ms is None else f"{case.theirs_ms:.4f}"
    return (
        f"{case.model:24} {case.ranks:5} {case.tightness:4} {theirs:>9} {case.ours_ms:9.4f} "
        f"{case.bound_ms:9.4f} {over(case.theirs_ms, case.ours_ms):>6} "
        f"{case.ours_ms / case.bound_ms - 1:6.2%} {case.theirs_s:7.1f} {case.ours_s:6.1f} | "
        f"{over(case.theirs_step_ms, case.ours_step_ms):>5} "
        f"{over(case.theirs_tables_ms, case.ours_tables_ms):>6} "
        f"{'stopped' if case.stopped else ''}{'' if case.fits else 'overfull'}"
    )


def summary(cases: list[Rivals]) -> str:
    """Geometric means of the cases that TorchRec's planner finished with a plan."""
    done = [case for case in cases if case.theirs_ms is not None and not case.stopped]
    lines = [
        f"{len(cases)} cases; its planner finished {len(done)}, was stopped in "
        f"{sum(case.stopped for case in cases)}, found no plan in "
        f"{sum(case.theirs_ms is None and not case.stopped for case in cases)}",
        f"worse than its plan: {sum(_worse(case) for case in cases)}; overfull: "
        f"{sum(not case.fits for case in cases)}; gap above 2 %: "
        f"{sum(case.ours_ms > 1.02 * case.bound_ms for case in cases)}; slower than it: "
        f"{sum(case.ours_s > case.theirs_s for case in cases)}",
    ]
    for name, ratio in RATIOS.items():
        if done:
            mean = math.exp(sum(math.log(ratio(case)) for case in done) / len(done))
            lines.append(f"geometric mean, {name}: {mean:.2f}")
    return "\n".join(lines)


def _worse(case: Rivals) -> bool:
    return case.theirs_ms is not None and case.ours_ms > case.theirs_ms * (1 + 1e-9)


RATIOS: dict[str, Callable[[Rivals], float]] = {
    "TorchRec's rating": lambda case: (case.theirs_ms or 0.0) / case.ours_ms,
    "step by our model": lambda case: (case.theirs_step_ms or 0.0) / case.ours_step_ms,
    "table time by our model": lambda case: (case.theirs_tables_ms or 0.0) / case.ours_tables_ms,
}


def run_balance(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Slowest rank's table time over the mean, per pool of the scale cases' plans."""
    print(f"{'case':46} {'pool':10} {'step ms':>9} {'slowest':>8} {'mean':>8} {'ratio':>6}")
    for case in plan_scale.GOALS:
        if case.model not in arguments.models:
            continue
        plan = plan_job(load_cluster(str(case.cluster)), load_model(case.model))
        for name, ctx in contexts_of(plan).items():
            loads, _ = pool_loads(ctx, plan.pools[name].placements)
            each_ms = rank_table_s(pool_step_graph(ctx), loads) * MS
            slowest, mean = float(each_ms.max()), float(each_ms.mean())
            print(
                f"{case.name:46} {name:10} {plan.predicted.step_ms:9.4f} {slowest:8.4f} "
                f"{mean:8.4f} {slowest / mean:6.3f}",
                flush=True,
            )
            yield {"case": case.name, "pool": name, "slowest_ms": slowest, "mean_ms": mean}


def run_scale(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    print(plan_scale.HEADER)
    for case in plan_scale.GOALS:
        if case.model in arguments.models:
            figures = plan_scale.measure(case)
            print(plan_scale.line(case, figures), flush=True)
            yield {"case": case.name, **asdict(figures)}


PARTS = {"scale": run_scale, "torchrec": run_torchrec, "balance": run_balance}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="left out: all")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument(
        "--ranks", type=lambda text: [int(one) for one in text.split(",")], default=list(RANKS)
    )
    parser.add_argument(
        "--tightness",
        type=lambda text: [float(one) for one in text.split(",")],
        default=list(TIGHTNESS),
    )
    parser.add_argument("--limit-s", type=float, default=60.0, help="of TorchRec's planner")
    parser.add_argument("--out", type=Path, help="append the figures here, one JSON object a line")
    arguments = parser.parse_args()
    for part in arguments.part or PARTS:
        for figures in PARTS[part](arguments):
            if arguments.out is not None:
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"part": part, **figures}) + "\n")


if __name__ == "__main__":
    main()
