"""Words of kernel preselection: which matrix product, and which kernel runs it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NamedTuple

from pydantic import Field

from planner.specs.base import NonNegativeInt, PositiveFloat, PositiveInt, Spec
from planner.specs.units import Dtype


class Layout(StrEnum):
    """Storage of the operands of C[m, n] = A[m, k] B[k, n]; n: rows are contiguous as written,
    t: the transpose is what is stored. C is stored by rows."""

    NT = "nt"
    """Forward: y = x W^T (A: x by rows, B: W [n, k] by rows)."""
    NN = "nn"
    """Input gradient: dx = dy W."""
    TN = "tn"
    """Weight gradient: dW = dy^T x (A: dy [k, m] by rows)."""


class Backend(StrEnum):
    """Who wrote the kernel."""

    VENDOR = "vendor"
    """The vendor's library, by its own heuristics (cuBLAS, hipBLASLt; on a CPU torch's)."""
    TRITON = "triton"
    """``trainers.kernels``."""


class Epilogue(StrEnum):
    """What the kernel does with a tile of C before it stores it."""

    NONE = "none"
    BIAS = "bias"
    BIAS_RELU = "bias_relu"
    BIAS_SIGMOID = "bias_sigmoid"
    CROSS = "cross"
    """DCN's elementwise tail: x_0 * (C + b) + x_l."""


class Gemm(NamedTuple):
    """C[m, n] = A[m, k] B[k, n] as a kernel sees it, ``batch`` times."""

    m: int
    n: int
    k: int
    batch: int = 1
    layout: Layout = Layout.NT
    epilogue: Epilogue = Epilogue.NONE


class TileConfig(Spec):
    """Compile-time parameters of one Triton kernel."""

    block_m: PositiveInt
    block_n: PositiveInt
    block_k: PositiveInt
    num_warps: PositiveInt
    num_stages: PositiveInt
    split_k: PositiveInt = 1
    """Programs that share one tile's k range; their partial sums are added by a second kernel."""
    group_m: PositiveInt = 8
    """Rows of tiles that run together, so that their columns of B are read from the L2."""
    matrix_instr_nonkdim: NonNegativeInt = 0
    """AMD: side of the matrix instruction (16 or 32); 0 elsewhere."""
    waves_per_eu: NonNegativeInt = 0
    """AMD: waves that must fit one SIMD; 0: the compiler chooses."""
    kpack: PositiveInt = 1
    """AMD: elements of k that a lane loads at once."""


class RankedKernel(Spec):
    """A candidate for one product, with its predicted time."""

    backend: Backend
    tile: TileConfig | None = None
    """None for the vendor library."""
    predicted_us: PositiveFloat


class PlannedGemm(Spec):
    """One product of a pool's training step and the kernels to run it, best first."""

    layout: Layout
    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    batch: PositiveInt = 1
    epilogue: Epilogue = Epilogue.NONE
    dtype: Dtype
    count: PositiveInt
    """Times in one step."""
    candidates: Annotated[tuple[RankedKernel, ...], Field(min_length=1)]
    """The first one runs; the vendor's library is always among them."""

    @property
    def gemm(self) -> Gemm:
        """The product without its kernels."""
        return Gemm(self.m, self.n, self.k, self.batch, self.layout, self.epilogue)
