"""The dense network as GEMMs, elementwise traffic and activations, layer by layer as trained.

Per linear layer of i inputs and o outputs on b samples: forward b x o x i (nt), input gradient
b x i x o (nn, not for the first layer of the network), weight gradient o x i x b (tn). What follows
a layer element by element in the forward pass is its epilogue, so that a kernel may take it in.
Other elementwise traffic and kept activations are counted in floats per sample; the formulas stand
at each block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from planner.cost.elementwise import EPILOGUE_PASSES
from planner.specs.kernels import Epilogue, Gemm, Layout
from planner.specs.model import (
    Architecture,
    DcnInteraction,
    ModelSpec,
    NoInteraction,
    WukongLayer,
)


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b on ``rows`` rows per sample, then the rest of ``epilogue``."""

    inputs: int
    outputs: int
    epilogue: Epilogue = Epilogue.BIAS
    rows: int = 1
    input_gradient: bool = True

    @property
    def weights(self) -> int:
        """Elements of W."""
        return self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        """Elements of W and b."""
        return self.weights + (0 if self.epilogue is Epilogue.NONE else self.outputs)

    def forward(self, batch: int) -> Gemm:
        """GEMM of the forward pass."""
        rows = batch * self.rows
        return Gemm(rows, self.outputs, self.inputs, layout=Layout.NT, epilogue=self.epilogue)

    def backward(self, batch: int) -> tuple[Gemm, ...]:
        """GEMMs of the backward pass: weight gradient, then input gradient."""
        rows = batch * self.rows
        weight = Gemm(self.outputs, self.inputs, rows, layout=Layout.TN)
        if not self.input_gradient:
            return (weight,)
        return (weight, Gemm(rows, self.inputs, self.outputs, layout=Layout.NN))


@dataclass(frozen=True)
class Product:
    """A matrix product per sample, A [m, k] times B [k, n], without parameters.

    Both are stored by rows, so their gradients are dA = dC B^T (nt) and dB = A^T dC (tn).
    ``with_itself``: V V^T (nt), whose gradient S V (S symmetric) is one product.
    """

    m: int
    n: int
    k: int
    with_itself: bool = False

    def forward(self, batch: int) -> Gemm:
        """GEMM of the forward pass."""
        layout = Layout.NT if self.with_itself else Layout.NN
        return Gemm(self.m, self.n, self.k, batch, layout)

    def backward(self, batch: int) -> tuple[Gemm, ...]:
        """GEMMs of the gradients of both operands."""
        if self.with_itself:
            return (Gemm(self.m, self.k, self.n, batch, Layout.NN),)
        return (
            Gemm(self.m, self.k, self.n, batch, Layout.NT),
            Gemm(self.k, self.n, self.m, batch, Layout.TN),
        )


@dataclass(frozen=True)
class Block:
    """Part of the network that runs as a whole."""

    products: tuple[Linear | Product, ...] = ()
    forward_floats: float = 0.0
    """Elementwise traffic per sample, read and written, without epilogues."""
    backward_floats: float = 0.0
    saved_floats: float = 0.0
    """Activations per sample kept for the backward pass."""
    forward_kernels: int = 0
    """Elementwise operators, without epilogues."""
    backward_kernels: int = 0
    name: str = ""
    """Of a block whose activations may be recomputed, as the policy names it; else empty."""
    inputs_floats: float = 0.0
    """Activations per sample that are kept even if the block is recomputed: its inputs."""

    @property
    def recomputable(self) -> bool:
        """Whether a policy may drop its activations."""
        return bool(self.name)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The products that have parameters."""
        return tuple(item for item in self.products if isinstance(item, Linear))

    def backward(self, batch: int) -> tuple[Gemm, ...]:
        """GEMMs of the backward pass."""
        return tuple(gemm for product in self.products for gemm in product.backward(batch))

    def forward(self, batch: int) -> tuple[Gemm, ...]:
        """GEMMs of the forward pass."""
        return tuple(product.forward(batch) for product in self.products)


@dataclass(frozen=True, eq=False)
class DenseNetwork:
    """Blocks before and after the pooled embeddings arrive. Equal to itself only."""

    bottom: tuple[Block, ...]
    top: tuple[Block, ...]
    pooled_width: int
    """Columns of the pooled embeddings that the top reads."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks in forward order."""
        return self.bottom + self.top


def parameters(blocks: Sequence[Block]) -> int:
    """Weights and biases."""
    return sum(linear.parameters for block in blocks for linear in block.linears)


