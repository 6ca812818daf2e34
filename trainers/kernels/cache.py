"""Compile many kernels into Triton's cache, on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import replace

from trainers.kernels.build import KernelKey, compiled


def compile_to_cache(keys: Sequence[KernelKey]) -> dict[KernelKey, str]:
    """Compile each key once. Returns those that do not compile, with the compiler's error.

    Splits share a main kernel, so one of each is compiled first.
    """
    with_one_split = [
        replace(key, tile=key.tile.model_copy(update={"split_k": min(key.tile.split_k, 2)}))
        for key in keys
    ]
    failed: dict[KernelKey, str] = {}
    # A fork of a process that runs threads may hang; PyTorch and Triton's compiler have some.
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for batch in (with_one_split, keys):
            distinct = list(dict.fromkeys(batch))
            errors = pool.imap(_compile_one, distinct, chunksize=4)
            failed |= {key: error for key, error in zip(distinct, errors, strict=True) if error}
    return failed


def _compile_one(key: KernelKey) -> str:
    try:
        compiled.__wrapped__(key)
    except Exception as error:  # the compiler's own, of many types: reported, and left out
        return type(error).__name__
    return ""
