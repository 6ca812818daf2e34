"""From a kernel config to Triton's compiler: signature, constants, alignment hints, options.

Everything that decides what is compiled stands in ``KernelKey``, so that the kernels compiled ahead
of time are, byte for byte, those that a worker would compile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from planner.specs.errors import UsageError
from planner.specs.kernels import Epilogue, Gemm, Layout, TileConfig
from planner.specs.units import Dtype
from trainers.kernels.gemm import gemm, gemm_reduce

REDUCE_BLOCK = 1024
"""Elements of C that one program of the split-K reduction adds up."""
REDUCE_WARPS = 4
POINTER_BYTES = 16
"""What the allocator aligns every tensor to, at least."""

_ELEMENT = {
    Dtype.FP32: "fp32", Dtype.TF32: "fp32", Dtype.BF16: "bf16", Dtype.FP16: "fp16",
    Dtype.FP8: "fp8e4nv",
}  # fmt: skip
_EPILOGUE_CODE = {
    Epilogue.NONE: 0, Epilogue.BIAS: 1, Epilogue.BIAS_RELU: 2, Epilogue.BIAS_SIGMOID: 3,
    Epilogue.CROSS: 4,
}  # fmt: skip


@dataclass(frozen=True)
class KernelKey:
    """One compiled product: the main kernel, and the reduction if its k is split."""

    arch: str
    """gfx942, gfx950, sm_80, sm_90, sm_100."""
    dtype: Dtype
    layout: Layout
    epilogue: Epilogue
    output: Dtype
    """fp32, bf16 or fp16."""
    tile: TileConfig
    alignment: tuple[int, int, int]
    """Of m, n and k: 16, 8 or 1, the largest that divides it (decides vectorised loads)."""

    @classmethod
    def of(
        cls,
        arch: str,
        dtype: Dtype,
        problem: Gemm,
        tile: TileConfig,
        output: Dtype | None = None,
    ) -> KernelKey:
        """The key of ``problem`` under ``tile``; ``output`` is ``output_dtype`` if left out."""
        return cls(
            arch=arch,
            dtype=dtype,
            layout=problem.layout,
            epilogue=problem.epilogue,
            output=output or output_dtype(dtype, problem.layout),
            tile=tile,
            alignment=(alignment(problem.m), alignment(problem.n), alignment(problem.k)),
        )


def alignment(size: int) -> int:
    """16, 8 or 1: the largest of them that divides ``size``."""
    common = gcd(size, 16)
    return common if common >= 8 else 1


def output_dtype(dtype: Dtype, layout: Layout) -> Dtype:
    """Of C: weight gradients are summed into fp32 weights, fp8 products leave in bf16, everything
    else as it came."""
    if layout is Layout.TN or dtype.bytes == 4:
        return Dtype.FP32
    return Dtype.BF16 if dtype is Dtype.FP8 else dtype


def gpu_target(arch: str) -> GPUTarget:
    """Triton's name of a device profile's ``arch``.

    Raises:
        UsageError: Triton has no backend for it.
    """
    if arch.startswith("gfx9"):
        return GPUTarget("hip", arch, 64)
    if arch.startswith("sm_") and arch[3:].isdigit():
        return GPUTarget("cuda", int(arch[3:]), 32)
    raise UsageError(
        "no kernels can be compiled for this architecture",
        field="arch",
        value=arch,
        fix="use a device profile whose arch is sm_NN (NVIDIA) or gfx9NN (AMD CDNA)",
    )


def dot_precision(arch: str, dtype: Dtype) -> str:
    """How ``tl.dot`` multiplies: CDNA4 has no TF32 and emulates it by three bf16 products."""
    if dtype is not Dtype.TF32:
        return "ieee"
    return "bf16x3" if arch == "gfx950" else "tf32"


def main_constants(key: KernelKey) -> dict[str, Any]:
    """Compile-time arguments of ``gemm``."""
    tile = key.tile
    return {
        "A_BY_ROWS": key.layout is not Layout.TN,
        "B_BY_ROWS": key.layout is not Layout.NT,
        "PRECISION": dot_precision(key.arch, key.dtype),
        "EPILOGUE": _EPILOGUE_CODE[key.epilogue] if tile.split_k == 1 else 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "PARTIAL": tile.split_k > 1,
        "GROUP_M": tile.group_m,
    }


def reduce_constants(key: KernelKey) -> dict[str, Any]:
    """Compile-time arguments of ``gemm_reduce``."""
    return {
        "EPILOGUE": _EPILOGUE_CODE[key.epilogue],
        "SPLIT_K": key.tile.split_k,
        "BLOCK": REDUCE_BLOCK,
    }


def compile_options(key: KernelKey) -> dict[str, Any]:
    """Triton's options for the main kernel."""
    tile = key.tile
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if key.arch.startswith("gfx"):
        options["waves_per_eu"] = tile.waves_per_eu
        options["matrix_instr_nonkdim"] = tile.matrix_instr_nonkdim
        options["kpack"] = tile.kpack
    return options


def reduce_options() -> dict[str, Any]:
    """Triton's options for the reduction."""
    return {"num_warps": REDUCE_WARPS}


def _source(fn: Any, signature: dict[str, str], constants: dict[str, Any], hints: list[int]) -> Any:
    """``hints``: divisibility of each run-time argument, in order."""
    attributes = {
        (index,): [["tt.divisibility", hint]] for index, hint in enumerate(hints) if hint > 1
    }
    typed = signature | dict.fromkeys(constants, "constexpr")
    return ASTSource(fn, typed, constexprs=constants, attrs=attributes)


def main_source(key: KernelKey) -> Any:
    """``gemm`` specialised to ``key``."""
    operand, output = f"*{_ELEMENT[key.dtype]}", f"*{_ELEMENT[key.output]}"
    sums = output if key.tile.split_k == 1 else "*fp32"
    signature = {
        "a": operand, "b": operand, "c": sums, "bias": "*fp32", "x0": output, "xl": output,
        "u": output, "m": "i32", "n": "i32", "k": "i32",
    }  # fmt: skip
    return _source(gemm, signature, main_constants(key), [POINTER_BYTES] * 7 + [*key.alignment])


def reduce_source(key: KernelKey) -> Any:
    """``gemm_reduce`` specialised to ``key``."""
    output = f"*{_ELEMENT[key.output]}"
    signature = {
        "partial": "*fp32", "c": output, "bias": "*fp32", "x0": output, "xl": output, "u": output,
        "elements": "i32", "n": "i32",
    }  # fmt: skip
    aligned = max(key.alignment[0], key.alignment[1])
    hints = [POINTER_BYTES] * 6 + [aligned, key.alignment[1]]
    return _source(gemm_reduce, signature, reduce_constants(key), hints)


@dataclass(frozen=True)
class Compiled:
    """The binaries of one key; none of them in the interpreter."""

    main: CompiledKernel | None
    reduction: CompiledKernel | None


@cache
def compiled(key: KernelKey) -> Compiled:
    """Compile for ``key.arch`` (no GPU needed), or load from Triton's cache."""
    target = gpu_target(key.arch)
    main = triton.compile(main_source(key), target=target, options=compile_options(key))
    if key.tile.split_k == 1:
        return Compiled(main, None)
    reduction = triton.compile(reduce_source(key), target=target, options=reduce_options())
    return Compiled(main, reduction)
