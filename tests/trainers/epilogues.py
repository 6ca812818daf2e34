"""Epilogues written with torch, to compare kernels with."""

from __future__ import annotations

import torch

from planner.specs.kernels import Epilogue


def finish(
    z: torch.Tensor,
    epilogue: Epilogue,
    bias: torch.Tensor,
    x0: torch.Tensor,
    xl: torch.Tensor,
) -> torch.Tensor:
    if epilogue is not Epilogue.NONE:
        z = z + bias
    if epilogue is Epilogue.BIAS_RELU:
        return z.relu()
    if epilogue is Epilogue.BIAS_SIGMOID:
        return z.sigmoid()
    return x0 * z + xl if epilogue is Epilogue.CROSS else z
