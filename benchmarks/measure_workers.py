"""Measure CPU workers that share a core, for ``scale_up`` and ``framework`` of
``cluster_configs/devices/cpu.yaml`` and for a cluster file's ``bridge``; prints the values.

    python -m benchmarks.measure_workers

Collectives: all ranks on one core, so wall time over ranks is what one rank's part costs that core,
process switches included. Bridge: two ranks on two cores, wall time. Framework: training steps of
a model so small that they are nothing but framework, less what the profile says of its kernels
(measure those first: ``benchmarks.measure_cpu``). Everything is a median, as a
step's time is; wants a quiet machine with two cores and the training extra.
"""

from __future__ import annotations

import os
import pickle
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from numpy.typing import NDArray

from benchmarks.fitting import mean_relative_error, pattern_search
from planner.baselines.naive import naive_port
from planner.cost.graph import host_operators
from planner.specs.cluster import ClusterSpec, PoolSpec
from planner.specs.load import load_model
from planner.specs.model import ModelSpec
from planner.specs.plan import Plan

Array = NDArray[np.float64]
COLLECTIVE_BYTES = (4096, 65536, 1 << 20, 1 << 22, 1 << 24, 1 << 25)
RANKS = (2, 3, 4)
CORE, OTHER_CORE = 1, 0
HALVES = {"all_reduce": 2, "pool_sum": 2, "all_to_all": 1, "reduce_scatter": 1, "all_gather": 1}
REPEATS = 21


def on_cores(work: Callable[..., Any], cores: Sequence[int], *arguments: Any) -> Any:
    """Run ``work(rank, *arguments)`` in one gloo process per entry of ``cores``, pinned to it;
    what rank 0 returned."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        answer = Path(folder) / "answer"
        mp.spawn(_worker, (work, cores, port, answer, arguments), nprocs=len(cores))
        return pickle.loads(answer.read_bytes())


def _worker(
    rank: int, work: Callable[..., Any], cores: Sequence[int], port: int, answer: Path, rest: Any
) -> None:
    from trainers.setup import prepare_host

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.sched_setaffinity(0, {cores[rank]})
    prepare_host(torch.device("cpu"))
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(cores)
    )
    found = work(rank, *rest)
    dist.barrier()
    if rank == 0:
        answer.write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def wall_seconds(function: Callable[[], object], inner: int = 1) -> float:
    """Median wall seconds of one call on all ranks together, from a common start until the last
    one is done: in a step, nothing else runs meanwhile."""
    function()

    def timed(calls: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        dist.barrier()
        return time.perf_counter() - start

    both, barrier = (
        statistics.median(timed(calls) for _ in range(REPEATS)) for calls in (inner, 0)
    )
    return max(both - barrier, 0.0) / inner


def time_collectives(_rank: int) -> list[tuple[str, int, int, float]]:
    """(collective, ranks, bytes, wall seconds) over sizes."""
    ranks = dist.get_world_size()
    rows = []
    for size in COLLECTIVE_BYTES:
        floats = size // 4 // ranks * ranks
        whole, other = torch.zeros(floats), torch.zeros(floats)
        part = torch.zeros(floats // ranks)

        def reduce_and_broadcast(whole: torch.Tensor = whole) -> None:
            dist.reduce(whole, 0)
            dist.broadcast(whole, 0)

        operations: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "pool_sum": reduce_and_broadcast,
            "all_to_all": partial(dist.all_to_all_single, other, whole),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
        }
        for name, operation in operations.items():
            seconds = wall_seconds(operation)
            rows.append((name, ranks, floats * 4, seconds))
    return rows


def measure_collectives() -> dict[str, dict[str, float]]:
    """Constants of one rank's part, all ranks on one core."""
    rows = [row for ranks in RANKS for row in on_cores(time_collectives, [CORE] * ranks)]
    found = {}
    for name, halves in HALVES.items():
        part = np.array([row[1:] for row in rows if row[0] == name], dtype=np.float64)
        ranks, seconds = part[:, 0], part[:, 2] / part[:, 0]
        wire = halves * (ranks - 1) / ranks * part[:, 1]

        def predict(c: Array, ranks: Array = ranks, wire: Array = wire) -> Array:
            return c[0] + c[1] * (ranks - 1) + wire / c[2]

        constants = pattern_search(
            lambda c, p=predict, t=seconds: float(np.mean(np.abs(np.log(p(c) / t)))),
            np.array([5e-5, 5e-5, 1e9]),
        )
        found[name] = {
            "latency_s": float(constants[0]),
            "per_rank_latency_s": float(constants[1]),
            "bytes_per_s": float(constants[2]),
            "error": mean_relative_error(predict(constants), seconds),
        }
    return found


