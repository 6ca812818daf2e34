"""Small valid cluster, model and plan data; tests break one field at a time."""

from __future__ import annotations

import copy
from typing import Any

CLUSTER: dict[str, Any] = {
    "name": "two",
    "pools": [
        {"name": "amd", "device": "mi350x", "nodes": 1, "devices_per_node": 2},
        {"name": "nvidia", "device": "b200", "nodes": 1, "devices_per_node": 1},
    ],
    "bridge": {"gbps": 40, "latency_us": 50, "rails": 1},
}

MODEL: dict[str, Any] = {
    "name": "toy",
    "description": "two tables",
    "source": "made up",
    "arch": "dlrm_dot",
    "global_batch": 96,
    "dense_features": 4,
    "bottom_mlp": [8, 16],
    "interaction": {"type": "dot"},
    "top_mlp": [8, 1],
    "tables": [
        {"name": "user", "num_embeddings": 100, "embedding_dim": 16, "pooling_factors": [2.0, 1.0]},
        {"name": "item", "count": 2, "num_embeddings": 50, "embedding_dim": 16},
    ],
    "optimizer": {
        "dense": {"name": "sgd", "learning_rate": 0.1},
        "sparse": {"name": "rowwise_adagrad", "learning_rate": 0.1},
    },
}


def _pool(device: str, ranks: int, local_batch: int) -> dict[str, Any]:
    everywhere = list(range(ranks))
    return {
        "device": device,
        "nodes": 1,
        "devices_per_node": ranks,
        "ranks": ranks,
        "local_batch": local_batch,
        "policy": {"compute_precision": "fp32"},
        "placements": {
            "user": {
                "sharding_type": "row_wise",
                "compute_kernel": "fused",
                "data_type": "fp32",
                "ranks": everywhere,
            },
            "item_0": {
                "sharding_type": "column_wise",
                "compute_kernel": "fused",
                "data_type": "fp32",
                "ranks": [0, ranks - 1],
                "column_widths": [4, 12],
            },
            "item_1": {
                "sharding_type": "table_wise",
                "compute_kernel": "fused_uvm_caching",
                "data_type": "fp32",
                "ranks": [0],
                "cache_load_factor": 0.25,
            },
        },
        "memory_bytes": [
            {"weights": 6400, "activations": 100 + rank, "total": 6500 + rank, "capacity": 10_000,
             "host": 0}
            for rank in everywhere
        ],
        "predicted": {
            "step_ms": 1.5,
            "breakdown_ms": {"embedding_forward": 0.5, "top_forward": 1.0, "idle": 0.0},
            "critical_path": ["embedding_forward", "top_forward"],
            "slowest_rank": 0,
        },
    }  # fmt: skip


PLAN: dict[str, Any] = {
    "schema_version": 2,
    "hwplan_version": "0.1.0",
    "kind": "planned",
    "fingerprint": "0" * 64,
    "fingerprint_parts": {"cluster": "a", "model": "b", "profiles": "c", "code": "d"},
    "cluster": CLUSTER,
    "model": MODEL,
    "global_batch": 96,
    "pools": {"amd": _pool("mi350x", 2, 24), "nvidia": _pool("b200", 1, 48)},
    "exchange": {
        "embedding_interval_steps": 1,
        "dense_bytes_per_step": 2048,
        "embedding_bytes_per_exchange": 4096,
    },
    "predicted": {
        "step_ms": 1.5,
        "samples_per_s": 64_000.0,
        "lower_bound_ms": 1.4,
        "gap": 0.0714,
        "provenance": {"datasheet": 10, "measured": 3},
        "error_band": 0.15,
    },
    "solver": {
        "name": "HiGHS",
        "status": "time_limit",
        "mip_gap": 0.01,
        "time_limit_s": 60.0,
        "evaluated": 4,
        "pruned": 2,
    },
    "considered": [
        {
            "description": "both pools",
            "pools": ["amd", "nvidia"],
            "local_batch": {"amd": 24, "nvidia": 48},
            "step_ms": 1.5,
            "samples_per_s": 64_000.0,
            "chosen": True,
        },
        {
            "description": "nvidia alone",
            "pools": ["nvidia"],
            "local_batch": {"nvidia": 96},
            "step_ms": None,
            "samples_per_s": None,
            "note": "short of memory",
        },
    ],
}


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of ``base`` with the field at a dotted path set (added if it is new)."""
    result = copy.deepcopy(base)
    here: Any = result
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        here = here[part]
    here[last] = value
    return result


def without(base: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy of ``base`` without the field at a dotted path."""
    result = copy.deepcopy(base)
    here: Any = result
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        here = here[part]
    del here[last]
    return result
