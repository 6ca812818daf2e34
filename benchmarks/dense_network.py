"""A model's dense network on the GPU at hand, forward and backward: planned kernels against the
vendor's library, measured and predicted.

    python -m benchmarks.dense_network --device h200 --model dlrm --batch 2048 8192 27648

``graph``: replays of a CUDA graph (the GPU's time alone); ``eager``: launched by the host.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from planner.cost.context import PoolContext
from planner.cost.dense import dense_network
from planner.cost.dense_time import backward_seconds, forward_seconds
from planner.kernels.planned import planned_kernels
from planner.specs.cluster import PoolSpec
from planner.specs.load import load_device, load_model
from planner.specs.plan import MemoryPolicy
from planner.specs.units import Dtype
from trainers.kernels.launch import device_arch
from trainers.kernels.linear import KernelTable
from trainers.kernels.swap import use_kernels
from trainers.kernels.timing import least_us
from trainers.models.build import initialise_dense
from trainers.models.networks import build_network
from trainers.policy import ComputePolicy

EAGER_STEPS = 30


def step_of(network: nn.Module, ctx: PoolContext) -> Callable[[], None]:
    """Forward and backward of one batch."""
    policy = ComputePolicy.of(ctx.policy)
    policy.apply_matmul_precision()
    dense = torch.randn(ctx.local_batch, ctx.model.dense_features, device="cuda")
    pooled = torch.randn(ctx.local_batch, ctx.model.pooled_width, device="cuda")
    pooled.requires_grad_()
    labels = torch.rand(ctx.local_batch, device="cuda").round()

    def step() -> None:
        for parameter in (*network.parameters(), pooled):
            parameter.grad = None
        with policy.autocast(dense.device):
            logits = network(dense, lambda: pooled)
        nn.functional.binary_cross_entropy_with_logits(logits.float(), labels).backward()

    return step


def eager_us(step: Callable[[], None]) -> float:
    """Wall time of one step."""
    step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(EAGER_STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / EAGER_STEPS * 1e6


def graph_us(step: Callable[[], None]) -> float:
    """GPU time of one step."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    return least_us(step, 20_000.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", required=True)
    parser.add_argument("--model", default="dlrm")
    parser.add_argument("--batch", type=int, nargs="+", default=[2048, 8192, 27648])
    parser.add_argument("--dtype", type=Dtype, nargs="+", default=[Dtype.BF16, Dtype.TF32])
    arguments = parser.parse_args()
    device, model = load_device(arguments.device), load_model(arguments.model)
    blocks = dense_network(model).blocks
    print("dtype   batch  kernels       own   graph us  eager us  predicted us")
    for dtype in arguments.dtype:
        for batch in arguments.batch:
            for kernels in ("vendor", "preselected"):
                policy = MemoryPolicy(compute_precision=dtype, kernels=kernels)
                pool = PoolSpec(name="p", device=device.name, nodes=1, devices_per_node=1)
                ctx = PoolContext(pool, device, model, batch, policy)
                network = build_network(model)
                initialise_dense(network, 0)
                network.to("cuda")
                listed = planned_kernels(replace(ctx), [dtype])
                table = KernelTable(listed, dtype, device_arch(0))
                if kernels == "preselected":
                    use_kernels(network, table)
                step = step_of(network, ctx)
                predicted = forward_seconds(ctx, blocks) + backward_seconds(ctx, blocks)
                print(
                    f"{dtype:<6} {batch:>6}  {kernels:<12} {table.own:>4} "
                    f"{graph_us(step):>10.0f} {eager_us(step):>9.0f} {predicted * 1e6:>13.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
