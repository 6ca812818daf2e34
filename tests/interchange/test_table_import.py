"""Tables of MLPerf, HugeCTR, NeuroShard and DreamShard files, and the model files made of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.interchange.model_file import model_of_tables, model_yaml, save_model
from planner.interchange.popularity import BATCH, BINS, EXPONENTS, expected_bins, exponent_of_bins
from planner.interchange.read_tables import read_tables
from planner.interchange.table_json import tables_from_json
from planner.interchange.word_lists import tables_from_lists, tables_from_text, word_lists
from planner.specs.errors import SpecError, UsageError
from planner.specs.load import load_model
from planner.specs.model import TableGroup

MLPERF = """
torchx run -s local_cwd dist.ddp -j 1x8 --script dlrm_main.py -- \\
    --embedding_dim 128 \\
    --num_embeddings_per_feature 40000000,39060,17295 \\
    --multi_hot_sizes=3,2,1 --batch_size $((GLOBAL_BATCH_SIZE / WORLD_SIZE)) \\
    --multi_hot_distribution_type uniform
"""
HUGECTR_KINDS = """
test_command+="--num_table 2,1 \\
--vocabulary_size_per_table 10000,4000000 \\
--nnz_per_table 100,1 \\
--ev_size_per_table 128,64 \\
--combiner_per_table s,c \\
"
"""
HUGECTR_READER = """
reader = hugectr.DataReaderParams(source=["train"], check_type = hugectr.Check_t.Non,
    slot_size_array = [39884406,    39043,
                       17289, ],
)
sparse = hugectr.SparseEmbedding(embedding_vec_size = 16, slot_size_array=[39884406, 39043, 17289])
print(args.slot_size_array[0], "slot_size_array is a list")
"""


def shapes(tables: tuple[TableGroup, ...]) -> list[tuple[int, int, int, float]]:
    return [(t.count, t.num_embeddings, t.embedding_dim, t.pooling_factors[0]) for t in tables]


def test_mlperf_command_line() -> None:
    tables = tables_from_text(MLPERF)
    assert shapes(tables) == [
        (1, 40_000_000, 128, 3.0),
        (1, 39_060, 128, 2.0),
        (1, 17_295, 128, 1.0),
    ]
    assert [t.name for t in tables] == ["t_0", "t_1", "t_2"]


def test_hugectr_embedding_collection() -> None:
    assert shapes(tables_from_text(HUGECTR_KINDS)) == [
        (2, 10_000, 128, 100.0),
        (1, 4_000_000, 64, 1.0),
    ]


def test_hugectr_reader_with_equal_lists_twice() -> None:
    assert shapes(tables_from_text(HUGECTR_READER)) == [
        (1, 39_884_406, 16, 1.0),
        (1, 39_043, 16, 1.0),
        (1, 17_289, 16, 1.0),
    ]


def test_json_configuration_and_width_from_outside(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text('{"layers": [{"slot_size_array": [7, 9]}]}')
    assert shapes(read_tables(file, width=32)) == [(1, 7, 32, 1.0), (1, 9, 32, 1.0)]


def test_the_shipped_mlperf_model_is_the_published_list() -> None:
    published = word_lists(
        "--num_embeddings_per_feature 40000000,39060,17295,7424,20265,3,7122,1543,63,40000000,"
        "3067956,405282,10,2209,11938,155,4,976,14,40000000,40000000,40000000,590152,12973,108,36 "
        "--multi_hot_sizes 3,2,1,2,6,1,1,1,1,7,3,8,1,6,9,5,1,1,1,12,100,27,10,3,1,1 "
        "--embedding_dim 128"
    )
    assert shapes(tables_from_lists(published)) == shapes(load_model("dlrm").tables)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing here", ["0 lists", "slot_size_array"]),
        ("--slot_size_array 3,4 --num_embeddings_per_feature 3,4", ["2 lists", "slot_size_array"]),
        ("--slot_size_array 3,4", ["embedding_vec_size", "--dim"]),
        ("--num_embeddings_per_feature ${ROWS},3 --embedding_dim 8", ["${ROWS},3", "write the"]),
        ("--num_embeddings_per_feature 3,$N --embedding_dim 8", ["3,$N", "write the numbers out"]),
        ("--slot_size_array 3, 4 --embedding_vec_size 8", ["3, 4", "write the numbers out"]),
        ("slot_size_array = [int(x) for x in y]", ["slot_size_array", "write the numbers out"]),
        ("slot_size_array = [3, 4]; slot_size_array = [3, 5]", ["two values", "[3, 4]", "[3, 5]"]),
        (
            "--num_embeddings_per_feature 3,4,5 --multi_hot_sizes 1,2 --embedding_dim 8",
            ["multi_hot_sizes", "2 entries for the 3 of num_embeddings_per_feature"],
        ),
        ("--slot_size_array 3,0 --embedding_vec_size 8", ["slot_size_array.1", "got 0"]),
        ("--slot_size_array 3,4 --embedding_vec_size 9", ["embedding_vec_size.0", "even width"]),
        (
            "--num_embeddings_per_feature 3,4 --multi_hot_sizes 1,0 --embedding_dim 8",
            ["multi_hot_sizes.1", "at least 1e-06"],
        ),
        (HUGECTR_KINDS.replace("s,c", "c,s"), ["combiner_per_table.0", "write s"]),
    ],
)
def test_unusable_lists_are_named(text: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as raised:
        tables_from_text(text, file="run.sh")
    for word in ("run.sh", "To fix", *words):
        assert word in str(raised.value)


NEUROSHARD = [
    {"row": 1000, "pooling_factor": 12.5, **{f"bin_{j}": 0.0 for j in range(BINS)}},
    {"row": 200, "pooling_factor": 0.25},
    {"row": 100, "pooling_factor": 0.0},
]
DREAMSHARD = {"tables": [{"index": 0, "row": 300, "dim": 16, "pooling_factor": 4}]}


def test_neuroshard_tables_with_a_task(tmp_path: Path) -> None:
    file, tasks = tmp_path / "table_configs.json", tmp_path / "data.txt"
    file.write_text(json.dumps(NEUROSHARD))
    tasks.write_text("0,1 64,16\n1,0,1 4,8,128\n")
    assert shapes(read_tables(file, tasks=tasks)) == [(1, 1000, 64, 12.5), (1, 200, 16, 0.25)]
    second = read_tables(file, tasks=tasks, task=1)
    assert shapes(second) == [(1, 200, 4, 0.25), (1, 1000, 8, 12.5), (1, 200, 128, 0.25)]
    assert len({t.name for t in second}) == 3
    with pytest.raises(UsageError, match=r"--task.*2 tasks"):
        read_tables(file, tasks=tasks, task=2)
    with pytest.raises(SpecError, match=r"dim\.0: the file has no widths"):
        read_tables(file)


def test_dreamshard_tables_and_tasks_without_widths(tmp_path: Path) -> None:
    file, tasks = tmp_path / "table_configs.json", tmp_path / "train.txt"
    file.write_text(json.dumps(DREAMSHARD))
    tasks.write_text("0\n")
    assert shapes(read_tables(file)) == [(1, 300, 16, 4.0)]
    assert read_tables(file, tasks=tasks) == read_tables(file)


def test_tables_that_no_sample_reads_are_refused_unless_a_pooling_is_given() -> None:
    with pytest.raises(SpecError, match=r"pooling_factor\.2: no sample reads.*\n.*--min-pooling"):
        tables_from_json(NEUROSHARD, width=8)
    tables = tables_from_json(NEUROSHARD, width=8, min_pooling=0.5)
    assert [t.pooling_factors[0] for t in tables] == [12.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"pooling_factor": 1.0}, ["row.0", "missing"]),
        ({"row": 10}, ["pooling_factor.0", "missing"]),
        ({"row": 10, "pooling_factor": "1"}, ["pooling_factor.0", "must be a number"]),
        ({"row": -1, "pooling_factor": 1.0}, ["row.0", "got -1"]),
        ({"row": 1.5, "pooling_factor": 1.0}, ["row.0", "1.5"]),
        ({"row": 10, "pooling_factor": 1.0, "dim": 7}, ["dim.0", "even"]),
        ({"row": 10, "pooling_factor": 1.0, "rows": 3}, ["rows.0", "unknown field"]),
        ({"row": 10, "pooling_factor": 1.0, "bin_3": 2.0}, ["bin.0", "between 0 and 1"]),
        ({"row": 10, "pooling_factor": float("nan")}, ["pooling_factor.0"]),
        (7, ["tables.0", "object"]),
    ],
)
def test_unusable_entries_are_named(entry: Any, words: list[str]) -> None:
    with pytest.raises(SpecError) as raised:
        tables_from_json([entry], width=8, file="table_configs.json")
    for word in ("table_configs.json", "To fix", *words):
        assert word in str(raised.value)


@pytest.mark.parametrize("line", ["", "1,2 3", "1,x 3,4", "1 2 3"])
def test_unusable_tasks_are_named(tmp_path: Path, line: str) -> None:
    file, tasks = tmp_path / "table_configs.json", tmp_path / "data.txt"
    file.write_text(json.dumps(NEUROSHARD))
    tasks.write_text(f"0 8\n{line}\n")
    with pytest.raises(SpecError, match=r"line 2.*no sharding task"):
        read_tables(file, tasks=tasks)


def test_a_task_of_another_table_file_is_refused(tmp_path: Path) -> None:
    tasks = tmp_path / "data.txt"
    tasks.write_text("0,5 8,8\n")
    file = tmp_path / "table_configs.json"
    file.write_text(json.dumps(NEUROSHARD))
    with pytest.raises(UsageError, match=r"not among the 3.*got 5"):
        read_tables(file, tasks=tasks)
    script = tmp_path / "run.sh"
    script.write_text(MLPERF)
    with pytest.raises(UsageError, match="--tasks"):
        read_tables(script, tasks=tasks)


def counted_bins(rows: int, draws: int, exponent: float) -> list[float]:
    """Bins counted in a sample, as NeuroShard's tool does."""
    weights = np.arange(1.0, rows + 1) ** -exponent
    counts = np.random.default_rng(0).multinomial(draws, weights / weights.sum())
    counts = counts[counts > 0]
    edges = [0, *(2**j for j in range(BINS - 1)), np.inf]
    inside = [((counts > low) & (counts <= high)).sum() for low, high in pairwise(edges)]
    return [float(count) / len(counts) for count in inside]


