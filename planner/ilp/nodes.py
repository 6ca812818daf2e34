"""The aggregate program with nodes told apart by the pieces that they hold.

The aggregate program bounds the slowest rank by the mean over all ranks. Where some pieces land on
whole nodes (the rows of a table-row-wise table) and others on single ranks, the mean hides that a
node takes the one kind or the other. In addition to ``formulation``:

    n, D            node; ranks of a node
    y[g,o,k,n]      integer >= 0: pieces of class k on node n, on whichever of its ranks
    W[n,c]          what node pieces put on each rank of n: sum P[g,o,k,c] y[g,o,k,n], k of nodes

    (20) sum_n y[g,o,k,n] = mu_k x[g,o]
    (21) L[c] >= S[c] + W[n,c] + sum P[g,o,k,c] y[g,o,k,n] / D           k of ranks; for all n, c
    (22) L[c] >= S[c] + W[n,c] + h q[n,c,h];
         D q[n,c,h] >= sum floor(P[g,o,k,c] / h) y[g,o,k,n]              k of ranks; q integer
    (23) nodes in the order of descending (21): they are interchangeable

with cap[b] in the place of L[c] for memory. (21) is (7) averaged over the ranks of a node, (22) is
(13) on one node, and neither looks at which rank of its node a piece lands on, so the optimum is a
lower bound that is never below the aggregate program's.
"""

from __future__ import annotations

from itertools import pairwise

import pulp

from planner.cost.load import Scope
from planner.ilp.formulation import Formulation, PieceKey, aggregate, exact, expression, scales
from planner.ilp.program import HBM, HOST, PoolProgram

MOST_NODES = 8
"""Of more nodes the solver tries too many arrangements that differ in name only."""
MOST_VARIABLES = 1500
"""Integer variables of a program that is tried."""
MOST_PLACES = 600
"""Places of pieces up to which a solution is put on ranks by the exact program."""
LARGE = 0.2
"""Smallest size h of equation (22), as a share of the largest piece."""
SIZES = 3

Terms = list[tuple[pulp.LpVariable, float]]


def tells_apart(program: PoolProgram) -> bool:
    """Whether there are few enough nodes and variables."""
    shards = sum(len(option.shards) for loads in program.loads for option in loads)
    return program.nodes <= MOST_NODES and program.nodes * shards <= MOST_VARIABLES


def by_node(program: PoolProgram, unit_s: float, memory: bool, below_s: float) -> Formulation:
    """The aggregate program with equations (20) to (23); ``y`` by node.

    Args:
        below_s: a step that is known. Larger pieces tell nothing of shorter ones.
    """
    form = aggregate(program, unit_s, memory)
    problem = form.problem
    for g, loads in enumerate(program.loads):
        most = len(program.classes[g].tables)
        for o, option in enumerate(loads):
            for k, shard in enumerate(option.shards):
                mu = len(shard.pieces)
                form.y[g, o, k] = y = [
                    problem.add_variable(f"y_{g}_{o}_{k}_{n}", 0, mu * most, pulp.LpInteger)
                    for n in range(program.nodes)
                ]
                problem += expression([(v, 1.0) for v in y] + [(form.x[g][o], -mu)]) == 0  # (20)
    means = [_close(form, node, below_s) for node in range(program.nodes)]
    for first, second in pairwise(means):
        if first or second:
            problem += expression([*first, *((v, -load) for v, load in second)]) >= 0  # (23)
    return form


def nodes_of_pieces(form: Formulation) -> dict[PieceKey, list[int]]:
    """The node of each piece of all tables of an option, in a solution of ``by_node``.

    Empty if the program does not tell nodes apart.
    """
    return {
        key: [node for node, count in enumerate(y) for _ in range(round(count.value()))]
        for key, y in form.y.items()
    }


def dealt(form: Formulation) -> Formulation | None:
    """The exact program of a solution of ``by_node``: what is open is the rank, in the node that
    the solution gives it, of each piece. None if that is too much for the solver."""
    program, counts = form.program, form.counts()
    kept = [[o for o, count in enumerate(row) if count] for row in counts]
    places = {Scope.RANK: program.ranks, Scope.NODE: program.nodes, Scope.POOL: 1}
    fixed = program.keep(kept)
    variables = sum(
        places[shard.scope] for row in fixed.loads for option in row for shard in option.shards
    )
    if variables > MOST_PLACES:
        return None
    nodes = {
        (g, position, k): form.y[g, o, k]
        for g, row in enumerate(kept)
        for position, o in enumerate(row)
        for k in range(len(program.loads[g][o].shards))
    }
    result = exact(fixed, form.unit_s)
    for g, row in enumerate(kept):
        for position, o in enumerate(row):
            result.problem += result.x[g][position] == counts[g][o]
    for (g, position, k), y in nodes.items():
        whole = fixed.loads[g][position].shards[k].scope is Scope.NODE
        width = 1 if whole else program.devices_per_node
        for node, count in enumerate(y):
            inside = result.y[g, position, k][node * width : (node + 1) * width]
            result.problem += pulp.lpSum(inside) == round(count.value())
    return result


def _close(form: Formulation, node: int, below_s: float) -> Terms:
    """Equations (21) and (22) of a node; its mean load of the first component."""
    program, scale = form.program, scales(form.program, form.unit_s)
    shards = [(key, program.loads[key[0]][key[1]].shards[key[2]]) for key in form.y]
    means: list[Terms] = []
    for c, everywhere in form.everywhere.items():
        limit = 1.0 if c in (HBM, HOST) else form.slowest[c]
        whole: Terms = [(everywhere, 1.0)]
        own: list[tuple[PieceKey, float]] = []
        for key, shard in shards:
            load = float(shard.load[c])
            if load > 0 and shard.scope is Scope.NODE:
                whole.append((form.y[key][node], load * scale(c)))
            elif load > 0:
                own.append((key, load))
        share = scale(c) / program.devices_per_node
        mean = [*whole, *((form.y[key][node], load * share) for key, load in own)]
        means.append(mean[1:])
        form.problem += expression(mean) <= limit  # (21)
        most = {HBM: program.hbm_room_bytes, HOST: program.host_room_bytes}.get(c, below_s)
        for index, size in enumerate(_sizes([load for _, load in own if load <= most])):
            q = form.problem.add_variable(f"q_{node}_{c}_{index}", 0, None, pulp.LpInteger)
            counted = [
                (form.y[key][node], float(load // size)) for key, load in own if load >= size
            ]
            form.problem += expression([*counted, (q, -float(program.devices_per_node))]) <= 0
            form.problem += expression([*whole, (q, size * scale(c))]) <= limit  # (22)
    return means[0] if means else []


def _sizes(loads: list[float]) -> list[float]:
    """A few of the sizes of large pieces, the smallest of them first."""
    large = sorted({load for load in loads if load >= LARGE * max(loads)})
    return large[:: max(1, -(-len(large) // SIZES))]
