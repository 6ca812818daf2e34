"""Embedding tables from the lists of MLPerf's and HugeCTR's command lines and scripts.

Three spellings, each with its own words for rows, ids per sample and width:

* MLPerf DLRM-DCNv2 on TorchRec: ``num_embeddings_per_feature``, ``multi_hot_sizes``,
  ``embedding_dim`` (mlcommons/training, recommendation_v2/torchrec_dlrm).
* HugeCTR's embedding collection: ``vocabulary_size_per_table``, ``nnz_per_table``,
  ``ev_size_per_table``, ``num_table`` (how many tables of each kind) and ``combiner_per_table``
  (NVIDIA-Merlin/HugeCTR, benchmarks/embedding_collection).
* HugeCTR's data reader: ``slot_size_array``, ``nnz_per_slot``, ``embedding_vec_size``.

A value is a list of whole numbers, as one word (``1,2,3``, quoted or not) or in brackets, after
``=``, ``:`` or a space.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from planner.interchange.groups import table_group
from planner.specs.errors import SpecError
from planner.specs.model import TableGroup


class Words(NamedTuple):
    """One system's names of the lists."""

    rows: str
    pooling: str
    width: str
    tables: str | None = None
    """How many tables have these numbers."""


SPELLINGS = (
    Words("num_embeddings_per_feature", "multi_hot_sizes", "embedding_dim"),
    Words("vocabulary_size_per_table", "nnz_per_table", "ev_size_per_table", "num_table"),
    Words("slot_size_array", "nnz_per_slot", "embedding_vec_size"),
)
COMMAND_LINE = Words("--rows", "--pooling", "--dim")
"""hwplan's own options for the same lists."""
COMBINER = "combiner_per_table"
"""HugeCTR: ``s`` sums the vectors of a sample's ids, ``c`` keeps them apart."""

_GIVEN = r"(?<![\w.])%s[\"']?(?:\s*[=:]\s*|[ \t]+)(?=\S)"
"""A word that is given a value (after a dot it is only read: ``args.multi_hot_sizes``)."""
_OPEN = r"\\?[\"']?\s*"
_NUMBERS = re.compile(
    _OPEN + r"(?:\[\s*(?P<inside>\d+(?:\s*,\s*\d+)*)?\s*,?\s*\]"
    r"|(?P<word>\d+(?:,\d+)*)(?![\w$.]|,\s*[\d$]))"
)
_LETTERS = re.compile(_OPEN + r"\[?\s*(?P<letters>[sc](?:\s*,\s*[sc])*)\b")
_MEANT_AS_LIST = re.compile(_OPEN + r"[\[$\d]")


def word_lists(text: str, file: str | Path | None = None) -> dict[str, tuple[int, ...]]:
    """Every list of the known words in a script, configuration or command line.

    A word that occurs again with the same value (training and evaluation reader) counts once.

    Raises:
        SpecError: a word has two values, or one that is not written out.
    """
    found: dict[str, tuple[int, ...]] = {}
    for word in [word for spelling in SPELLINGS for word in spelling if word]:
        for use in re.finditer(_GIVEN % word, text):
            value = _NUMBERS.match(text, use.end())
            if value is None and not _MEANT_AS_LIST.match(text, use.end()):
                continue  # a sentence about the word, or a variable's type
            if value is None:
                raise SpecError(
                    "is no list of whole numbers",
                    file=file,
                    field=word,
                    value=text[use.end() :].split("\n")[0],
                    fix="write the numbers out: with commas and no spaces, or in brackets",
                )
            numbers = re.findall(r"\d+", value["inside"] or value["word"] or "")
            items = tuple(int(number) for number in numbers)
            if found.setdefault(word, items) != items:
                raise SpecError(
                    f"has two values, and the first is {list(found[word])}",
                    file=file,
                    field=word,
                    value=list(items),
                    fix="keep the lists of one model in the file",
                )
    return found


def tables_from_text(
    text: str, *, width: int | None = None, file: str | Path | None = None
) -> tuple[TableGroup, ...]:
    """Tables of a script, configuration or command line.

    Args:
        width: embedding width where the text has none.

    Raises:
        SpecError: naming the list that is missing, has a wrong length or a wrong number.
    """
    tables = tables_from_lists(word_lists(text, file), width=width, file=file)
    for use in re.finditer(_GIVEN % COMBINER, text):
        letters = _LETTERS.match(text, use.end())
        kinds = re.findall("[sc]", letters["letters"]) if letters else []
        for index, (kind, table) in enumerate(zip(kinds, tables, strict=False)):
            if kind == "c" and table.pooling_factors[0] > 1:
                raise SpecError(
                    "keeps the vectors of a sample's ids apart, and hwplan's tables sum them",
                    file=file,
                    field=f"{COMBINER}.{index}",
                    value=kind,
                    fix="write s for this table if its sum is what you train",
                )
    return tables


def tables_from_lists(
    lists: Mapping[str, Iterable[int]], *, width: int | None = None, file: str | Path | None = None
) -> tuple[TableGroup, ...]:
    """Tables from lists by their published names; one spelling at a time.

    Args:
        lists: by word. All but the rows may be one number for all tables.
        width: embedding width where the lists have none.

    Raises:
        SpecError: naming the list that is missing, has a wrong length or a wrong number.
    """
    given = {word: tuple(numbers) for word, numbers in lists.items()}
    used = [words for words in (*SPELLINGS, COMMAND_LINE) if words.rows in given]
    if len(used) != 1:
        raise SpecError(
            f"{len(used)} lists of row counts, and exactly one is needed",
            file=file,
            field=" and ".join(words.rows for words in used),
            fix=f"give one of {', '.join(words.rows for words in SPELLINGS)}",
        )
    words = used[0]
    rows = given[words.rows]
    if width is not None:
        given.setdefault(words.width, (width,))
    if words.width not in given:
        raise SpecError(
            "the embedding width is not given",
            file=file,
            field=words.width,
            fix="give it with --dim",
        )

    def per_table(word: str | None, otherwise: int) -> tuple[int, ...]:
        numbers = given.get(word or "", (otherwise,))
        if len(numbers) == 1:
            numbers *= len(rows)
        if len(numbers) != len(rows):
            raise SpecError(
                f"has {len(numbers)} entries for the {len(rows)} of {words.rows}",
                file=file,
                field=str(word),
                fix="give one number per table",
            )
        return numbers

    names = {
        "num_embeddings": words.rows,
        "embedding_dim": words.width,
        "pooling_factors": words.pooling,
        "count": words.tables or "",
    }
    columns = zip(
        rows,
        per_table(words.width, 0),
        per_table(words.pooling, 1),
        per_table(words.tables, 1),
        strict=True,
    )
    return tuple(
        table_group(
            {
                "name": f"t_{index}",
                "num_embeddings": table_rows,
                "embedding_dim": columns_of_row,
                "pooling_factors": [float(ids)],
                "count": count,
            },
            names,
            index,
            file,
        )
        for index, (table_rows, columns_of_row, ids, count) in enumerate(columns)
    )
