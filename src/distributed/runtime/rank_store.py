"""RankStore: our launcher's store behind torch's interface; only the run's own processes reach it.

Torch's TCPStore accepts every connection, also of another user of the same machine, so ranks of ours do not use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from distributed.core.env import StoreDoor
from distributed.core.protocol.store_client import StoreClient
from distributed.core.protocol.store_wire import StoreLateError, StoreLostError


class RankStore(dist.Store):
    """One world's part of the store. Torch calls it from C++, by threads of its own too: a connection serves one at a
    time, and there are as many as needed."""

    # Torch holds the C++ part alone, which calls the methods of an object that must therefore live on.
    _alive: list[RankStore] = []  # noqa: RUF012 - of this process, one a world
    timeout: timedelta  # of the C++ part, which PrefixStore sets too

    def __init__(self, door: StoreDoor, attempt: int, timeout_s: float) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        with _torch_errors(()):
            self._client = StoreClient(door.address, door.secret, prefix=f"world-{attempt}/")
        self._alive.append(self)

    def cut(self) -> None:
        """End every wait in it, for good; for any thread to call."""
        self._client.cut()

    def set(self, key: str, value: str | bytes) -> None:
        with _torch_errors((key,)):
            self._client.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with _torch_errors(keys):
            return self._client.wait(keys, self.timeout.total_seconds())

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        with _torch_errors(keys):
            self._client.set_all(keys, values)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with _torch_errors(keys):
            self._client.wait(keys, (self.timeout if timeout is None else timeout).total_seconds())

    def check(self, keys: list[str]) -> bool:
        with _torch_errors(keys):
            return self._client.check(keys)

    def add(self, key: str, amount: int) -> int:
        with _torch_errors((key,)):
            return self._client.add(key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        with _torch_errors((key,)):
            return self._client.compare_set(key, expected, desired)

    def append(self, key: str, value: str | bytes) -> None:
        with _torch_errors((key,)):
            self._client.append(key, value)

    def delete_key(self, key: str) -> bool:
        with _torch_errors((key,)):
            return self._client.delete(key)

    def list_keys(self) -> list[str]:
        with _torch_errors(()):
            return self._client.keys()

    def num_keys(self) -> int:
        return len(self.list_keys())

    def has_extended_api(self) -> bool:
        return True

    deleteKey, getNumKeys, listKeys = delete_key, num_keys, list_keys  # by which torch's C++ calls these three

    def clone(self) -> RankStore:
        """Itself: threads do not hold each other up in it."""
        return self


@contextmanager
def _torch_errors(keys: list[str] | tuple[str, ...]) -> Iterator[None]:
    """By the errors that torch's own stores raise, which its callers and ours know."""
    try:
        yield
    except StoreLateError as late:
        raise dist.DistStoreError(f"wait timeout: {late}, keys: {', '.join(keys)}") from None
    except (StoreLostError, OSError) as lost:
        raise dist.DistNetworkError(str(lost)) from None
