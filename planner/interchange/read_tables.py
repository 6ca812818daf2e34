"""Tables of a file of any known format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from planner.interchange.json_file import load_json
from planner.interchange.table_json import read_tasks, tables_from_json
from planner.interchange.word_lists import COMMAND_LINE, tables_from_lists, tables_from_text
from planner.specs.base import read_text
from planner.specs.errors import UsageError
from planner.specs.model import TableGroup


def read_tables(
    path: str | Path,
    *,
    width: int | None = None,
    tasks: str | Path | None = None,
    task: int = 0,
    min_pooling: float | None = None,
) -> tuple[TableGroup, ...]:
    """Tables of NeuroShard's or DreamShard's ``table_configs.json``, or of a script with
    MLPerf's or HugeCTR's lists.

    Args:
        width: embedding width where the files have none.
        tasks: task file that belongs to a ``table_configs.json``.
        task: which line of it, from 0.
        min_pooling: see ``tables_from_json``.

    Raises:
        SpecError: naming field and fix. UsageError: the task is not there.
    """
    text = read_text(path, "table file")
    if not _is_table_json(path, text):
        if tasks is not None:
            raise UsageError(
                "task files belong to a table_configs.json",
                field="--tasks",
                value=str(tasks),
                fix="leave it out, or give NeuroShard's or DreamShard's table file",
            )
        return tables_from_text(text, width=width, file=path)
    chosen = None
    if tasks is not None:
        known = read_tasks(tasks)
        if not 0 <= task < len(known):
            raise UsageError(
                f"the file has {len(known)} tasks, counted from 0",
                file=tasks,
                field="--task",
                value=task,
                fix="give the number of one of them",
            )
        chosen = known[task]
    return tables_from_json(
        load_json(path, "table file"),
        task=chosen,
        width=width,
        min_pooling=min_pooling,
        file=path,
    )


def _is_table_json(path: str | Path, text: str) -> bool:
    """A HugeCTR configuration may be JSON too, with lists by name."""
    start = text.lstrip()
    if start.startswith("["):
        return True
    return Path(path).suffix == ".json" and '"tables"' in text


def tables_of_options(
    rows: Sequence[int], pooling: Sequence[int] | None, widths: Sequence[int] | None
) -> tuple[TableGroup, ...]:
    """Tables of the options ``--rows``, ``--pooling`` and ``--dim``.

    Raises:
        SpecError: naming option and entry.
    """
    given = {
        COMMAND_LINE.rows: rows,
        COMMAND_LINE.pooling: pooling,
        COMMAND_LINE.width: widths,
    }
    return tables_from_lists({word: numbers for word, numbers in given.items() if numbers})
