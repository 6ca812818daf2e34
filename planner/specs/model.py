"""Model spec: embedding tables, dense architecture, optimizers, global batch, allowed precision."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, model_validator

from planner.specs.base import LearningRate, Name, Size, Spec, Width, problem
from planner.specs.units import Dtype

LARGEST_BATCH = 2**40
GlobalBatch = Annotated[int, Field(gt=0, le=LARGEST_BATCH)]
PoolingFactor = Annotated[float, Field(ge=1e-6, le=1e6)]


class Architecture(StrEnum):
    """How the dense network joins the embeddings."""

    DLRM_DOT = "dlrm_dot"
    DLRM_DCN = "dlrm_dcn"
    DEEPFM = "deepfm"
    MLP_CONCAT = "mlp_concat"
    WUKONG = "wukong"


TRAINABLE = frozenset(
    {
        Architecture.DLRM_DOT,
        Architecture.DLRM_DCN,
        Architecture.DEEPFM,
        Architecture.MLP_CONCAT,
    }
)
"""Architectures that ``trainers`` can build; the others can only be planned."""


TRAINED_COLUMNS = 4
"""FBGEMM's kernels read and write rows in vectors of so many columns."""


class ShardingType(StrEnum):
    """TorchRec's words."""

    TABLE_WISE = "table_wise"
    ROW_WISE = "row_wise"
    COLUMN_WISE = "column_wise"
    TABLE_ROW_WISE = "table_row_wise"
    GRID_SHARD = "grid_shard"
    DATA_PARALLEL = "data_parallel"


class ComputeKernel(StrEnum):
    """TorchRec's words."""

    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"
    DENSE = "dense"


class TableConstraints(Spec):
    """What the planner may do with a table; omitted means everything."""

    sharding_types: tuple[ShardingType, ...] | None = None
    compute_kernels: tuple[ComputeKernel, ...] | None = None
    data_types: tuple[Dtype, ...] | None = None
    min_partition: Width | None = None
    """Smallest width of a column shard; a multiple of 4."""

    @model_validator(mode="after")
    def _check(self) -> TableConstraints:
        for name in ("sharding_types", "compute_kernels", "data_types"):
            if getattr(self, name) == ():
                raise problem(f"{name} allows nothing", "list at least one, or leave it out")
        if self.min_partition is not None and self.min_partition % 4:
            raise problem(
                "min_partition must be a multiple of 4 (FBGEMM's vector width)",
                "round it up to a multiple of 4",
            )
        return self


