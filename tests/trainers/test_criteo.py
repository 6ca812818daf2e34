"""The Criteo reader: order, parsing, and every way in which a file can be bad."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import pytest
import torch

from planner.specs.errors import SpecError, UsageError
from planner.specs.load import load_model
from tests.trainers.jobs import model_of, place, plan_of, whole_on_rank_0
from trainers.data.criteo import CriteoSource, is_held_out
from trainers.data.source import Slice
from trainers.task import DataSpec, TrainTask, parse_data

MODEL = load_model("dlrm_criteo_small")


def line(number: int, label: int = 0) -> str:
    """A well-formed line that carries its number in the first integer."""
    integers = [str(number), "", "-3"] + ["7"] * 10
    categories = [f"{number * 31 + column:08x}" for column in range(25)] + [""]
    return "\t".join([str(label), *integers, *categories])


def write(path: Path, lines: list[str], end: str = "\n") -> str:
    path.write_text("".join(text + end for text in lines), newline="")
    return str(path)


def source(*paths: str, global_batch: int = 8, **options: object) -> CriteoSource:
    placements = whole_on_rank_0(MODEL)
    plan = plan_of({"p": (1, global_batch, placements)}, MODEL)
    options.setdefault("eval_fraction", 0.0)
    return CriteoSource(TrainTask(plan, DataSpec(paths), **options))  # type: ignore[arg-type]


def numbers(reader: CriteoSource, part: Slice) -> list[list[int]]:
    """Line numbers of each batch, recovered from the first dense feature."""
    return [
        [round(math.expm1(x)) for x in batch.dense[:, 0].tolist()]
        for batch in reader.train_batches(part)
    ]


def test_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", [line(5, label=1)], end="\r\n")
    (batch,) = source(path, global_batch=1).train_batches(Slice(0, 1))
    assert batch.labels.tolist() == [1.0]
    expected = [math.log1p(5), 0.0, -math.log1p(3)] + [math.log1p(7)] * 10
    torch.testing.assert_close(batch.dense[0], torch.tensor(expected))
    for column, feature in enumerate(batch.sparse.keys()):
        text = f"{5 * 31 + column:08x}" if column < 25 else ""
        row = zlib.crc32(f"C{column}:{text}".encode()) % 10007
        assert batch.sparse[feature].values().tolist() == [row]


def test_every_rank_reads_its_slice_of_the_same_global_batches(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a.tsv", [line(n) for n in range(25)]),
        str(tmp_path / "b.tsv.gz"),
    ]
    with gzip.open(paths[1], "wt") as stream:
        stream.write("".join(line(n) + "\n" for n in range(25, 43)))
    whole = numbers(source(*paths), Slice(0, 8))
    split = zip(
        numbers(source(*paths), Slice(0, 5)), numbers(source(*paths), Slice(5, 3)), strict=True
    )
    assert [a + b for a, b in split] == whole
    used = [n for batch in whole for n in batch]
    assert len(used) == 40 and len(set(used)) == 40
    assert used != sorted(used)
    assert numbers(source(*paths, seed=1), Slice(0, 8)) != whole
    reader = source(*paths)
    numbers(reader, Slice(0, 8))
    assert reader.report.dropped_samples == 3


def test_a_small_buffer_still_yields_every_line_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", [line(n) for n in range(40)])
    used = [n for batch in numbers(source(path, shuffle_buffer=6), Slice(0, 8)) for n in batch]
    assert sorted(used) == list(range(40)) and used != list(range(40))


def test_epochs_and_steps(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", [line(n) for n in range(16)])
    two = numbers(source(path, epochs=2), Slice(0, 8))
    assert len(two) == 4 and two[:2] != two[2:]
    assert sorted(two[2] + two[3]) == list(range(16))
    assert len(numbers(source(path, steps=7), Slice(0, 8))) == 7


def test_holdout_and_training_are_disjoint_and_whole(tmp_path: Path) -> None:
    lines = [line(n) for n in range(400)]
    reader = source(write(tmp_path / "a.tsv", lines), global_batch=1, eval_fraction=0.25)
    trained = {batch[0] for batch in numbers(reader, Slice(0, 1))}
    held = {
        round(math.expm1(float(batch.dense[0, 0])))
        for batch, count in reader.holdout_batches(Slice(0, 1))
    }
    assert trained | held == set(range(400)) and not trained & held
    assert 70 < len(held) < 130
    # The label has no say.
    assert is_held_out(line(3, 0).encode(), 0.25) == is_held_out(line(3, 1).encode(), 0.25)


def test_last_holdout_batch_is_padded(tmp_path: Path) -> None:
    lines = [line(n) for n in range(400)]
    reader = source(write(tmp_path / "a.tsv", lines), eval_fraction=0.5)
    held = sum(is_held_out(text.encode(), 0.5) for text in lines)
    batches = list(reader.holdout_batches(Slice(2, 4)))
    assert sum(count for _, count in batches) == held and held % 8
    assert {batch.size for batch, _ in batches} == {4}


BROKEN = [
    "",
    "2" + line(1)[1:],
    line(1) + "\textra",
    line(1).replace("\t", " "),
    line(1).replace("-3", "3.5"),
    line(1).replace("-3", "-"),
    line(1)[:-10],
    line(1).replace("\t0000001f", "\tnothex"),
]


def test_malformed_lines_are_counted_and_named(tmp_path: Path) -> None:
    good = [line(n) for n in range(16)]
    lines = good[:3] + BROKEN + good[3:]
    path = write(tmp_path / "a.tsv", lines)
    reader = source(path, epochs=2)
    assert len(numbers(reader, Slice(0, 8))) == 4
    assert reader.report.malformed_lines == len(BROKEN)
    assert reader.report.malformed_examples == [f"{path}:{n}" for n in range(4, 9)]


def test_unusable_files(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gz"
    with gzip.open(whole, "wt") as stream:
        stream.write("".join(line(n * n) + "\n" for n in range(3000)))
    cut = tmp_path / "cut.gz"
    cut.write_bytes(whole.read_bytes()[:-2000])
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 100)
    cases = {
        str(tmp_path / "missing"): "does not exist",
        str(tmp_path): "cannot be read",
        str(tmp_path / "empty"): "is empty",
        write(tmp_path / "broken.tsv", BROKEN): "none of its 8 lines",
        str(tmp_path / "binary"): "none of its",
        str(cut): "truncated",
        write(tmp_path / "short.tsv", [line(1)]): "fewer than one global batch",
    }
    for path, message in cases.items():
        with pytest.raises(SpecError, match=message) as error:
            list(source(path).train_batches(Slice(0, 8)))
        assert error.value.file == path and error.value.fix


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = model_of()
    plan = plan_of({"p": (1, 8, {t.name: place("table_wise", 0) for t in model.all_tables})}, model)
    path = write(tmp_path / "a.tsv", [line(1)])
    with pytest.raises(UsageError, match="13 dense features and 26"):
        CriteoSource(TrainTask(plan, DataSpec((path,))))


def test_data_argument() -> None:
    assert parse_data("synthetic").synthetic
    # Absolute: workers may run in another folder.
    assert parse_data("criteo:a,/b").paths == (str(Path("a").resolve()), "/b")
    for text in ("criteo:", "kaggle", ""):
        with pytest.raises(UsageError, match="unknown data source"):
            parse_data(text)
