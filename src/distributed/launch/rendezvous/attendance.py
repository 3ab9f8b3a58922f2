"""Attendance: the nodes that join a round are counted in one table of the store, until the table is sealed.

    open table: seats taken by name  --(`most` nodes joined, or `fewest` did and the last call is over)-->  sealed

Every change is a compare-and-set of the whole table, so that all nodes read the same seats once it is sealed.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distributed.launch.rendezvous.node_channel import KeyValueStore

_POLL_S = 0.03


class TooLate(Exception):
    """The round was sealed without this node."""


@dataclass(frozen=True)
class Terms:
    """How many nodes a round takes; the node that opens the round decides."""

    fewest: int
    most: int
    last_call_s: float  # for more nodes to join, once `fewest` have


@dataclass(frozen=True)
class _Table:
    taken: tuple[str, ...] = ()
    sealed: bool = False

    @staticmethod
    def from_json(text: bytes) -> _Table:
        fields: dict[str, Any] = json.loads(text) if text else {}
        return _Table(tuple(fields.get("taken", ())), bool(fields.get("sealed")))

    def to_json(self) -> str:
        return json.dumps({"taken": self.taken, "sealed": self.sealed})


def take_seat(store: KeyValueStore, number: int, terms: Terms, check: Callable[[], None]) -> tuple[int, int]:
    """This node's seat and the number of seats; raises TooLate, and what `check` raises to end the wait."""
    key, me = f"table/{number}", uuid.uuid4().hex
    enough_since: float | None = None
    while True:
        check()
        text = store.read([key])[0] or b""
        table = _Table.from_json(text)
        if table.sealed:
            if me not in table.taken:
                raise TooLate
            return table.taken.index(me), len(table.taken)
        now = time.monotonic()
        if me not in table.taken:
            taken = (*table.taken, me)
            store.compare_set(key, text, _Table(taken, sealed=len(taken) >= terms.most).to_json())
            continue
        enough_since = (enough_since or now) if len(table.taken) >= terms.fewest else None
        if enough_since is not None and now >= enough_since + terms.last_call_s:
            store.compare_set(key, text, _Table(table.taken, sealed=True).to_json())
            continue
        time.sleep(_POLL_S)
