"""Put planned kernels under a network's linear layers; names and parameters stay as they are."""

from __future__ import annotations

from torch import nn

from planner.specs.kernels import Epilogue
from trainers.kernels.linear import KernelTable, PlannedLinear
from trainers.models.networks import CrossTail


def use_kernels(network: nn.Module, table: KernelTable) -> None:
    """Replace every linear layer of ``network``, taking in the ReLU or cross tail behind it."""
    for module in list(network.modules()):
        if isinstance(module, nn.Sequential):
            _fuse_activations(module, table)
        for name, child in list(module.named_children()):
            if isinstance(child, CrossTail):
                setattr(module, name, PlannedLinear(child, Epilogue.CROSS, table))
            elif isinstance(child, nn.Linear):
                epilogue = Epilogue.NONE if child.bias is None else Epilogue.BIAS
                setattr(module, name, PlannedLinear(child, epilogue, table))


def _fuse_activations(layers: nn.Sequential, table: KernelTable) -> None:
    for index in range(len(layers) - 1):
        linear, activation = layers[index], layers[index + 1]
        if isinstance(linear, nn.Linear) and isinstance(activation, nn.ReLU):
            layers[index] = PlannedLinear(linear, Epilogue.BIAS_RELU, table)
            layers[index + 1] = nn.Identity()
