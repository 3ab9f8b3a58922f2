"""Mailbox: short texts that the ranks' background threads leave each other, without a collective.

They go through their own connection to the store of the rendezvous, so that the loop's use of it never delays them.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from distributed.core.errors import CheckpointError

_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.25


class Ranks(Protocol):
    """Those who write a checkpoint together, as one of them sees it: a Session, or a process that writes alone."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def is_main(self) -> bool: ...

    @property
    def store(self) -> Any:
        """The store of the rendezvous; None for one rank alone."""

    def number(self) -> int:
        """The same on all ranks, another at each call."""

    def share_text(self, key: str, text: str | None) -> str:
        """The text that one of them passed, on all."""


class Mailbox:
    """A board of one saver; `token` is the same on all its ranks and differs from that of any earlier attempt."""

    def __init__(self, session: Ranks) -> None:
        key = f"checkpoint-{session.number()}"
        self.token = session.share_text(key, uuid.uuid4().hex if session.is_main else None)
        self._own: dict[str, str] = {}
        self._given_up = threading.Event()
        self._store: Any = None
        if session.world_size > 1:
            assert session.store is not None, "a world of several ranks has a store"
            self._store = session.store.clone()

    def give_up(self) -> None:
        """End every wait: it raises."""
        self._given_up.set()

    def sleep(self, seconds: float) -> None:
        """Raises when it is given up meanwhile."""
        if self._given_up.wait(seconds):
            raise _given_up()

    def leave(self, key: str, text: str) -> None:
        if self._store is None:
            self._own[key] = text
        else:
            self._store.set(f"{self.token}/{key}", text)

    def look(self, key: str) -> str | None:
        if self._store is None:
            return self._own.get(key)
        name = f"{self.token}/{key}"
        return str(self._store.get(name).decode()) if self._store.check([name]) else None

    def wait(self, keys: list[str], timeout_s: float, on_late: Callable[[list[str]], CheckpointError]) -> list[str]:
        """The texts under all these keys; raises `on_late(keys that are missing)` after the deadline."""
        found = self.found(keys, timeout_s)
        if len(found) < len(keys):
            raise on_late([key for key in keys if key not in found])
        return [found[key] for key in keys]

    def found(self, keys: Sequence[str], timeout_s: float) -> dict[str, str]:
        """The texts that there are when there are all, or at the deadline."""
        deadline, pause = time.monotonic() + timeout_s, _PAUSE_S
        found: dict[str, str] = {}
        while True:
            for key in keys:
                if key not in found and (text := self.look(key)) is not None:
                    found[key] = text
            if len(found) == len(keys) or time.monotonic() > deadline:
                return found
            if self._given_up.wait(pause):
                raise _given_up()
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)


def _given_up() -> CheckpointError:
    return CheckpointError("the checkpoint was abandoned", why="a rank that wrote a part of it has left this attempt")
