"""The ranks of a world meet at a store."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from distributed.core.env import WorkerEnv
from distributed.core.errors import LaunchError
from distributed.runtime.world import await_all


class CountingStore:
    """Counts what is asked of a store."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


def come(store: Any, rank: int, world_size: int, timeout_s: float = 30.0) -> None:
    await_all(store, WorkerEnv(rank=rank, world_size=world_size), timeout_s, lambda: False)


def test_store_requests_do_not_grow_with_world_size():
    asked = []
    for world_size in (2, 24):
        store = dist.HashStore()
        last = CountingStore(store)
        for rank in range(world_size - 1):
            with pytest.raises(LaunchError, match="did not come"):  # it is counted, and does not wait
                come(store, rank, world_size, timeout_s=0.0)
        come(last, world_size - 1, world_size)
        asked.append(last.requests)
    assert asked[0] == asked[1]


def test_ranks_missing_at_rendezvous_are_named():
    with pytest.raises(LaunchError, match="ranks 1, 2 did not come"):
        come(dist.HashStore(), 0, 3, timeout_s=0.0)
