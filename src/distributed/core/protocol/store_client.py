"""StoreClient: the run's key-value store as a process sees it, for any of its threads to use."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from distributed.core.protocol.store_wire import (
    LENGTH_BYTES,
    StoreLateError,
    StoreLostError,
    dial,
    frame_length,
    pack,
    receive,
    unpack,
)

_CONNECT_S = 30.0  # the store may have thousands of ranks to greet at once


class StoreClient:
    """Requests and answers over as many connections as threads use at one time; the first is made at once.

    A key that is not there makes `get` wait. `prefix` stands before every key.
    """

    def __init__(
        self, address: str, secret: str, *, prefix: str = "", timeout_s: float = 10.0, connect_s: float = _CONNECT_S
    ) -> None:
        self._address, self._secret, self._prefix, self._connect_s = address, secret, prefix, connect_s
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._is_cut = False
        self._give_back(self._borrow())

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"set", self._key(key), _bytes(value))

    def get(self, key: str) -> bytes:
        return self.wait([key])[0]

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """The values of keys, once all of them are there; StoreLateError if they do not come."""
        return self._ask(b"wait", *map(self._key, keys), timeout_s=timeout_s)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of keys, None for those that are not there; never waits."""
        answer = self._ask(b"read", *map(self._key, keys))
        return [part[1:] if part[:1] == b"1" else None for part in answer]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        return self._ask(b"check", *map(self._key, keys))[0] == b"1"

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add", self._key(key), str(amount).encode())[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if its value is `expected`, or if that is empty and there is none; what it is then."""
        return self._ask(b"compare", self._key(key), _bytes(expected), _bytes(desired))[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(b"append", self._key(key), _bytes(value))

    def set_all(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._ask(b"set", *(part for key, value in pairs for part in (self._key(key), _bytes(value))))

    def delete(self, key: str) -> bool:
        return self._ask(b"delete", self._key(key))[0] == b"1"

    def keys(self) -> list[str]:
        """All that there are under this prefix."""
        return [key.decode()[len(self._prefix) :] for key in self._ask(b"keys", self._prefix.encode())]

    def cut(self) -> None:
        """End every wait of this client, and refuse further requests; for any thread to call."""
        with self._lock:
            self._is_cut = True
            for line in (*self._idle, *self._busy):
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    def _key(self, key: str) -> bytes:
        return (self._prefix + key).encode()

    def _ask(self, *request: bytes, timeout_s: float | None = None) -> list[bytes]:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            line = self._borrow()
        except OSError as failed:
            raise StoreLostError(f"the run's store does not answer any more: {failed}") from None
        try:
            line.settimeout(max(limit_s, 0.001))
            line.sendall(pack(request))
            answer = unpack(receive(line, frame_length(receive(line, LENGTH_BYTES))))
        except BaseException as failed:  # an answer to this request may still come: the connection cannot be used again
            self._drop(line)
            if isinstance(failed, TimeoutError):
                raise StoreLateError(f"no answer of the run's store within {limit_s:g} s") from None
            if isinstance(failed, OSError | ValueError):
                raise StoreLostError(f"the connection to the run's store is lost: {failed}") from None
            raise
        self._give_back(line)
        return answer

    def _borrow(self) -> socket.socket:
        with self._lock:
            if self._is_cut:
                raise StoreLostError("the connection to the run's store was cut")
            if self._idle:
                line = self._idle.pop()
                self._busy.add(line)
                return line
        line = dial(self._address, self._secret, self._connect_s)
        with self._lock:
            if not self._is_cut:
                self._busy.add(line)
                return line
        line.close()
        raise StoreLostError("the connection to the run's store was cut")

    def _give_back(self, line: socket.socket) -> None:
        with self._lock:
            self._busy.discard(line)
            self._idle.append(line)

    def _drop(self, line: socket.socket) -> None:
        with self._lock:
            self._busy.discard(line)
        line.close()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
