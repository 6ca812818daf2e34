"""``hwplan baselines``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli.options import AsJson, ClusterFile, GlobalBatch, MipGap, ModelName, TimeLimit
from runtime.cli.output import working, write_json, write_report

if TYPE_CHECKING:
    from planner.baselines.league import Placer, Rater


def baselines(
    cluster: ClusterFile,
    model: ModelName,
    global_batch: GlobalBatch = None,
    with_torchrec: Annotated[
        bool | None,
        typer.Option(
            "--with-torchrec/--without-torchrec",
            help="Also run TorchRec's own planner; if left out, where torchrec is installed.",
        ),
    ] = None,
    as_json: AsJson = False,
    time_limit: TimeLimit = 60.0,
    mip_gap: MipGap = 0.01,
) -> None:
    """Compare the plan with published ways to place tables.

    Same devices, batch split, policy and cost model; every pool alone, too.

    In Python: planner.baselines.league.leagues(cluster, model).
    """
    from planner.specs.load import load_cluster, load_model

    cluster_spec, model_spec = load_cluster(cluster), load_model(model)
    from planner.baselines.league import leagues
    from planner.search import SearchOptions

    placers, rate, remark = _torchrec(with_torchrec, time_limit, mip_gap)
    options = SearchOptions(mip_gap=mip_gap, time_limit_s=time_limit)
    with working(f"placing {model_spec.name} on {cluster_spec.name} by every planner"):
        found = leagues(cluster_spec, model_spec, global_batch, options, placers=placers, rate=rate)
    if as_json:
        write_json({"leagues": [league.model_dump(mode="json") for league in found]})
    else:
        from planner.report.league import render_leagues

        write_report(lambda console: render_leagues(found, console, remark))


def _torchrec(
    wanted: bool | None, time_limit_s: float, mip_gap: float
) -> tuple[dict[str, Placer], Rater | None, str]:
    """TorchRec's planner, the best placement of its search space under its costs, and its cost
    model; or a line that says why not.

    Raises:
        UsageError: it was asked for and cannot be imported.
    """
    from planner.specs.errors import UsageError

    if wanted is False:
        return {}, None, ""
    try:
        from runtime.torchrec_planner import torchrec_cost, torchrec_placements
    except (ImportError, OSError) as error:
        # OSError: a build of fbgemm-gpu for another torch or for GPUs that are not here.
        reason = str(error).splitlines()[0]
        if wanted:
            raise UsageError(
                f"torchrec cannot be imported: {reason}",
                field="--with-torchrec",
                fix="install the extra train or train-cpu (see README), or leave the option out",
            ) from None
        return {}, None, f"TorchRec's own planner is left out: {reason}"
    from planner.baselines.torchrec_ilp import torchrec_optimal
    from planner.ilp.solve import SolverOptions

    solver = SolverOptions(mip_gap=mip_gap, time_limit_s=time_limit_s)
    return (
        {
            "torchrec": lambda ctx: torchrec_placements(ctx, time_limit_s),
            "torchrec_optimal": lambda ctx: torchrec_optimal(ctx, solver),
        },
        torchrec_cost,
        "TorchRec's ms: the largest sum of table times of any rank, by its own cost model",
    )
