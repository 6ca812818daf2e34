"""Which constant of a device profile, moved by its error, would change the plan.

Each constant c with error e is set to c (1 + e) and c (1 - e). The chosen plan is priced again as
it stands (its step under the moved constant), and the job is planned again. What matters is the
difference between the two: a plan that looks different but is no faster than the old one by more
than the search's gap is not a change that anybody needs.

Pricing takes milliseconds, planning seconds. So all constants are priced, and those that move the
step most are planned again. A pool that the plan leaves out has a plan of its own that is priced,
so that its constants count as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel

from planner.assemble import contexts_of
from planner.evaluate import MS, Evaluation, evaluate
from planner.fingerprint import constants_used
from planner.search import SearchOptions, plan_job
from planner.specs.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, Spec
from planner.specs.cluster import ClusterSpec
from planner.specs.device import Constant, DeviceProfile, Provenance
from planner.specs.errors import HwplanError, InfeasibleError, UsageError
from planner.specs.load import load_device, standing_in
from planner.specs.model import ModelSpec
from planner.specs.plan import Placement, Plan
from planner.whatif.sweep import Progress

ASSUMED_ERROR = 0.3
"""Relative error of an assumed constant that gives none: as large as that of most scaled ones."""
MOST_REPLANNED = 20
"""Constants that are planned again, unless the caller wants more or fewer."""
BIG_SHARE = 0.01
"""A table is big from this share of all rows' bytes on."""

Part = Literal["crew", "split", "policy", "placement", "exchange"]


class Shift(Spec):
    """One constant moved one way."""

    device: str
    constant: str
    """Dotted path in the device profile."""
    provenance: Provenance
    error: PositiveFloat
    assumed_error: bool
    """The profile gives no error: ``error`` is the caller's."""
    value: NonNegativeFloat
    """After the move, base units."""
    direction: Literal["up", "down"]
    kept_step_ms: PositiveFloat | None
    """Step of the chosen plan now; None: it does not fit any more."""
    kept_shift: float
    """kept_step_ms over the step before, less 1; 0 where it does not fit."""
    replanned_step_ms: PositiveFloat | None = None
    """Step of the best plan now; None: not planned again, or nothing fits."""
    replanned: bool = False
    changed: tuple[Part, ...] = ()
    """What the best plan does differently."""
    flips: bool = False
    """The new plan is better than the old one by more than the gap, or the old one does not fit, or
    another number of devices is right."""
    gain: NonNegativeFloat = 0.0
    """kept_step_ms over replanned_step_ms, less 1: what keeping the plan would cost."""
    now: str = ""
    """What a plan that flips does instead."""


class Sensitivity(Spec):
    """Shifts, those that change the plan first, then by how far they move the step."""

    cluster: str
    model: str
    global_batch: int
    step_ms: PositiveFloat
    mip_gap: NonNegativeFloat
    shifts: tuple[Shift, ...]
    constants: NonNegativeInt
    """Of the pools' profiles that are used and have an error."""
    replanned: NonNegativeInt
    """Constants for which the job was planned again."""

    @property
    def flips(self) -> tuple[Shift, ...]:
        """Those that change the plan."""
        return tuple(shift for shift in self.shifts if shift.flips)


@dataclass(frozen=True)
class _Move:
    """A constant of a profile, moved."""

    key: str
    """The device as the cluster names it."""
    path: str
    constant: Constant
    error: float
    direction: Literal["up", "down"]

    @property
    def value(self) -> float:
        up = 1 + self.error
        # An error of 1 or more would make it zero: as far down as up, then.
        down = 1 - self.error if self.error < 1 else 1 / up
        return self.constant.value * (up if self.direction == "up" else down)

    @property
    def profile(self) -> DeviceProfile:
        """The profile with the constant moved, under a name of its own."""
        moved = self.constant.model_copy(update={"value": self.value})
        profile = _with(load_device(self.key), self.path.split("."), moved)
        name = f"{profile.name}.{self.path}.{self.direction}"
        return profile.model_copy(update={"name": name})


def _with(spec: object, path: list[str], constant: Constant) -> DeviceProfile:
    """``spec`` with the constant at ``path`` replaced."""

    def changed(node: object, rest: list[str]) -> object:
        if not rest:
            return constant
        if isinstance(node, dict):
            return {
                key: changed(value, rest[1:]) if str(key) == rest[0] else value
                for key, value in node.items()
            }
        assert isinstance(node, BaseModel)
        return node.model_copy(update={rest[0]: changed(getattr(node, rest[0]), rest[1:])})

    profile = changed(spec, path)
    assert isinstance(profile, DeviceProfile)
    return profile


