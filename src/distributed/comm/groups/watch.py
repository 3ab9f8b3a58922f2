"""The watch: a thread of each rank that tells the others, over the store, where it stands when one of them asks.

    rank 0                      store                   rank 1's watch
    its deadline passes
    asked += 1          ──►     asked                ◄── looks 4 times a second
                                at/1 = standing      ◄── answers once
    reads at/1          ◄──

So a call costs its rank nothing but a counter, and a rank that computes, sleeps or waits elsewhere is named.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from weakref import ref

import torch.distributed as dist

from distributed.comm.groups.calls import ABSENT, LEFT, SILENT, CallRecord, CollectiveCall, Standing, encode
from distributed.runtime.torch_compat import default_group, default_store

_LOOK_S = 0.25
_RANKS_A_LOOK = 1000  # of a world that looks this often: the store answers each look of each rank
_SHUT_S = 1.0
_FIRST_PAUSE_S = 0.0002

STORE_ERRORS = (RuntimeError, dist.DistError)  # of a store whose world has ended


class PeerWatch:
    """Of one world; a process that joins another one has another watch."""

    def __init__(self) -> None:
        world = default_group()
        self.world = ref(world)  # held, it would outlive its end, and with it threads that abort the interpreter's
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store = dist.PrefixStore("distributed.comm", _own_connection(default_store()))
        self.calls: dict[str, CallRecord] = {}
        self._every_s = _LOOK_S * max(1.0, self.size / _RANKS_A_LOOK)
        self._answered, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._answer_all, name="collectives-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """This rank leaves, and says so. No thread may be in torch's code when the interpreter ends."""
        self._over.set()
        self._thread.join(_SHUT_S)

    def await_key(self, key: str, seconds: float) -> bool:
        """Whether it came. torch's own wait prints a warning when it did not."""
        until, pause = time.monotonic() + seconds, _FIRST_PAUSE_S
        while not self.store.check([key]):
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, self._every_s / 10)
        return True

    def ask(self, group: str, ranks: Iterable[int]) -> dict[int, Standing | str]:
        """Where these ranks stand; what is said of one that does not answer."""
        wanted = {rank for rank in ranks if rank != self.rank}
        found: dict[int, Standing | str] = dict.fromkeys(wanted, SILENT)
        try:
            number = self.store.add("asked", 1)
            until = time.monotonic() + 3 * self._every_s
            while wanted and time.monotonic() < until:
                for rank in sorted(wanted):
                    told = self._told(f"at/{rank}")
                    if told is not None and told["asked"] >= number:
                        found[rank] = Standing.read(told["groups"][group]) if group in told["groups"] else Standing()
                        wanted.discard(rank)
                if wanted:
                    time.sleep(_LOOK_S / 5)
            for rank in wanted:
                if self.store.check([f"left/{rank}"]):
                    found[rank] = LEFT
                elif not self.store.check([f"here/{rank}"]):
                    found[rank] = ABSENT
        except STORE_ERRORS as lost:
            found |= dict.fromkeys(wanted, f"cannot be asked: the store of the group is lost ({_first_line(lost)})")
        return found

    def note_failure(self, group: str, call: CollectiveCall, why: str, *, is_mismatch: bool = False) -> None:
        """For those who wait in the same call."""
        with suppress(*STORE_ERRORS):
            told = encode({"rank": self.rank, "why": why, "is_mismatch": is_mismatch})
            self.store.compare_set(f"failed/{group}/{call.number}", "", told)  # the first one counts

    def failure(self, group: str, call: CollectiveCall) -> dict[str, Any] | None:
        """What a peer has noted of this call."""
        with suppress(*STORE_ERRORS):
            told = self._told(f"failed/{group}/{call.number}")
            return None if told is None or told["rank"] == self.rank else told
        return None

    def _told(self, key: str) -> Any:
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _answer_all(self) -> None:
        with suppress(*STORE_ERRORS):
            self.store.set(f"here/{self.rank}", "")
            while not self._over.wait(self._every_s):
                asked = self.store.add("asked", 0)
                if asked > self._answered:
                    groups = {name: calls.standing() for name, calls in tuple(self.calls.items())}
                    self.store.set(f"at/{self.rank}", encode({"asked": asked, "groups": groups}))
                    self._answered = asked
            self.store.set(f"left/{self.rank}", "")


def _own_connection(store: Any) -> Any:
    """A connection serves one thread at a time, and torch's main thread may wait in the group's own for long."""
    try:
        return store.clone()
    except (*STORE_ERRORS, AttributeError):  # ours, which has as many connections as it needs
        return store


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
