"""Typed errors. Each one says where (file, field, value), what is wrong and what to change.

The exit code is a property of the error, so that every entry point maps failures the same way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

_ABSENT: Any = object()
MOST_SHOWN = 8
"""Problems of one file that are printed: they must fit on one screen."""


class HwplanError(Exception):
    """Base of every error that a user can cause or cure.

    Args:
        problem: one sentence: what is wrong.
        fix: one sentence: what to change.
        file: file that the problem is in, if any.
        field: dotted path inside that file, e.g. ``pools.0.nodes``.
        value: the offending value, if there is one.
    """

    exit_code: ClassVar[int] = 2

    def __init__(
        self,
        problem: str,
        *,
        fix: str = "",
        file: str | Path | None = None,
        field: str = "",
        value: Any = _ABSENT,
    ) -> None:
        self.problem = problem
        self.fix = fix
        self.file = None if file is None else str(file)
        self.field = field
        self.value = None if value is _ABSENT else value
        self._has_value = value is not _ABSENT
        super().__init__(self.render())

    def render(self) -> str:
        """The whole error on at most a few lines: location, problem, value, fix."""
        where = ": ".join(part for part in (self.file, self.field) if part)
        text = f"{where}: {self.problem}" if where else self.problem
        if self._has_value:
            shown = repr(self.value)
            text += f" (got {shown if len(shown) <= 80 else shown[:77] + '...'})"
        return f"{text}\n  To fix: {self.fix}" if self.fix else text


class SpecError(HwplanError):
    """A cluster, device, model, plan or data file that cannot be used as it is. Exit code 2."""


class SpecErrors(SpecError):
    """Several problems in one file, reported together."""

    def __init__(self, errors: list[SpecError]) -> None:
        self.errors = errors
        super().__init__(errors[0].problem, file=errors[0].file, field=errors[0].field)
        self.args = (self.render(),)

    def render(self) -> str:
        shown = [error.render() for error in self.errors[:MOST_SHOWN]]
        more = len(self.errors) - len(shown)
        if more:
            shown.append(f"and {more} more problem{'s' if more > 1 else ''} in this file")
        return "\n".join(shown)


class UsageError(HwplanError):
    """A command line or call that asks for something that does not exist. Exit code 2."""


class InfeasibleError(HwplanError):
    """No plan satisfies the constraints; says which one, by how much. Exit code 3."""

    exit_code: ClassVar[int] = 3


class RunError(HwplanError):
    """A training run that started and failed. Exit code 4."""

    exit_code: ClassVar[int] = 4