def constants(spec: object, path: str = "") -> Iterator[tuple[str, Constant]]:
    """Dotted path and constant, for all constants of a profile."""
    if isinstance(spec, Constant):
        yield path, spec
        return
    fields: Mapping[str, object] = {}
    if isinstance(spec, BaseModel):
        fields = {name: getattr(spec, name) for name in type(spec).model_fields}
    elif isinstance(spec, dict):
        fields = {str(name): value for name, value in spec.items()}
    for name, value in fields.items():
        yield from constants(value, f"{path}.{name}" if path else name)


def _priced(plan: Plan) -> Evaluation:
    """A plan as it stands under the profiles of now."""
    placements = {name: pool.placements for name, pool in plan.pools.items()}
    return evaluate(contexts_of(plan), placements)


def sensitivity(
    cluster: ClusterSpec,
    model: ModelSpec,
    global_batch: int | None = None,
    options: SearchOptions | None = None,
    *,
    most: int = MOST_REPLANNED,
    assumed_error: float = ASSUMED_ERROR,
    only: str = "",
    progress: Progress | None = None,
) -> Sensitivity:
    """Move every constant that has an error, or is assumed, both ways.

    Args:
        options: of each search.
        most: constants that are planned again, those that move the step most.
        assumed_error: relative error of assumed constants that give none.
        only: constants whose ``device:path`` holds this text.
        progress: called with the searches done and their number.

    Raises:
        InfeasibleError: there is no plan to begin with.
        UsageError: an option out of range.
    """
    if most < 0 or not 0 < assumed_error < float("inf"):
        raise UsageError(
            "an option of the sensitivity is out of range",
            field="most" if most < 0 else "assumed_error",
            value=most if most < 0 else assumed_error,
            fix="give most 0 or more, and an error above 0",
        )
    options = options or SearchOptions()
    chosen = plan_job(cluster, model, global_batch, options)
    plans = [chosen, *_plans_left_out(cluster, model, global_batch, options, chosen)]
    moves = [move for move in _moves(cluster, plans, assumed_error) if only in _label(move)]
    before_ms = [_priced(plan).step_s * MS for plan in plans]
    priced = {}
    influence: dict[tuple[str, str], float] = {}
    for move in moves:
        with standing_in({move.key: move.profile}):
            evaluations = [_priced(plan) for plan in plans]
        priced[move] = _shift(move, evaluations[0], before_ms[0])
        moved = max(
            float("inf") if one.overfull else abs(one.step_s * MS / step_ms - 1)
            for one, step_ms in zip(evaluations, before_ms, strict=True)
        )
        which = (move.key, move.path)
        influence[which] = max(moved, influence.get(which, 0.0))
    chosen_few = sorted(influence, key=lambda which: (-influence[which], which))[:most]
    again = [move for move in moves if (move.key, move.path) in chosen_few]
    for done, move in enumerate(again):
        if progress is not None:
            progress(done, len(again))
        priced[move] = _replanned(priced[move], move, cluster, model, options, chosen)
    if progress is not None:
        progress(len(again), len(again))
    return Sensitivity(
        cluster=cluster.name,
        model=model.name,
        global_batch=chosen.global_batch,
        step_ms=before_ms[0],
        mip_gap=options.mip_gap,
        shifts=tuple(sorted(priced.values(), key=_rank)),
        constants=len(influence),
        replanned=len(chosen_few),
    )


def _label(move: _Move) -> str:
    return f"{move.key}:{move.path}"


def _plans_left_out(
    cluster: ClusterSpec,
    model: ModelSpec,
    global_batch: int | None,
    options: SearchOptions,
    chosen: Plan,
) -> Iterator[Plan]:
    """The plan of each pool that does not work in ``chosen``, on its own."""
    for pool in cluster.pools:
        if chosen.workplace(pool.name) is None:
            alone = cluster.with_pools((pool,))
            try:
                yield plan_job(alone, model, global_batch, replace(options, cures=False))
            except InfeasibleError:
                continue


