"""Step graph: the operations of one training step over the streams of one rank.

An operation starts when the operations it comes after have ended and the previous operation of
its stream has ended; streams run in the order in which operations are listed. The pool's step is
the longest path. Durations are ``seconds`` plus the largest of some rank loads, each taken on its
slowest rank (a collective starts when every rank is ready). All of this is max-plus linear, so the
ILP uses the very same graph (``planner.ilp``), and so does the timeline that the user sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Operation:
    """One operation: ``duration = seconds + max over components of (max over ranks of load)``.

    ``loads`` names components of ``RankLoad``.
    """

    name: str
    stream: str
    """host, compute, communication, bridge or copy."""
    after: tuple[str, ...] = ()
    seconds: float = 0.0
    loads: tuple[str, ...] = ()

    def duration(self, slowest: Mapping[str, float]) -> float:
        """Seconds, given each component's value on its slowest rank."""
        return self.seconds + max((slowest.get(name, 0.0) for name in self.loads), default=0.0)


@dataclass(frozen=True)
class Span:
    """When one operation runs, seconds from the start of the step."""

    operation: Operation
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepGraph:
    """Operations in issue order (each one after everything that it depends on)."""

    operations: tuple[Operation, ...]

    def under(self, slowest: Mapping[str, float]) -> StepGraph:
        """The same operations, as long as they are under the slowest rank's loads."""
        return StepGraph(
            tuple(replace(one, seconds=one.duration(slowest), loads=()) for one in self.operations)
        )

    def predecessors(self) -> dict[str, tuple[str, ...]]:
        """Dependencies of each operation, the previous one of its stream included."""
        last: dict[str, str] = {}
        result = {}
        for operation in self.operations:
            before = dict.fromkeys(operation.after)
            if operation.stream in last:
                before[last[operation.stream]] = None
            last[operation.stream] = operation.name
            result[operation.name] = tuple(before)
        return result

    def ancestors(self) -> dict[str, set[str]]:
        """Every operation that ends before an operation starts, whatever the durations."""
        result: dict[str, set[str]] = {}
        for name, before in self.predecessors().items():
            result[name] = set(before).union(*(result[one] for one in before))
        return result

    def schedule(
        self, slowest: Mapping[str, float], not_before: Mapping[str, float] | None = None
    ) -> dict[str, Span]:
        """Earliest start and end of every operation.

        Args:
            slowest: each ``RankLoad`` component's value on its slowest rank, seconds.
            not_before: earliest start of some operations, seconds (an exchange waits for the
                other pools).
        """
        spans: dict[str, Span] = {}
        predecessors = self.predecessors()
        for operation in self.operations:
            start = max((spans[name].end_s for name in predecessors[operation.name]), default=0.0)
            start = max(start, (not_before or {}).get(operation.name, 0.0))
            end = start + operation.duration(slowest)
            spans[operation.name] = Span(operation, start, end)
        return spans

    def step_s(self, slowest: Mapping[str, float]) -> float:
        """The longest path, seconds."""
        return max(span.end_s for span in self.schedule(slowest).values())

    def critical_path(self, spans: Mapping[str, Span]) -> tuple[str, ...]:
        """Names of the operations on the longest path, first to last."""
        predecessors = self.predecessors()
        current = max(spans.values(), key=lambda span: span.end_s).operation.name
        path = [current]
        while predecessors[current]:
            current = max(predecessors[current], key=lambda name: spans[name].end_s)
            path.append(current)
        return tuple(reversed(path))


EXCHANGE_PREFIX = "bridge:"
"""Operations that all pools run together start with this."""


def head_start_s(graph: StepGraph, other: StepGraph, until: str | None = None) -> float:
    """How much shorter a step of ``graph`` can be than one of ``other`` at most, if every load is
    the same in both; infinite if nothing is known.

    Where ``graph`` has all operations of ``other`` in the same order, and perhaps more, it has a
    path through the operations of the longest path of ``other``. So it gains no more than the
    largest sum, over the paths of ``other``, of what operations are faster. Paths start at an
    operation that waits for none (or for other pools) and end at one that none waits for.

    Args:
        until: how much earlier this operation can start, instead: paths end before it.
    """
    mine = {operation.name: operation for operation in graph.operations}
    ancestors = graph.ancestors()
    gain: dict[str, float] = {}
    successors: set[str] = set()
    predecessors = other.predecessors()
    for theirs in other.operations:
        before, name = predecessors[theirs.name], theirs.name
        if name not in mine or mine[name].loads != theirs.loads:
            return float("inf")
        if not ancestors[name].issuperset(before):
            return float("inf")
        starts = not before or name.startswith(EXCHANGE_PREFIX)
        earlier = [gain[one] for one in before] + ([0.0] if starts else [])
        if name == until:
            return max(0.0, *earlier)
        gain[name] = max(earlier) + theirs.seconds - mine[name].seconds
        successors.update(before)
    ends = [
        gain[operation.name] for operation in other.operations if operation.name not in successors
    ]
    return max(0.0, *ends)


def beside(graph: StepGraph, others: Sequence[StepGraph]) -> StepGraph:
    """A pool's step and those of the other pools of its job as one graph, whose operations on the
    bridge start together. The other pools' operations get names and streams of their own.
    """
    parts = [graph, *(_renamed(other, f"{i}.") for i, other in enumerate(others))]
    prefixes = ["", *(f"{i}." for i in range(len(others)))]
    before = [part.predecessors() for part in parts]
    rest = [list(part.operations) for part in parts]
    result: list[Operation] = []
    for shared in [one.name for one in graph.operations if one.name.startswith(EXCHANGE_PREFIX)]:
        names = [prefix + shared for prefix in prefixes]
        ready = [one for name, known in zip(names, before, strict=True) for one in known[name]]
        exchanges = []
        for operations, name in zip(rest, names, strict=True):
            while operations[0].name != name:
                result.append(operations.pop(0))
            exchanges.append(replace(operations.pop(0), after=tuple(ready)))
        result += exchanges
    return StepGraph((*result, *(operation for operations in rest for operation in operations)))


def _renamed(graph: StepGraph, prefix: str) -> StepGraph:
    return StepGraph(
        tuple(
            replace(
                one,
                name=prefix + one.name,
                stream=prefix + one.stream,
                after=tuple(prefix + name for name in one.after),
            )
            for one in graph.operations
        )
    )


def joint_schedule(
    graphs: Mapping[str, StepGraph], slowest: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, Span]]:
    """Schedules of all pools when each bridge operation waits for the slowest pool.

    Bridge operations have the same names and order in every pool, so one pass per bridge
    operation settles them.
    """
    shared = [
        operation.name
        for operation in next(iter(graphs.values())).operations
        if operation.name.startswith(EXCHANGE_PREFIX)
    ]
    not_before: dict[str, float] = {}
    schedules = {name: graph.schedule(slowest[name]) for name, graph in graphs.items()}
    for operation in shared:
        not_before[operation] = max(spans[operation].start_s for spans in schedules.values())
        schedules = {
            name: graph.schedule(slowest[name], not_before) for name, graph in graphs.items()
        }
    return schedules
