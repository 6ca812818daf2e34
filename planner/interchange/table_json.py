"""Embedding tables from NeuroShard's and DreamShard's ``table_configs.json``.

Both make it from Meta's ``dlrm_datasets`` (tools/gen_dlrm_data.py of daochenzha/neuroshard and
daochenzha/dreamshard). For each table: ``row``, ``pooling_factor`` (ids per sample) and ``bin_0``
to ``bin_16`` (how often ids repeat, see ``planner.interchange.popularity``). NeuroShard's file is a
list, without a width: its sharding *tasks* (tools/gen_tasks.py) name tables and widths, one task a
line, ``3,17,5 64,16,128``. DreamShard's is ``{"tables": [...]}`` with ``dim`` and ``index``; its
tasks name tables only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.interchange.groups import table_group
from planner.interchange.popularity import BINS, exponent_of_bins
from planner.specs.base import read_text, rounded
from planner.specs.errors import SpecError, UsageError
from planner.specs.model import TableGroup

WORDS = {
    "num_embeddings": "row",
    "embedding_dim": "dim",
    "pooling_factors": "pooling_factor",
    "zipf_exponent": "bin",
}
BIN_FIELDS = tuple(f"bin_{index}" for index in range(BINS))
KNOWN = {"index", "row", "dim", "pooling_factor", "size", *BIN_FIELDS}


def read_tasks(path: str | Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Table numbers and widths of each sharding task; no widths in DreamShard's files.

    Raises:
        SpecError: naming the line that is no task.
    """
    tasks = []
    for number, line in enumerate(read_text(path, "task file").splitlines(), start=1):
        try:
            ids, *widths = (
                tuple(int(item) for item in part.split(",")) for part in line.strip().split()
            )
        except ValueError:
            ids, widths = (), []
        if not ids or len(widths) > 1 or any(len(part) != len(ids) for part in widths):
            raise SpecError(
                "this is no sharding task",
                file=path,
                field=f"line {number}",
                value=line,
                fix="write table numbers, a space and as many widths: 3,17,5 64,16,128",
            )
        tasks.append((ids, widths[0] if widths else ()))
    return tasks


def tables_from_json(
    data: Any,
    *,
    task: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    width: int | None = None,
    min_pooling: float | None = None,
    file: str | Path | None = None,
) -> tuple[TableGroup, ...]:
    """Tables of a parsed ``table_configs.json``.

    Args:
        task: one of ``read_tasks``: which tables, and their widths.
        width: of all tables, where neither file nor task has one.
        min_pooling: tables with fewer ids per sample are taken to have this many. DreamShard
            rounds down, so that a table with an id in every second sample has 0.

    Raises:
        SpecError: naming table and field. UsageError: the task names a table that is not there.
    """
    entries = data.get("tables") if isinstance(data, dict) else data
    if not isinstance(entries, list) or not entries:
        raise SpecError(
            "this is no table_configs.json of NeuroShard or DreamShard",
            file=file,
            fix='give a list of tables, or an object with the list "tables"',
        )
    ids, widths = task or (tuple(range(len(entries))), ())
    absent = [number for number in ids if not 0 <= number < len(entries)]
    if absent:
        raise UsageError(
            f"the task names a table that is not among the {len(entries)} of the file",
            field="task",
            value=absent[0],
            fix="give the table_configs.json that the tasks were made for",
        )
    return tuple(
        _table(
            entries[number],
            place,
            number,
            widths[place] if widths else None,
            width,
            min_pooling,
            file,
        )
        for place, number in enumerate(ids)
    )


def _table(
    entry: Any,
    place: int,
    number: int,
    task_width: int | None,
    width: int | None,
    min_pooling: float | None,
    file: str | Path | None,
) -> TableGroup:
    def wrong(field: str, problem: str, fix: str, *value: Any) -> SpecError:
        given = {"value": value[0]} if value else {}
        return SpecError(problem, file=file, field=f"{field}.{number}", fix=fix, **given)

    if not isinstance(entry, dict):
        raise wrong("tables", "a table is an object of fields", "see docs/interchange.md", entry)
    unknown = sorted(entry.keys() - KNOWN)
    if unknown:
        raise wrong(unknown[0], "unknown field", f"use some of {', '.join(sorted(KNOWN))}")
    for field in ("row", "pooling_factor"):
        if field not in entry:
            raise wrong(field, "is missing", "every table needs row and pooling_factor")
    dim = task_width or entry.get("dim") or width
    if dim is None:
        raise wrong("dim", "the file has no widths", "give a task file, or one width with --dim")
    pooling = entry["pooling_factor"]
    if isinstance(pooling, bool) or not isinstance(pooling, int | float):
        raise wrong("pooling_factor", "must be a number", "write ids per sample", pooling)
    if min_pooling is not None:
        pooling = max(float(pooling), min_pooling)
    elif pooling == 0:
        fix = "leave the table out, or say with --min-pooling what such tables have, e.g. 0.5"
        raise wrong("pooling_factor", "no sample reads this table", fix, pooling)
    group = table_group(
        {
            # A task may name a table twice.
            "name": f"t_{place}" if place == number else f"t_{place}_of_{number}",
            "num_embeddings": entry["row"],
            "embedding_dim": dim,
            "pooling_factors": [rounded(float(pooling))],
        },
        WORDS,
        number,
        file,
    )
    bins = [entry.get(field, 0.0) for field in BIN_FIELDS]
    if any(isinstance(b, bool) or not isinstance(b, int | float) or not 0 <= b <= 1 for b in bins):
        raise wrong("bin", "bins are shares between 0 and 1", "check bin_0 to bin_16", bins)
    exponent = exponent_of_bins(group.num_embeddings, group.pooling_factors[0], bins)
    return group.model_copy(update={"zipf_exponent": exponent})
