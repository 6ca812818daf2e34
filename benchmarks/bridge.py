"""The bridge against plain gloo on this machine: how much of the link it uses.

For each layout of pools (ranks per pool): busbw of an all-reduce among one rank of each pool over
gloo (what the link gives), and that of the bridge's sum over all ranks, at several sizes. busbw is
2 (P-1)/P S / t for P pools and S bytes. On CPU workers the bridge's legs inside a pool run on the
same cores as gloo, so layouts with several ranks per pool show the legs' cost, not the link's.

With --device cuda the bridge sums tensors on GPU 0, which pools of one rank share, staged through
pinned host memory; gloo is measured in host memory as before.

    python -m benchmarks.bridge [--mib 1 16 64] [--repeats 5] [--device cpu|cuda]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from runtime.bridge import HierarchicalBridge, build_groups
from tests.runtime.plans import cluster_of, plan_for

LAYOUTS = ([1, 1], [1, 3], [2, 2])


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of a collective that every rank starts together."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def on_rank(
    rank: int, layout: list[int], mib: list[int], repeats: int, device: str, folder: str
) -> None:
    """Measure on one rank; rank 0 prints."""
    cores = sorted(os.sched_getaffinity(0))
    pool = next(p for p in range(len(layout)) if rank < sum(layout[: p + 1]))
    os.sched_setaffinity(0, [cores[pool % len(cores)]])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=sum(layout)
    )
    pools = {f"p{index}": (count, [0]) for index, count in enumerate(layout)}
    plan = plan_for(cluster_of(pools, rails=min(layout)), dict.fromkeys(pools, 8))
    bridge = HierarchicalBridge(build_groups(plan, rank))
    leaders = [sum(layout[:p]) for p in range(len(layout))]
    link = dist.new_group(leaders)
    for size in mib:
        host = torch.ones(size * 2**20 // 4)
        tensor = host.to(device)

        def raw(host: torch.Tensor = host) -> None:
            if rank in leaders:
                dist.all_reduce(host, group=link)

        def bridged(tensor: torch.Tensor = tensor) -> None:
            bridge.all_reduce_sum(tensor)
            if tensor.is_cuda:
                torch.cuda.synchronize()

        busbw = [
            2 * (len(layout) - 1) / len(layout) * tensor.nbytes / seconds(call, repeats) / 1e9
            for call in (raw, bridged)
        ]
        if rank == 0:
            print(
                f"{'+'.join(map(str, layout)):>8} ranks  {size:>4} MiB  gloo {busbw[0]:6.2f} GB/s  "
                f"bridge {busbw[1]:6.2f} GB/s  {busbw[1] / busbw[0]:4.0%}",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    for layout in LAYOUTS if options.device == "cpu" else LAYOUTS[:1]:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(
                on_rank,
                (layout, options.mib, options.repeats, options.device, str(Path(folder))),
                nprocs=sum(layout),
            )


if __name__ == "__main__":
    main()
