"""Agreement: whether the ranks of a group call the same, compared over its store before anything is sent.

    each rank                                the store
    compare_set(call, "", mine)        ──►   what the first rank means; another one means something else: an error
    add(call/n, 1); the last: set(all) ──►
    wait(call/all)                     ◄──   all have compared

gloo and NCCL take tensors of other sizes or dtypes for what they expected and leave wrong numbers behind. A rank whose
operation, dtype and shape are known to it does not compare again, so one that waits for such a peer asks it.
"""

from __future__ import annotations

import time
from typing import Any

from distributed.comm.groups.calls import LEFT, SILENT, CollectiveCall, Standing, What, describe
from distributed.comm.groups.watch import PeerWatch
from distributed.core.errors import MismatchError
from distributed.runtime.world import CollectiveError

_SLICE_S = 0.25
_RANKS_ASKED = 64  # that may be asked so soon; where there are more, later
_MOST_KNOWN = 10_000  # shapes that are remembered
_NONE = "?"  # a message that no receiver waits for yet
_DO = "give every rank of the group the same operation, dtype and shape in the same order of calls"


def raise_told(rank: int, call: CollectiveCall, told: dict[str, Any]) -> None:
    """What a peer has noted of the call in which this rank waits."""
    if told["is_mismatch"]:
        raise MismatchError(told["why"], why=f"rank {told['rank']} found it in {call}", do=_DO)
    raise CollectiveError(f"[r{rank}] {call} failed at a peer: at rank {told['rank']} it {told['why']}")


class CallAgreement:
    """Of one group."""

    def __init__(self, group: str, ranks: list[int], watch: PeerWatch) -> None:
        self._group, self._ranks, self._watch = group, ranks, watch
        self._known: set[What] = set()
        self._last = ""

    def is_known(self, call: CollectiveCall, *, always: bool) -> bool:
        """Whether there is nothing to compare."""
        return len(self._ranks) == 1 or (call.what in self._known and not always)

    def check(self, call: CollectiveCall) -> None:
        """That all ranks mean the same."""
        store, key, mine = self._watch.store, f"check/{self._group}/{call.number}", describe(call.what)
        rank, _, theirs = store.compare_set(key, "", f"{self._watch.rank}|{mine}").decode().partition("|")
        if theirs != mine:
            self._refuse(call, int(rank), f"calls {theirs}")
        if store.add(f"{key}/n", 1) == len(self._ranks):
            store.set(f"{key}/all", "")
            for ending in ("", "/n", "/all") if self._last else ():  # all have left the one before
                store.delete_key(self._last + ending)
        else:
            self._await_all(call, f"{key}/all")
        self._last = key
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(call.what)

    def offer_message(self, call: CollectiveCall, pair: tuple[int, int]) -> None:
        """The sender says what it sends, without waiting, and compares where the receiver has come already."""
        key, mine = self._message(call, pair), describe(call.what[1:])
        self._watch.store.set(key, mine)
        theirs = self._watch.store.compare_set(f"{key}/wanted", _NONE, _NONE).decode()  # what it is, or this
        if theirs not in (_NONE, mine):
            self._refuse(call, pair[1], f"waits for {theirs}")

    def expect_message(self, call: CollectiveCall, pair: tuple[int, int]) -> None:
        """A receiver that goes on before the sender has come says what it waits for; else it compares."""
        key = self._message(call, pair)
        self._watch.store.set(f"{key}/wanted", describe(call.what[1:]))
        if self._watch.store.check([key]):
            self._compare(call, pair, key)

    def check_message(self, call: CollectiveCall, pair: tuple[int, int]) -> None:
        """The receiver compares, once the sender has come."""
        key = self._message(call, pair)
        if not self._watch.await_key(key, call.until - time.monotonic()):
            raise RuntimeError("nothing was sent")
        self._compare(call, pair, key)
        for ending in ("", "/wanted"):
            self._watch.store.delete_key(key + ending)

    def _compare(self, call: CollectiveCall, pair: tuple[int, int], key: str) -> None:
        theirs = self._watch.store.get(key).decode()
        if theirs != describe(call.what[1:]):
            self._refuse(call, pair[0], f"sends {theirs}")

    def _message(self, call: CollectiveCall, pair: tuple[int, int]) -> str:
        return f"message/{self._group}/{pair[0]}-{pair[1]}/{call.number}"

    def _await_all(self, call: CollectiveCall, key: str) -> None:
        began, ask_after_s = time.monotonic(), _SLICE_S * max(1.0, len(self._ranks) / _RANKS_ASKED)
        while True:
            left = call.until - time.monotonic()
            if self._watch.await_key(key, min(_SLICE_S, left)):
                return
            if left <= 0:
                raise RuntimeError("not all ranks have come")
            told = self._watch.failure(self._group, call)
            if told is not None:
                raise_told(self._watch.rank, call, told)
            if time.monotonic() - began > ask_after_s:
                if self._is_settled(call):
                    return
                began, ask_after_s = time.monotonic(), 2 * ask_after_s

    def _is_settled(self, call: CollectiveCall) -> bool:
        """Whether no other rank will come to compare: it is in this call already, whose kind it knew, or is silent.

        Of a silent one, the backend knows better whether it is dead; should it come, it compares with the first rank.
        """
        standings = self._watch.ask(self._group, self._ranks)
        for rank, standing in standings.items():
            if isinstance(standing, Standing) and standing.begun >= call.number:
                differs = standing.differs(call.number, describe(call.what))
                if differs:
                    self._refuse(call, rank, f"has called {differs}")
            elif standing == LEFT:
                raise RuntimeError("a rank has left")
        begun = (
            found == SILENT if isinstance(found, str) else found.begun >= call.number for found in standings.values()
        )
        return all(begun)

    def _refuse(self, call: CollectiveCall, rank: int, theirs: str) -> None:
        mine = f"rank {self._watch.rank} calls {describe(call.what)}"
        raise MismatchError(f"{mine}, rank {rank} {theirs}", why=f"rank {self._watch.rank} found it in {call}", do=_DO)