def time_leaders(_rank: int) -> list[tuple[int, float]]:
    """(bytes, median seconds of an all-reduce of two ranks that are both ready)."""
    rows = []
    for size in COLLECTIVE_BYTES:
        whole = torch.zeros(size // 4)
        seconds = []
        for _ in range(REPEATS):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(whole)
            seconds.append(time.perf_counter() - start)
        rows.append((size, statistics.median(seconds)))
    return rows


def measure_bridge() -> dict[str, float]:
    """Two leaders on two cores: seconds = 2 (latency + bytes / 2 / bandwidth)."""
    part = np.array(on_cores(time_leaders, [OTHER_CORE, CORE]), dtype=np.float64)

    def predict(c: Array) -> Array:
        return 2 * c[0] + part[:, 0] / c[1]

    constants = pattern_search(
        lambda c: float(np.mean(np.abs(np.log(predict(c) / part[:, 1])))), np.array([2e-4, 1e9])
    )
    return {
        "latency_us": constants[0] * 1e6,
        "gbps": constants[1] * 8e-9,
        "error": mean_relative_error(predict(constants), part[:, 1]),
    }


def tiny_model(layers: int) -> ModelSpec:
    """26 tables of width 4 and a top MLP of ``layers`` layers of 8."""
    changes = {
        "name": f"tiny_{layers}",
        "bottom_mlp": (8, 4),
        "top_mlp": (*(8,) * layers, 1),
        "tables": ({"name": "cat", "count": 26, "num_embeddings": 1000, "embedding_dim": 4},),
    }
    return ModelSpec.model_validate(load_model("dlrm_criteo_small").model_dump() | changes)


def one_pool(model: ModelSpec, ranks: int, batch: int) -> Plan:
    """The recipe's plan for workers that share one core."""
    pool = PoolSpec(name="p", device="cpu", nodes=1, devices_per_node=ranks, cpu_cores=(CORE,))
    cluster = ClusterSpec(name="one_core", pools=(pool,), reference_device="cpu")
    return naive_port(cluster, model, ranks * batch)


def time_steps(rank: int, plan: Plan) -> tuple[float, float]:
    """Seconds of a step, wall over ranks; CPU seconds of making one rank's batch."""
    from runtime.bridge import HierarchicalBridge, build_groups
    from trainers.data.source import open_source
    from trainers.loop import Stepper, rank_slice
    from trainers.rank import RankEnv
    from trainers.setup import set_up
    from trainers.task import TrainTask

    groups = build_groups(plan, rank)
    environment = RankEnv(
        world_rank=rank,
        pool="p",
        pool_rank=rank,
        device=torch.device("cpu"),
        world_group=dist.group.WORLD,
        pool_group=groups.pool,
        replica_group=groups.replica,
        bridge=HierarchicalBridge(groups),
    )
    trainable = set_up(plan, environment, 0)
    trainable.model.train()
    task = TrainTask(plan, steps=10_000, seed=0)
    batches = open_source(task).train_batches(rank_slice(task, environment))
    stepper = Stepper(trainable, environment, batches)
    step_s = wall_seconds(stepper.step, inner=20) / plan.world_size
    data_s = np.inf
    for _ in range(10):
        start = time.thread_time()
        for _ in islice(batches, 5):
            pass
        data_s = min(data_s, (time.thread_time() - start) / 5)
    if trainable.dense_exchange is not None:
        trainable.dense_exchange.close()
    return step_s, float(data_s)


def framework_seconds(model: ModelSpec, ranks: int) -> float:
    """One rank's part of a step of two samples, less what the profile says of its kernels and
    collectives."""
    plan = one_pool(model, ranks, batch=2)
    predicted = plan.pools["p"].predicted
    kernels_s = (predicted.step_ms - predicted.breakdown_ms["host"]) / ranks * 1e-3
    step_s, _ = on_cores(time_steps, [CORE] * ranks, plan)
    return float(step_s) - kernels_s


def measure_framework() -> dict[str, float]:
    """Constants of the ``framework`` section."""
    few, many, real = tiny_model(2), tiny_model(22), load_model("dlrm_criteo_small")
    alone_s = framework_seconds(few, 1)
    op_s = (framework_seconds(many, 1) - alone_s) / (host_operators(many) - host_operators(few))
    small, large = 2, 1026
    data_s = [on_cores(time_steps, [CORE], one_pool(few, 1, batch))[1] for batch in (small, large)]
    id_s = (data_s[1] - data_s[0]) / (26 * (large - small))
    return {
        "step_s": alone_s - op_s * host_operators(few) - 26 * small * id_s,
        "op_s": op_s,
        "id_s": id_s,
        "sharded_s": framework_seconds(real, 3) - framework_seconds(real, 1),
    }


def main() -> None:
    sections = {
        "framework": measure_framework(),
        **measure_collectives(),
        "bridge": measure_bridge(),
    }
    for name, constants in sections.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in constants.items()))


if __name__ == "__main__":
    main()
