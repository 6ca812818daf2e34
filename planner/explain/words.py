"""Operations and placements in words, for sentences and tables."""

from __future__ import annotations

from planner.specs.plan import Placement

OPERATIONS = {
    "host": "the host's launches",
    "input_exchange": "the exchange of ids",
    "embedding_forward": "the look-up",
    "output_exchange": "the exchange of pooled rows",
    "bottom_forward": "the bottom network's forward pass",
    "top_forward": "the top network's forward pass",
    "precision_casts": "casts to the compute precision",
    "loss": "the loss",
    "top_backward": "the top network's backward pass",
    "bottom_backward": "the bottom network's backward pass",
    "gradient_exchange": "the exchange of pooled rows' gradients",
    "dense_all_reduce_top": "the all-reduce of the top's gradients",
    "dense_all_reduce_bottom": "the all-reduce of the bottom's gradients",
    "embedding_backward": "the tables' backward pass and update",
    "table_all_reduce": "the all-reduce of data-parallel tables",
    "replica_exchange": "the exchange of table copies between replica groups",
    "cache_prefetch": "rows fetched ahead from host memory",
    "dense_optimizer": "the dense optimizer",
    "bridge:dense_top": "the top's gradients over the bridge",
    "bridge:dense": "dense gradients over the bridge",
    "bridge:embedding": "table copies over the bridge",
}
GATHER, REST = "gather_", "_rest"
"""Around the pass that fully sharded parameters are gathered for: its first block, the others."""
MOST_RANKS = 4
"""Ranks that are named one by one."""


def told(operation: str) -> str:
    """An operation of the step graph in words."""
    if operation.startswith(GATHER):
        return f"gathering parameters for {told(operation.removeprefix(GATHER).removesuffix(REST))}"
    return OPERATIONS.get(operation, operation.replace("_", " "))


def placed(placement: Placement) -> str:
    """A placement in a few words: sharding, kernel, precision, ranks."""
    parts = [str(placement.sharding_type)]
    if placement.column_widths:
        parts.append("+".join(map(str, placement.column_widths)))
    kernel = str(placement.compute_kernel)
    if placement.cache_load_factor is not None:
        kernel += f" {100 * placement.cache_load_factor:.0f} %"
    parts += [kernel, str(placement.data_type), where(placement)]
    return " ".join(parts)


def where(placement: Placement) -> str:
    """The ranks of a placement."""
    ranks = placement.ranks
    if len(ranks) == 1:
        return f"on rank {ranks[0]}"
    distinct = sorted(set(ranks))
    if len(distinct) <= MOST_RANKS:
        return f"on ranks {', '.join(map(str, ranks))}"
    if distinct == list(range(distinct[0], distinct[-1] + 1)):
        return f"on ranks {distinct[0]}-{distinct[-1]}"
    return f"on {len(distinct)} ranks"