@pytest.mark.parametrize(("rows", "pooling"), [(300_000, 3.0), (2_000, 20.0)])
@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.05, 1.4])
def test_the_exponent_is_found_again(rows: int, pooling: float, exponent: float) -> None:
    bins = counted_bins(rows, int(BATCH * pooling), exponent)
    np.testing.assert_allclose(expected_bins(rows, BATCH * pooling, exponent), bins, atol=0.02)
    found = exponent_of_bins(rows, pooling, bins)
    assert found in EXPONENTS and abs(found - exponent) <= 0.051
    entry = {"row": rows, "pooling_factor": pooling} | {f"bin_{j}": b for j, b in enumerate(bins)}
    assert tables_from_json([entry], width=8)[0].zipf_exponent == found


def test_an_empty_table_is_uniform() -> None:
    assert exponent_of_bins(100, 0.5, [0.0] * BINS) == 0.0


def test_model_file_round_trip(tmp_path: Path) -> None:
    model = model_of_tables(
        load_model("dlrm"),
        tables_from_text(HUGECTR_KINDS),
        name="kinds",
        source="a: 'quoted' # source",
        global_batch=4096,
        dense_features=7,
        bottom_mlp=[32, 16],
        top_mlp=[8, 1],
    )
    save_model(model, tmp_path / "kinds.yaml")
    assert load_model(str(tmp_path / "kinds.yaml")) == model
    assert (model.global_batch, model.dense_features, model.bottom_mlp) == (4096, 7, (32, 16))
    assert [table.name for table in model.all_tables] == ["t_0_0", "t_0_1", "t_1"]
    assert list(tmp_path.iterdir()) == [tmp_path / "kinds.yaml"]


@pytest.mark.parametrize("name", ["dlrm", "wukong_criteo", "hugectr_7t_470b_hot20", "de_tiny"])
def test_shipped_models_survive_writing(tmp_path: Path, name: str) -> None:
    model = load_model(name)
    (tmp_path / "m.yaml").write_text(model_yaml(model))
    assert load_model(str(tmp_path / "m.yaml")) == model


def test_dense_part_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match=r"dlrm_dot needs one width.*\[64, 128\]"):
        model_of_tables(
            load_model("dlrm_v1_1tb"),
            tables_from_lists({"--rows": [5], "--dim": [64]}),
            name="x",
            source="x",
        )
