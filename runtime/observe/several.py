"""The observers that a run was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from planner.specs.plan import Plan

Tell = Callable[[Mapping[str, Any]], None]


@contextmanager
def observers(
    plan: Plan, seed: int, mllog: Path | None, tensorboard: Path | None
) -> Iterator[tuple[Tell, ...]]:
    """The MLPerf log and TensorBoard, whichever are wanted, closed at the end.

    Raises:
        SpecError: a file or folder that cannot be written.
    """
    tells: list[Tell] = []
    with ExitStack() as stack:
        if mllog is not None:
            from runtime.observe.mllog import MlperfLog

            log = MlperfLog(mllog, plan, seed)
            stack.callback(log.close)
            tells.append(log.on_event)
        if tensorboard is not None:
            from runtime.observe.tensorboard import TensorBoard

            board = TensorBoard(tensorboard)
            stack.callback(board.close)
            tells.append(board.on_event)
        yield tuple(tells)
