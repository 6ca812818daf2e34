"""What runs in every Ray Train worker: pin it, build its process groups, run its tasks in turn."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from planner.specs.errors import HwplanError, RunError
from planner.specs.plan import Plan
from runtime.bridge import HierarchicalBridge, build_groups
from runtime.heartbeat import Heartbeat
from runtime.observe.prometheus import RankMetrics
from runtime.pools import Slot, own_address
from runtime.store import JobStore
from trainers.rank import RankEnv
from trainers.task import TrainTask

WAIT_FOR_OTHERS = timedelta(days=7)
"""An idle worker waits for the working ones as long as they take; their own time-outs apply."""


@dataclass(frozen=True)
class Job:
    """What the driver hands to every worker."""

    tasks: tuple[TrainTask, ...]
    """Run one after the other; a task may leave workers idle."""
    slots: tuple[Slot, ...]
    """Of every worker, in Ray's rank order."""
    store_address: str
    store_port: int
    name: str
    """Tells jobs apart in the metrics."""
    collective_timeout: timedelta
    """A collective that lasts longer ends the job: some rank hangs."""


def run_worker(config: dict[str, Any]) -> None:
    """The training function of Ray Train; ``config["job"]`` is the Job.

    Raises:
        RunError: this worker is not on its pool's node. Whatever a task raises.
    """
    job: Job = config["job"]
    index = ray.train.get_context().get_world_rank()
    store = JobStore.join(job.store_address, job.store_port)
    try:
        slot = job.slots[index]
        check_node(slot, index, ray.get_runtime_context().get_node_id())
        address = own_address()
        device = _take_device(slot, address)
        store.put(
            {
                "kind": "placed",
                "worker": index,
                "pool": slot.pool,
                "node": address,
                "pid": os.getpid(),
                "cores": sorted(os.sched_getaffinity(0)),
            }
        )
        heartbeat = Heartbeat(store, index)
        try:
            for number, task in enumerate(job.tasks):
                _run_task(number, task, job, slot, device, store, heartbeat)
        finally:
            heartbeat.close()
    except BaseException as error:
        store.put({"kind": "error", "worker": index, **describe(error)})
        raise


def check_node(slot: Slot, index: int, node_id: str) -> None:
    """Whether Ray placed this worker where the plan wants it.

    Raises:
        RunError: naming worker, pool and both nodes.
    """
    if node_id != slot.node.node_id:
        raise RunError(
            f"worker {index} belongs to pool {slot.pool} on {slot.node}, "
            f"but Ray started it on node {node_id}",
            fix="do not share the cluster's nodes with jobs that change their labels meanwhile",
        )


def world_ranks(plan: Plan, slots: Sequence[Slot]) -> list[int | None]:
    """Per slot, the plan's world rank; None where the plan leaves the device out."""
    devices = {part.name: part.devices for part in plan.parts}
    first_ranks = dict(zip(devices, accumulate(devices.values(), initial=0), strict=False))
    return [
        first_ranks[slot.pool] + slot.pool_rank
        if slot.pool_rank < devices.get(slot.pool, 0)
        else None
        for slot in slots
    ]


def own_cores(cores: Sequence[int], local_rank: int, workers: int) -> list[int]:
    """One worker's cores: its own where there are enough, else all of them, shared."""
    return list(cores[local_rank::workers] if len(cores) >= workers else cores)


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as plain data: an HwplanError keeps its fields."""
    if isinstance(error, HwplanError):
        return {
            "type": type(error).__name__,
            "problem": error.render(),
            "exit_code": error.exit_code,
            "out_of_memory": False,
            "traceback": traceback.format_exc(),
        }
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return {
        "type": type(error).__name__,
        "problem": f"{type(error).__name__}: {error}{where}",
        "exit_code": None,
        "out_of_memory": isinstance(error, (MemoryError, torch.OutOfMemoryError)),
        "traceback": traceback.format_exc(),
    }


def _take_device(slot: Slot, node_address: str) -> torch.device:
    """Pin the process and choose its device.

    All threads are pinned, Ray's too: they would steal time from another pool.
    """
    os.environ["LOCAL_RANK"] = str(slot.local_rank)
    os.environ["LOCAL_WORLD_SIZE"] = str(slot.workers_on_node)
    if node_address.startswith("127."):
        # Gloo would look up the host name, which need not resolve to this interface.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if slot.cpu_cores is None:
        device: torch.device = ray.train.torch.get_device()
        torch.cuda.set_device(device)
        return device
    cores = own_cores(slot.cpu_cores, slot.local_rank, slot.workers_on_node)
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
    except OSError as error:
        raise RunError(
            f"cannot pin a worker of pool {slot.pool} to cores {cores} "
            f"on {slot.node.address}: {error.strerror}",
            fix="list cores that this node has in the cluster file's cpu_cores",
        ) from None
    return torch.device("cpu")


def _run_task(
    number: int,
    task: TrainTask,
    job: Job,
    slot: Slot,
    device: torch.device,
    store: JobStore,
    heartbeat: Heartbeat,
) -> None:
    """Run one task in a world of its own: exactly the ranks of its plan."""
    from trainers.loop import train_rank

    plan = task.plan
    rank = world_ranks(plan, job.slots)[job.slots.index(slot)]
    done = f"task/{number}/done"
    if rank is None:
        store.tcp.wait([done], WAIT_FOR_OTHERS)
        return
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"task/{number}", store.tcp),
        rank=rank,
        world_size=plan.world_size,
        timeout=job.collective_timeout,
    )
    try:
        world = dist.distributed_c10d._get_default_group()
        groups = build_groups(plan, rank, job.collective_timeout)
        bridge = HierarchicalBridge(groups)
        pool, pool_rank = plan.pool_of_rank(rank)
        environment = RankEnv(
            world_rank=rank,
            pool=pool,
            pool_rank=pool_rank,
            device=device,
            world_group=world,
            pool_group=groups.pool,
            replica_group=groups.replica,
            bridge=bridge,
        )
        if rank == 0:
            store.put({"kind": "started", "task": number})
        measured = bridge.measure()
        if rank == 0 and measured is not None and plan.cluster.bridge is not None:
            store.put(
                {
                    "kind": "bridge",
                    "task": number,
                    "measured_bytes_per_s": measured,
                    "planned_bytes_per_s": plan.cluster.bridge.bytes_per_s,
                }
            )

        published = RankMetrics(job.name, pool, rank, plan.pools[pool].local_batch)

        def report(metrics: dict[str, Any]) -> None:
            heartbeat.step = metrics["step"]
            published.observe(metrics, bridge.traffic.bytes, bridge.traffic.seconds)
            if rank == 0:
                store.put({"kind": "metrics", "task": number, **metrics})

        def tell(event: dict[str, Any]) -> None:
            store.put({**event, "task": number})

        result = train_rank(task, environment, report, store.asked_to_stop, tell)
        if rank == 0:
            store.put(
                {
                    "kind": "result",
                    "task": number,
                    "result": asdict(result),
                    "bridge": asdict(bridge.traffic),
                }
            )
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank == 0:
        store.tcp.set(done, "")