def weights(blocks: Sequence[Block]) -> int:
    """Weights without biases (as published parameter counts give them)."""
    return sum(linear.weights for block in blocks for linear in block.linears)


def operators(blocks: Sequence[Block]) -> int:
    """Operators that the host launches for forward and backward.

    Epilogues count as operators of their own even where a kernel takes them in: launching a kernel
    of ours from Python takes the host no less.
    """
    forward = [gemm for block in blocks for gemm in block.forward(1)]
    products = len(forward) + sum(len(block.backward(1)) for block in blocks)
    passes = sum(EPILOGUE_PASSES[gemm.epilogue].operators for gemm in forward)
    elementwise = sum(block.forward_kernels + block.backward_kernels for block in blocks)
    return products + passes + elementwise


def step_gemms(
    blocks: Sequence[Block], batch: int, recompute: Sequence[str] = ()
) -> dict[Gemm, int]:
    """Every distinct product of a step, forward order first, and how often it runs.

    Args:
        batch: samples of the rank.
        recompute: names of the blocks that run forward twice.
    """
    counts: Counter[Gemm] = Counter()
    for block in blocks:
        times = 2 if block.name in recompute else 1
        for gemm in block.forward(batch):
            counts[gemm] += times
    for block in blocks:
        counts.update(block.backward(batch))
    return dict(counts)


def _mlp(
    name: str,
    inputs: int,
    widths: Sequence[int],
    *,
    activate_last: bool,
    input_gradient: bool = True,
    rows: int = 1,
) -> Block:
    """Linear layers with ReLU.

    ReLU's backward reads gradient and output and writes the gradient, and the bias gradient reads
    it once more. Kept: the input and each ReLU's output.
    """
    linears, outputs = [], []
    width = inputs
    for index, output in enumerate(widths):
        activated_here = activate_last or index < len(widths) - 1
        epilogue = Epilogue.BIAS_RELU if activated_here else Epilogue.BIAS
        linears.append(Linear(width, output, epilogue, rows, input_gradient or index > 0))
        outputs.append(output * rows)
        width = output
    activated = outputs if activate_last else outputs[:-1]
    return Block(
        products=tuple(linears),
        backward_floats=3 * sum(activated) + sum(outputs),
        saved_floats=inputs * rows + sum(activated),
        backward_kernels=len(activated) + len(outputs),
        name=name,
        inputs_floats=inputs * rows,
    )


def _concatenation(width: int) -> Block:
    """Copies ``width`` columns forward and their gradient backward (one copy is kept by what
    follows)."""
    return Block(
        forward_floats=2 * width, backward_floats=2 * width, forward_kernels=1, backward_kernels=1
    )


def _dot(vectors: int, dim: int) -> Block:
    """All pairs of ``vectors`` vectors, without self-products, beside the bottom output.

    Forward: gather the pairs, concatenate. Backward: take apart, pad, gather the symmetric square
    of the pairs' gradients.
    """
    pairs = vectors * (vectors - 1) // 2
    square = vectors * vectors
    return Block(
        products=(Product(vectors, vectors, dim, with_itself=True),),
        forward_floats=2 * pairs + 2 * (pairs + dim),
        backward_floats=2 * (pairs + dim) + 2 * pairs + 2 * square,
        saved_floats=vectors * dim,
        forward_kernels=2,
        backward_kernels=4,
    )


def _cross(width: int, interaction: DcnInteraction) -> Block:
    """x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l.

    Forward: W_l's epilogue. Backward: gradients of the product's operands (2 x (2 reads, 1 write)),
    bias gradient (1 read), sums into the gradients of x_0 and x_l (2 x (2 reads, 1 write)). Kept
    per layer: x_l, V_l x_l and the product's operand.
    """
    layers, rank = interaction.num_layers, interaction.low_rank
    down = Linear(width, rank, Epilogue.NONE)
    up = Linear(rank, width, Epilogue.CROSS)
    products = (down, up) * layers
    return Block(
        products=products,
        backward_floats=13 * width * layers,
        saved_floats=layers * (2 * width + rank),
        backward_kernels=5 * layers,
        name="cross",
        inputs_floats=width,
    )


def _factorisation(fields: int, dim: int) -> Block:
    """(|sum v|^2 - sum |v|^2) / 2 over ``fields`` vectors.

    Forward: sum (1 read), squares (1 read, 1 write), their sum (1 read). Backward: two gradients
    of every field (1 read, 1 write each) and their sum (2 reads, 1 write).
    """
    width = fields * dim
    return Block(
        forward_floats=4 * width,
        backward_floats=7 * width,
        saved_floats=2 * width,
        forward_kernels=7,
        backward_kernels=7,
    )


