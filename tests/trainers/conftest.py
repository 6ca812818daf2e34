"""A gloo world of one, for tests that need no second process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def world_of_one() -> Iterator[None]:
    # One core: compute threads that wait for each other are slow beside other busy processes.
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    os.sched_setaffinity(0, cores)
