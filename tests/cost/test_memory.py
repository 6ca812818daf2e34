import pytest

from planner.cost.embedding import option_pieces
from planner.cost.memory import base_memory_bytes, shard_memory_bytes
from planner.specs.model import ComputeKernel, ShardingType
from planner.specs.units import Dtype
from tests.cost.helpers import context

DENSE = 13 * 8 + 8 + 8 * 4 + 4 + 7 * 16 + 16 + 16 + 1


def test_base_by_hand() -> None:
    found = base_memory_bytes(context(local_batch=64))
    # Ids: (3 + 1) + (1 + 1) of 8 bytes with their lengths; 13 features and a label of 4; depth 2.
    assert found == {
        "context": 2 * 2**30,
        "dense_weights": 4 * DENSE,
        "dense_gradients": 4 * DENSE,
        "dense_optimizer": 4 * DENSE,
        "low_precision_weights": 0,
        "activations": 64 * 4 * (25 + 12 + 23),
        "input_batches": 64 * (4 * 14 + 8 * 6) * 2,
        "pooled_embeddings": 2 * 4 * 64 * 8,
    }


def test_autocast_keeps_16_bit_weights_and_activations() -> None:
    fp32 = base_memory_bytes(context())
    bf16 = base_memory_bytes(context(precision=Dtype.BF16))
    assert bf16["low_precision_weights"] == 2 * DENSE
    assert bf16["activations"] == fp32["activations"] // 2


def _shard(
    sharding: ShardingType,
    kernel: ComputeKernel = ComputeKernel.FUSED,
    load_factor: float | None = None,
    columns: int = 4,
) -> dict[str, int]:
    ctx = context(local_batch=64)
    table = ctx.model.all_tables[0]
    return shard_memory_bytes(ctx, table, sharding, kernel, Dtype.FP16, columns, load_factor)


def test_whole_table_by_hand() -> None:
    assert _shard(ShardingType.TABLE_WISE) == {
        "table_weights": 1000 * 4 * 2,
        "table_optimizer": 1000 * 4,  # row-wise Adagrad: one float a row
        "table_gradients": 0,
        "table_cache": 0,
        "exchange_buffers": 512 * (3 + 1) * 8 * 2 + 2 * 512 * 4 * 4,
    }


def test_row_shard_by_hand() -> None:
    found = _shard(ShardingType.ROW_WISE)
    assert found["table_weights"] == 125 * 4 * 2
    assert found["exchange_buffers"] == 512 * (3 / 8 + 1) * 8 * 2 + 2 * 512 * 4 * 4


def test_kernels_by_hand() -> None:
    uvm = _shard(ShardingType.TABLE_WISE, ComputeKernel.FUSED_UVM)
    assert uvm["table_weights"] == uvm["table_optimizer"] == 0
    cached = _shard(ShardingType.TABLE_WISE, ComputeKernel.FUSED_UVM_CACHING, 0.2)
    assert cached["table_weights"] == 200 * 4 * 2
    assert cached["table_cache"] == 1000 * 4 + 200 * 16
    replicated = _shard(ShardingType.DATA_PARALLEL, ComputeKernel.DENSE)
    assert replicated["table_gradients"] == 1000 * 4 * 4
    assert replicated["exchange_buffers"] == 0


def test_pieces_carry_the_sum() -> None:
    ctx = context(local_batch=64)
    table = ctx.model.all_tables[0]
    (piece,) = option_pieces(
        ctx, table, ShardingType.TABLE_WISE, ComputeKernel.FUSED_UVM, Dtype.FP32
    )
    categories = shard_memory_bytes(
        ctx, table, ShardingType.TABLE_WISE, ComputeKernel.FUSED_UVM, Dtype.FP32, 4, None
    )
    assert piece.owner.hbm_bytes == sum(categories.values())
    assert piece.owner.host_bytes == 1000 * (4 * 4 + 4)


@pytest.mark.parametrize("recompute", [(), ("top",), ("bottom", "top")])
def test_more_samples_need_more_memory(recompute: tuple[str, ...]) -> None:
    totals = [
        sum(base_memory_bytes(context(local_batch=size, recompute=recompute)).values())
        for size in (1, 2, 100, 5000)
    ]
    assert totals == sorted(set(totals))