def _wukong_layer(index: int, fields: int, dim: int, layer: WukongLayer) -> Block:
    """Linear compression block beside a factorisation machine X (X^T Y) and its MLP, with residual.

    The residual's projection is there where the number of fields changes.
    """
    outputs = layer.lcb + layer.fmb
    products: tuple[Linear | Product, ...] = (
        Linear(fields, layer.lcb, Epilogue.NONE, rows=dim),
        Linear(fields, layer.compressed, Epilogue.NONE, rows=dim),
        Product(dim, layer.compressed, fields),
        Product(fields, layer.compressed, dim),
    )
    if fields != outputs:
        products += (Linear(fields, outputs, Epilogue.NONE, rows=dim),)
    flat = fields * layer.compressed
    out = outputs * dim
    mlp = _mlp("", flat, (*layer.fmb_mlp, layer.fmb * dim), activate_last=False)
    interaction_floats = 2 * fields * dim + 2 * dim * layer.compressed + flat + 2 * out
    return Block(
        products=products + mlp.products,
        forward_floats=2 * flat + 6 * out,
        backward_floats=3 * flat + 8 * out + mlp.backward_floats,
        saved_floats=interaction_floats + mlp.saved_floats,
        forward_kernels=4,
        backward_kernels=6 + mlp.backward_kernels,
        name=f"layer_{index}",
        inputs_floats=fields * dim,
    )


def _top_after_wukong(model: ModelSpec, fields: int) -> tuple[Block, ...]:
    dim = model.all_tables[0].embedding_dim
    blocks: list[Block] = [_concatenation(fields * dim)]
    for index, layer in enumerate(model.wukong_layers):
        blocks.append(_wukong_layer(index, fields, dim, layer))
        fields = layer.lcb + layer.fmb
    return (*blocks, _mlp("top", fields * dim, model.top_mlp, activate_last=False))


@lru_cache(maxsize=64)
def dense_network(model: ModelSpec) -> DenseNetwork:
    """The blocks of the model's dense network, in the order in which they run."""
    pooled = model.pooled_width
    bottom: tuple[Block, ...] = ()
    dense_width = model.dense_features
    if model.bottom_mlp:
        bottom = (
            _mlp(
                "bottom",
                model.dense_features,
                model.bottom_mlp,
                activate_last=True,
                input_gradient=False,
            ),
        )
        dense_width = model.bottom_mlp[-1]
    width = dense_width + pooled
    top: tuple[Block, ...]
    if model.arch is Architecture.DLRM_DOT:
        vectors = width // dense_width
        joined = dense_width + vectors * (vectors - 1) // 2
        top = (
            _concatenation(width),
            _dot(vectors, dense_width),
            _mlp("top", joined, model.top_mlp, activate_last=False),
        )
    elif isinstance(model.interaction, DcnInteraction):
        top = (
            _concatenation(width),
            _cross(width, model.interaction),
            _mlp("top", width, model.top_mlp, activate_last=False),
        )
    elif model.arch is Architecture.DEEPFM:
        dim = model.all_tables[0].embedding_dim
        fields = (width if model.bottom_mlp else pooled) // dim
        linear = (
            (Block(products=(Linear(model.dense_features, 1, input_gradient=False),)),)
            if model.dense_features
            else ()
        )
        top = (
            _concatenation(width),
            _factorisation(fields, dim),
            *linear,
            _mlp("top", width, model.top_mlp, activate_last=False),
        )
    elif model.arch is Architecture.WUKONG:
        top = _top_after_wukong(model, width // dense_width)
    else:
        assert isinstance(model.interaction, NoInteraction)
        stride = model.interaction.stride
        read = pooled if stride is None else math.ceil(pooled / stride)
        strided = () if stride is None else (_concatenation((pooled + read) // 2),)
        top = (
            *strided,
            _concatenation(dense_width + read),
            _mlp("top", dense_width + read, model.top_mlp, activate_last=False),
        )
    return DenseNetwork(bottom, top, pooled)


def recomputable(model: ModelSpec) -> tuple[str, ...]:
    """Names of the blocks whose activations a policy may drop, in forward order."""
    return tuple(block.name for block in dense_network(model).blocks if block.recomputable)