class TableGroup(Spec):
    """``count`` equal tables. Field names are those of TorchRec's ``EmbeddingBagConfig``."""

    name: Name
    num_embeddings: Size
    embedding_dim: Annotated[int, Field(gt=0, le=65_536)]
    count: Annotated[int, Field(gt=0, le=100_000)] = 1
    pooling_factors: Annotated[tuple[PoolingFactor, ...], Field(min_length=1)] = (1.0,)
    """Mean ids per sample, one number per feature that reads the table."""
    zipf_exponent: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Exponent of the id popularity law; 0 is uniform."""
    constraints: TableConstraints = TableConstraints()

    @model_validator(mode="after")
    def _check(self) -> TableGroup:
        if self.embedding_dim % 2:
            raise problem(
                f"embedding_dim {self.embedding_dim} is odd (FBGEMM needs whole vectors)",
                "use an even width, best a multiple of 4",
            )
        return self


class Table(Spec):
    """One embedding table (a table group expanded)."""

    name: str
    feature_names: tuple[str, ...]
    num_embeddings: int
    embedding_dim: int
    pooling_factors: tuple[float, ...]
    zipf_exponent: float
    constraints: TableConstraints

    @property
    def pooling(self) -> float:
        """Mean ids per sample over all features of the table."""
        return sum(self.pooling_factors)

    @property
    def output_width(self) -> int:
        """Columns that the table adds to the pooled output: one block per feature."""
        return self.embedding_dim * len(self.feature_names)

    @property
    def parameters(self) -> int:
        """Rows times columns."""
        return self.num_embeddings * self.embedding_dim


class NoInteraction(Spec):
    """Concatenation alone (``mlp_concat``, ``deepfm``, ``wukong``).

    ``stride``: mean-pool the concatenated embeddings over windows of this many columns
    (distributed-embeddings' ``interact_stride``).
    """

    type: Literal["none"] = "none"
    stride: Width | None = None


class DotInteraction(Spec):
    """Pairwise dot products of the bottom output and every embedding, without self-products."""

    type: Literal["dot"]


class DcnInteraction(Spec):
    """Low-rank DCNv2 cross layers: x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l."""

    type: Literal["dcn_v2"]
    num_layers: Annotated[int, Field(gt=0, le=1_000)]
    low_rank: Width


Interaction = Annotated[
    NoInteraction | DotInteraction | DcnInteraction, Field(discriminator="type")
]


class WukongLayer(Spec):
    """One Wukong layer: linear compression block and factorisation-machine block outputs."""

    lcb: Width
    fmb: Width
    compressed: Width
    fmb_mlp: tuple[Width, ...]


class DenseOptimizer(Spec):
    """Optimizer of the dense network."""

    name: Literal["sgd", "adagrad", "adam"]
    learning_rate: LearningRate
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8

    @property
    def state_floats_per_parameter(self) -> int:
        """fp32 numbers kept per parameter."""
        return {"sgd": 0, "adagrad": 1, "adam": 2}[self.name]


class SparseOptimizer(Spec):
    """Optimizer fused into the embedding backward."""

    name: Literal["sgd", "rowwise_adagrad", "adagrad", "adam"]
    learning_rate: LearningRate
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8

    def state_floats_per_row(self, columns: int) -> int:
        """fp32 numbers of optimizer state kept for one row of ``columns`` elements."""
        return {"sgd": 0, "rowwise_adagrad": 1, "adagrad": columns, "adam": 2 * columns}[self.name]


class Optimizers(Spec):
    dense: DenseOptimizer
    sparse: SparseOptimizer


class Precision(Spec):
    """The recipe's own precision, and what the planner may change it to.

    The first entry of each list is the recipe's (the naive port uses it).
    """

    compute: Annotated[tuple[Dtype, ...], Field(min_length=1)] = (Dtype.FP32,)
    embeddings: Annotated[tuple[Dtype, ...], Field(min_length=1)] = (Dtype.FP32,)
    communication: Annotated[tuple[Dtype, ...], Field(min_length=1)] = (Dtype.FP32,)

    @model_validator(mode="after")
    def _check(self) -> Precision:
        for name in ("compute", "embeddings", "communication"):
            dtypes = getattr(self, name)
            if len(set(dtypes)) < len(dtypes):
                raise problem(f"{name} {list(map(str, dtypes))} repeats", "list each dtype once")
        for name, allowed in (
            ("embeddings", (Dtype.FP32, Dtype.FP16, Dtype.BF16)),
            ("communication", (Dtype.FP32, Dtype.FP16, Dtype.BF16)),
        ):
            wrong = [dtype for dtype in getattr(self, name) if dtype not in allowed]
            if wrong:
                raise problem(
                    f"{name} cannot be stored as {wrong[0]}",
                    f"use some of {', '.join(allowed)}",
                )
        return self


class ModelSpec(Spec):
    """A recommendation model with a fixed global batch."""

    name: Name
    description: str
    source: str
    """Where the numbers come from."""
    arch: Architecture
    global_batch: GlobalBatch
    dense_features: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    bottom_mlp: tuple[Width, ...] = ()
    top_mlp: Annotated[tuple[Width, ...], Field(min_length=1)]
    interaction: Interaction = NoInteraction()
    wukong_layers: tuple[WukongLayer, ...] = ()
    tables: Annotated[tuple[TableGroup, ...], Field(min_length=1)]
    optimizer: Optimizers
    precision: Precision = Precision()
    max_exchange_interval_steps: Annotated[int, Field(gt=0, le=1_000_000)] = 1
    """Staleness limit: embedding replicas of different pools may drift for so many steps."""

    def __hash__(self) -> int:
        """Of what tells models of one session apart: to hash every table takes longer than to
        compare the few models that are alike in this."""
        return hash((self.name, self.arch, self.global_batch, self.bottom_mlp, self.top_mlp))

    @property
    def trainable(self) -> bool:
        """Whether ``trainers`` can train it; if not, it can still be planned."""
        return not self.why_not_trainable

    @property
    def why_not_trainable(self) -> str:
        """What ``trainers`` cannot train; empty if nothing."""
        if self.arch not in TRAINABLE:
            return f"architecture {self.arch}"
        narrow = (table for table in self.all_tables if table.embedding_dim % TRAINED_COLUMNS)
        table = next(narrow, None)
        if table is None:
            return ""
        return (
            f"table {table.name} has embedding_dim {table.embedding_dim}, and FBGEMM's kernels "
            f"train multiples of {TRAINED_COLUMNS}"
        )

    @cached_property
    def all_tables(self) -> tuple[Table, ...]:
        """Every table, groups expanded; a group of one keeps its name."""
        tables = []
        for group in self.tables:
            for index in range(group.count):
                name = group.name if group.count == 1 else f"{group.name}_{index}"
                features = len(group.pooling_factors)
                tables.append(
                    Table(
                        name=name,
                        feature_names=tuple(
                            name if features == 1 else f"{name}.f{feature}"
                            for feature in range(features)
                        ),
                        num_embeddings=group.num_embeddings,
                        embedding_dim=group.embedding_dim,
                        pooling_factors=group.pooling_factors,
                        zipf_exponent=group.zipf_exponent,
                        constraints=group.constraints,
                    )
                )
        return tuple(tables)

    @property
    def embedding_parameters(self) -> int:
        """Rows times columns over all tables."""
        return sum(table.parameters for table in self.all_tables)

    @property
    def pooled_width(self) -> int:
        """Columns of the concatenated pooled embeddings."""
        return sum(table.output_width for table in self.all_tables)

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        names = [table.name for table in self.all_tables]
        twice = (
            sorted({name for name in names if names.count(name) > 1})
            if (len(set(names)) < len(names))
            else []
        )
        if twice:
            raise problem(f"two tables are named {twice[0]!r}", "give every table its own name")
        if self.top_mlp[-1] != 1:
            raise problem(
                f"top_mlp ends with {self.top_mlp[-1]}, but the model predicts one logit",
                "end top_mlp with 1",
            )
        if self.bottom_mlp and not self.dense_features:
            raise problem(
                "bottom_mlp has no input: dense_features is 0",
                "set dense_features, or remove bottom_mlp",
            )
        _check_architecture(self)
        return self


def _check_architecture(model: ModelSpec) -> None:
    """Each architecture's own requirements.

    Raises:
        ValueError: with problem and fix (see ``problem``).
    """
    expected = {
        Architecture.DLRM_DOT: "dot",
        Architecture.DLRM_DCN: "dcn_v2",
    }.get(model.arch, "none")
    if model.interaction.type != expected:
        raise problem(
            f"arch {model.arch} has interaction {expected}, not {model.interaction.type}",
            f"set interaction.type to {expected}",
        )
    if (model.arch is Architecture.WUKONG) != bool(model.wukong_layers):
        raise problem(
            "wukong_layers belong to arch wukong and only there",
            "set both or neither",
        )
    needs_bottom = (Architecture.DLRM_DOT, Architecture.DLRM_DCN, Architecture.WUKONG)
    if model.arch in needs_bottom and not model.bottom_mlp:
        raise problem(f"arch {model.arch} needs bottom_mlp", "add bottom_mlp")
    if model.arch in (Architecture.DLRM_DOT, Architecture.DEEPFM, Architecture.WUKONG):
        widths = {table.embedding_dim for table in model.all_tables}
        if model.bottom_mlp:
            widths.add(model.bottom_mlp[-1])
        if len(widths) > 1:
            raise problem(
                f"arch {model.arch} needs one width for all embeddings and the bottom output, "
                f"found {sorted(widths)}",
                "make embedding_dim and the last bottom_mlp entry equal",
            )
