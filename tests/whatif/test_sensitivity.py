from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from whatif_jobs import EXACT, TINY, cpu_cluster, cpu_pool

from planner.search import SearchOptions, plan_job
from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.device import Provenance
from planner.specs.errors import UsageError
from planner.specs.load import DEVICES, load_device, standing_in
from planner.specs.model import ModelSpec
from planner.whatif.sensitivity import Sensitivity, big_tables, constants, differences, sensitivity


def device_file(folder: Path, name: str, like: str, **values: float) -> str:
    """A profile that differs in some constants, by dotted path with __."""
    profile: dict[str, Any] = yaml.safe_load((DEVICES / f"{like}.yaml").read_text("utf-8"))
    profile["name"] = name
    for path, value in values.items():
        *parents, last = path.split("__")
        node = profile
        for parent in parents:
            node = node[parent]
        node[last]["value"] = value
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(profile), "utf-8")
    return str(file)


@pytest.fixture(scope="module")
def rivals(tmp_path_factory: pytest.TempPathFactory) -> ClusterSpec:
    """A worker, and one whose products are 3 % slower, too far apart to work together."""
    folder = tmp_path_factory.mktemp("devices")
    efficiency = load_device("cpu").gemm.compute_efficiency.value
    slower = device_file(folder, "slower", "cpu", gemm__compute_efficiency=efficiency * 0.97)
    return cpu_cluster(cpu_pool("a", 1, 1), cpu_pool("b", 1, 1, device=slower), gbps=0.001)


@pytest.fixture(scope="module")
def found(rivals: ClusterSpec) -> Sensitivity:
    return sensitivity(rivals, TINY, options=EXACT, most=6)


def test_a_constant_that_flips_the_plan_is_found(
    found: Sensitivity, rivals: ClusterSpec, tmp_path: Path
) -> None:
    before = plan_job(rivals, TINY, options=EXACT)
    assert list(before.pools) == ["a"] and found.step_ms == before.predicted.step_ms
    shifts = {(s.device, s.constant, s.direction): s for s in found.shifts}
    flip = shifts["cpu", "gemm.compute_efficiency", "down"]
    # The proof: with that constant written into the profile, pool b is the right one.
    constant = load_device("cpu").gemm.compute_efficiency
    assert flip.error == constant.error == 0.1 and not flip.assumed_error
    assert flip.value == pytest.approx(constant.value * 0.9)
    worse = device_file(tmp_path, "worse", "cpu", gemm__compute_efficiency=flip.value)
    pools = rivals.pools[0].model_copy(update={"device": worse}), rivals.pools[1]
    alone = [plan_job(cpu_cluster(pool), TINY, options=EXACT).predicted.step_ms for pool in pools]
    assert flip.kept_step_ms == pytest.approx(alone[0])
    assert flip.replanned_step_ms == pytest.approx(alone[1])
    assert flip.gain == pytest.approx(alone[0] / alone[1] - 1) and flip.gain > 0.02
    assert flip.flips and flip.changed == ("crew",) and "b 1 x 1,920" in flip.now
    # The other way it only confirms the plan; the rival's constant, though unused, counts too.
    assert not shifts["cpu", "gemm.compute_efficiency", "up"].flips
    assert shifts["slower", "gemm.compute_efficiency", "up"].flips


def test_ranked_and_counted(found: Sensitivity) -> None:
    flips = [shift.flips for shift in found.shifts]
    assert flips == sorted(flips, reverse=True)
    gains = [shift.gain for shift in found.flips]
    assert gains == sorted(gains, reverse=True)
    moved = [abs(shift.kept_shift) for shift in found.shifts if not shift.flips]
    assert moved == sorted(moved, reverse=True)
    assert found.replanned == 6 and sum(shift.replanned for shift in found.shifts) == 12
    assert len(found.shifts) == 2 * found.constants
    assert {shift.device for shift in found.shifts} == {"cpu", "slower"}


def test_deterministic(found: Sensitivity, rivals: ClusterSpec) -> None:
    assert sensitivity(rivals, TINY, options=EXACT, most=6) == found


def test_only_constants_in_use_with_an_error_move(found: Sensitivity) -> None:
    moved = {shift.constant for shift in found.shifts}
    assert "watts" not in moved
    assert "network.latency_s" not in moved, "one node"
    assumed = [s for s in found.shifts if s.assumed_error]
    assert assumed and {s.provenance for s in assumed} == {Provenance.ASSUMED}
    assert {s.error for s in assumed} == {0.3}


def test_a_plan_that_no_longer_fits_flips() -> None:
    """A table that fills the device: with a larger reserve it must go to host memory."""
    cluster = ClusterSpec(
        name="one", pools=(PoolSpec(name="p", device="h200", nodes=1, devices_per_node=1),)
    )
    fields = TINY.model_dump()
    rows = 125 * 10**9 // 512
    fields["tables"][0].update(count=1, num_embeddings=rows, embedding_dim=128)
    full = ModelSpec.model_validate(fields)
    options = SearchOptions(kernels="vendor")
    found = sensitivity(cluster, full, options=options, only="memory.allocator_reserve")
    up, down = sorted(found.shifts, key=lambda shift: shift.direction, reverse=True)
    assert up.flips and up.kept_step_ms is None and "placement" in up.changed
    assert up.replanned_step_ms is not None and up.replanned_step_ms >= found.step_ms
    assert not down.flips and found.constants == 1


def test_differences_ignore_small_tables_and_equal_ranks() -> None:
    plan = plan_job(cpu_cluster(cpu_pool("a", 1, 2)), TINY, options=EXACT)
    pool = plan.pools["a"]
    assert big_tables(plan.model) == [table.name for table in plan.model.all_tables]
    name, placement = next(iter(pool.placements.items()))
    other_rank = placement.model_copy(update={"ranks": tuple(1 - r for r in placement.ranks)})
    other_way = placement.model_copy(update={"cache_load_factor": 0.5})

    def changed(**fields: object) -> tuple[str, ...]:
        update = {"a": pool.model_copy(update=fields)}
        return differences(plan, plan.model_copy(update={"pools": update}))

    assert changed() == ()
    assert changed(placements={**pool.placements, name: other_rank}) == ()
    assert changed(placements={**pool.placements, name: other_way}) == ("placement",)
    assert changed(nodes=2) == ("crew",)
    assert changed(local_batch=7) == ("split",)
    policy = pool.policy.model_copy(update={"recompute": ("bottom", "top")})
    assert changed(policy=policy) == ("policy",)


def test_stand_ins_end_with_their_context() -> None:
    real = load_device("h200")
    other = real.model_copy(update={"name": "h200.other"})
    with pytest.raises(ZeroDivisionError), standing_in({"h200": other}):
        assert load_device("h200") is other and load_device("b200").name == "b200"
        raise ZeroDivisionError
    assert load_device("h200") is real


def test_constants_are_named_by_their_path() -> None:
    paths = dict(constants(load_device("h200")))
    assert paths["gemm.launch_s"] is load_device("h200").gemm.launch_s
    assert "compute.peak_flops_per_s.bf16" in paths
    assert "scale_up.collectives.all_reduce.latency_s" in paths


@pytest.mark.parametrize(
    ("options", "word"), [({"most": -1}, "most"), ({"assumed_error": 0.0}, "assumed_error")]
)
def test_options_out_of_range(options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        sensitivity(cpu_cluster(cpu_pool("a", 1, 1)), TINY, **options)