def _moves(cluster: ClusterSpec, plans: list[Plan], assumed_error: float) -> Iterator[_Move]:
    """Both moves of every constant that some plan rests on, each profile once."""
    used: dict[str, set[int]] = {}
    for plan in plans:
        for ctx in contexts_of(plan).values():
            used.setdefault(ctx.pool.device, set()).update(map(id, constants_used(ctx)))
    for key in dict.fromkeys(pool.device for pool in cluster.pools):
        for path, constant in constants(load_device(key)):
            error = constant.error
            if error is None and constant.provenance is Provenance.ASSUMED:
                error = assumed_error
            if error is None or id(constant) not in used.get(key, set()):
                continue
            yield _Move(key, path, constant, error, "up")
            yield _Move(key, path, constant, error, "down")


def _shift(move: _Move, kept: Evaluation, before_ms: float) -> Shift:
    """The chosen plan priced under a move."""
    fits = not kept.overfull
    kept_ms = kept.step_s * MS
    return Shift(
        device=load_device(move.key).name,
        constant=move.path,
        provenance=move.constant.provenance,
        error=move.error,
        assumed_error=move.constant.error is None,
        value=move.value,
        direction=move.direction,
        kept_step_ms=kept_ms if fits else None,
        kept_shift=kept_ms / before_ms - 1 if fits else 0.0,
    )


def _replanned(
    shift: Shift,
    move: _Move,
    cluster: ClusterSpec,
    model: ModelSpec,
    options: SearchOptions,
    chosen: Plan,
) -> Shift:
    """The shift with the job planned again under its move."""
    with standing_in({move.key: move.profile}):
        try:
            plan = plan_job(cluster, model, chosen.global_batch, options)
        except HwplanError as error:
            return shift.model_copy(
                update={"replanned": True, "flips": True, "now": f"no plan: {error.problem}"}
            )
    changed = differences(chosen, plan)
    step_ms, kept_ms = plan.predicted.step_ms, shift.kept_step_ms
    # Both searches stop within their gap: the new one may miss the old plan.
    gain = 0.0 if kept_ms is None else max(0.0, kept_ms / step_ms - 1)
    others = {name: pool.ranks for name, pool in plan.pools.items()} != {
        name: pool.ranks for name, pool in chosen.pools.items()
    }
    needed = kept_ms is None or gain > options.mip_gap or others
    flips = bool(changed) and needed
    return shift.model_copy(
        update={
            "replanned": True,
            "replanned_step_ms": step_ms,
            "changed": changed,
            "gain": gain,
            "flips": flips,
            "now": _told(plan, changed) if flips else "",
        }
    )


def differences(before: Plan, after: Plan) -> tuple[Part, ...]:
    """What two plans of one job do differently; of the tables only the big ones count, and which
    of the equal ranks hold them does not."""
    parts: list[Part] = []
    if _crew(before) != _crew(after):
        parts.append("crew")
    shared = [name for name in before.pools if name in after.pools]
    pairs = [(before.pools[name], after.pools[name]) for name in shared]
    if any(one.local_batch != other.local_batch for one, other in pairs):
        parts.append("split")
    if any(one.policy != other.policy for one, other in pairs):
        parts.append("policy")
    big = big_tables(before.model)
    if any(
        _way(one.placements[table]) != _way(other.placements[table])
        for one, other in pairs
        for table in big
    ):
        parts.append("placement")
    if before.exchange.embedding_interval_steps != after.exchange.embedding_interval_steps:
        parts.append("exchange")
    return tuple(parts)


def _crew(plan: Plan) -> dict[str, int]:
    return {name: pool.nodes for name, pool in plan.pools.items()}


def _way(placement: Placement) -> dict[str, object]:
    return placement.model_dump(exclude={"ranks"})


def big_tables(model: ModelSpec) -> list[str]:
    """Tables with at least ``BIG_SHARE`` of all rows' bytes."""
    sizes = {table.name: table.num_embeddings * table.embedding_dim for table in model.all_tables}
    least = BIG_SHARE * sum(sizes.values())
    return [name for name, size in sizes.items() if size >= least]


def _told(plan: Plan, changed: tuple[Part, ...]) -> str:
    """The new plan in a few words: who works, with how many samples, and how."""
    pools = ", ".join(
        f"{name} {pool.ranks} x {pool.local_batch:,} ({pool.policy.compute_precision}"
        f"{', recomputed' if pool.policy.recompute else ''})"
        for name, pool in plan.pools.items()
    )
    return f"other {', '.join(changed)}: {pools}"


def _rank(shift: Shift) -> tuple[object, ...]:
    return (
        not shift.flips,
        shift.kept_step_ms is not None,
        -shift.gain if shift.flips else 0.0,
        -abs(shift.kept_shift),
        shift.device,
        shift.constant,
        shift.direction,
    )
