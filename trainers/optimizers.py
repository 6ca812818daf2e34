"""Optimizers: fused into the embedding backward, and ordinary ones for everything dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from planner.specs.errors import UsageError
from planner.specs.model import DenseOptimizer, SparseOptimizer
from trainers.models.build import EMBEDDINGS
from trainers.shards import Shard

_DENSE: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}
_SPARSE: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
}
CPU_SPARSE = ("sgd", "adagrad", "rowwise_adagrad")
"""Optimizers that FBGEMM's CPU kernels have."""


def _arguments(spec: DenseOptimizer | SparseOptimizer) -> dict[str, float]:
    arguments = {"lr": spec.learning_rate}
    return arguments if spec.name == "sgd" else {**arguments, "eps": spec.eps}


def fuse_sparse_optimizer(
    embeddings: nn.Module, spec: SparseOptimizer, plan: ShardingPlan, device: torch.device
) -> None:
    """Have the tables updated inside their backward kernels; call it before sharding.

    Raises:
        UsageError: the device or a placement has no such optimizer.
    """
    if device.type == "cpu" and spec.name not in CPU_SPARSE:
        raise UsageError(
            "the embedding kernels for CPU have no such optimizer",
            field="optimizer.sparse.name",
            value=spec.name,
            fix=f"use one of {', '.join(CPU_SPARSE)} in the model, or train on GPUs",
        )
    replicated = sorted(
        name
        for name, sharding in plan.plan[EMBEDDINGS].items()
        if sharding.sharding_type == "data_parallel"
    )
    if replicated and spec.name == "adam":
        raise UsageError(
            f"table {replicated[0]} is data_parallel, and Adam on it would also move rows that no "
            "sample touched",
            field="optimizer.sparse.name",
            value=spec.name,
            fix="take data_parallel out of the tables' constraints.sharding_types and plan again",
        )
    apply_optimizer_in_backward(_SPARSE[spec.name], embeddings.parameters(), _arguments(spec))


def dense_optimizer(
    network: nn.Module, spec: DenseOptimizer, dealt_among: dist.ProcessGroup | None = None
) -> torch.optim.Optimizer:
    """The optimizer of the dense network.

    Args:
        dealt_among: ranks among which whole parameters are dealt, the largest first and to the rank
            with the fewest elements so far: each keeps the state of its own, updates these and
            broadcasts them.
    """
    parameters = list(network.parameters())
    arguments: dict[str, Any] = _arguments(spec)
    if parameters[0].device.type == "cpu" and not isinstance(parameters[0], DTensor):
        # One pass over memory instead of one per arithmetic operation (Adagrad has it on CPU only,
        # and parameters that FSDP has cut have it for Adam only).
        arguments["fused"] = True
    rule = _DENSE[spec.name]
    if dealt_among is None:
        return rule(parameters, **arguments)
    # Not in buckets: parameters would lose the alignment that matrix kernels count on.
    return ZeroRedundancyOptimizer(
        parameters, optimizer_class=rule, process_group=dealt_among, **arguments
    )


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer that makes its state in its first step make it now; nothing moves.

    With a dealt one every rank of the pool must call it.
    """
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    if not isinstance(inner, torch.optim.Adam):
        return  # SGD without momentum has none, Adagrad has made its own
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class ReplicatedTables:
    """Optimizer of the data-parallel tables: the sparse optimizer's rule on dense gradients.

    FBGEMM keeps the tables of a group in one flat parameter; each table is a view of it here, so
    that row-wise state stays per row.
    """

    def __init__(self, shards: Sequence[Shard], spec: SparseOptimizer) -> None:
        mine = [shard for shard in shards if shard.replicated]
        self._views = [(nn.Parameter(shard.weight), shard.kernel.weights) for shard in mine]
        self._optimizer: torch.optim.Optimizer | None = None
        if not mine:
            return
        arguments: dict[str, Any] = _arguments(spec)
        self._optimizer = _SPARSE[spec.name]([view for view, _ in self._views], **arguments)
        if spec.name in ("adagrad", "rowwise_adagrad"):
            for shard, (view, _) in zip(mine, self._views, strict=True):
                accumulated = self._optimizer.state[view]["sum"]
                row_wise = spec.name == "rowwise_adagrad"
                shard.state = (accumulated.view(-1) if row_wise else accumulated,)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for _, flat in self._views:
            flat.grad = None

    def step(self) -> None:
        """Update every data-parallel table."""
        if self._optimizer is None:
            return
        for view, flat in self._views:
            if flat.grad is not None:
                offset = view.storage_offset() - flat.storage_offset()
                view.grad = flat.grad[offset : offset + view.numel()].view_as(view)
        self._optimizer.step()


class TrainOptimizer:
    """What the training loop steps: dense network and data-parallel tables.

    Sharded tables are updated inside backward.

    Args:
        gradient_scale: factor on the dense gradients before the step (undoes a loss scale where
            no gradient exchange does).
    """

    def __init__(
        self,
        dense: torch.optim.Optimizer,
        replicated: ReplicatedTables,
        gradient_scale: float = 1.0,
    ) -> None:
        self.dense = dense
        self.replicated = replicated
        self.gradient_scale = gradient_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.dense.zero_grad(set_to_none=set_to_none)
        self.replicated.zero_grad()

    def step(self) -> None:
        """Apply the gradients of this step."""
        if self.gradient_scale != 1.0:
            for group in self.dense.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self.gradient_scale)
        self.dense.step()
        self.replicated.step()
