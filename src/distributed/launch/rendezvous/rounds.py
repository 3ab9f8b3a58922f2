"""Rounds: agents find the meeting that is open, or open the next one, and agree there on one record.

Each round has a number and is decided once: by its record, or by the word that it came to nothing. Which of the two is
written first in the store holds for all, so that no two nodes believe in different worlds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from distributed.launch.peers import ROUND, KeyValueStore, NodeTalk
from distributed.launch.request import LaunchRequest
from distributed.launch.seats import NodeCard, RoundRecord, arrange

_POLL_S = 0.02
_IDLE_POLL_S = 0.1
_CARD_S = 5.0  # for a node that was counted to say who it is
_RECORD_S = 3.0  # beyond that, for the record to be written
_MEMBERS_FIRST_S = 2.0  # in a full run, for the nodes of the last round to come back before others take their seats


class Abandoned(Exception):
    """Whoever waited for this gave up."""


class RoundOver(Exception):
    """The nodes have gone on to a later round."""


class TooLate(Exception):
    """The round was sealed without this node."""


@dataclass(frozen=True)
class Terms:
    """How many nodes a round takes; those who open it decide, for all who come."""

    fewest: int
    most: int
    last_call_s: float  # for more to come, once the fewest are there


class Rendezvous(Protocol):
    """Counts those who come."""

    def __call__(self, store: KeyValueStore, number: int, terms: Terms, check: Callable[[], None]) -> tuple[int, int]:
        """This node's seat and how many there are; raises TooLate, and whatever `check` raises to end the wait."""


class Rounds:
    """The rounds of a run as one node lives through them."""

    def __init__(
        self, request: LaunchRequest, rendezvous: Rendezvous, *, first_call_s: float = 30.0, last_call_s: float = 3.0
    ) -> None:
        self._request = request
        self._rendezvous = rendezvous
        self._first_call_s = first_call_s
        self._last_call_s = last_call_s
        self._last = 0  # the newest round that this node tried
        self._was_member = False
        self.is_spare = False  # others are in a round that is complete, and this node waits for the next one
        self.is_full_for_good = False  # and there will be none for it, as things stand

    def forget(self) -> None:
        """The store is a new one: rounds are counted from the start."""
        self._last = 0

    def meet(
        self, store: KeyValueStore, talk: NodeTalk, card: NodeCard, abandoned: threading.Event
    ) -> tuple[int, RoundRecord]:
        """The next round that this node is in. Runs in a thread that is abandoned when the store hangs."""

        def check() -> None:
            if abandoned.is_set():
                raise Abandoned
            if store.add(ROUND, 0) > number:
                raise RoundOver

        opened_at: dict[int, float] = {}
        late_since: dict[int, float] = {}
        while True:
            number = store.add(ROUND, 0)
            if abandoned.is_set():
                raise Abandoned
            if not talk.has_looked:
                time.sleep(_POLL_S)
                continue
            if number <= self._last:
                self._open(store, talk, self._last + 1)
                continue
            decided = _read(store, number)
            self.is_spare = decided is not None and bool(decided.agents)
            if decided is not None:
                self._wait_outside(talk, number, decided)
                continue
            before = _before(store, number)
            if self._steps_back(card, before) and time.monotonic() < (
                opened_at.setdefault(number, time.monotonic()) + _MEMBERS_FIRST_S
            ):
                time.sleep(_IDLE_POLL_S)
                continue
            terms = Terms(**json.loads(store.get(f"terms/{number}")))
            try:
                seat = self._rendezvous(store, number, terms, check)
                self._last = number
                record = self._agree(store, number, card, before, *seat)
            except RoundOver:
                self._last = number
                continue
            except TooLate:
                if time.monotonic() > late_since.setdefault(number, time.monotonic()) + _CARD_S + 2 * _RECORD_S:
                    store.compare_set(
                        f"record/{number}", "", RoundRecord().to_json()
                    )  # those it was sealed with are gone
                time.sleep(_IDLE_POLL_S)
                continue
            if card.agent in record.agents:
                self._was_member = True
                return number, record

    def _open(self, store: KeyValueStore, talk: NodeTalk, number: int) -> None:
        """Begin a round. After the first one those who are there are waited for, and nobody else."""
        fewest, most = self._request.fewest_nodes, self._request.most_nodes
        if _before(store, number) is None:
            terms = Terms(fewest, max(fewest, min(most, self._request.num_nodes)), self._first_call_s)
        else:
            terms = Terms(fewest, max(fewest, min(most, len(talk.alive()))), self._last_call_s)
        store.compare_set(f"terms/{number}", "", json.dumps(asdict(terms)))
        store.compare_set(ROUND, str(number - 1), str(number))

    def _wait_outside(self, talk: NodeTalk, number: int, decided: RoundRecord) -> None:
        there = talk.alive()
        if not any(agent in there for agent in decided.agents):  # nobody is left who could begin the next one
            self._last = number
            return
        fixed = self._request.fewest_nodes == self._request.most_nodes
        full = len(decided.agents) >= self._request.most_nodes and all(agent in there for agent in decided.agents)
        self.is_full_for_good = fixed and full and not self._was_member
        time.sleep(_IDLE_POLL_S)

    def _steps_back(self, card: NodeCard, before: RoundRecord | None) -> bool:
        return before is not None and card.agent not in before.agents and len(before.agents) >= self._request.most_nodes

    def _agree(
        self, store: KeyValueStore, number: int, card: NodeCard, before: RoundRecord | None, seat: int, seats: int
    ) -> RoundRecord:
        """Lay the card on the table; the one in seat 0 writes the record."""
        store.set(f"card/{number}/{seat}", json.dumps(asdict(card)))
        deadline = time.monotonic() + _CARD_S + (_RECORD_S if seat else 0.0)
        record = RoundRecord()
        if seat == 0:
            keys = [f"card/{number}/{other}" for other in range(seats)]
            if _await(store, keys, deadline):
                fixed = self._request.fewest_nodes == self._request.most_nodes
                record = arrange([_card(store.get(key)) for key in keys], before, equal=fixed)
        elif _await(store, [f"record/{number}"], deadline):
            return RoundRecord.from_json(store.get(f"record/{number}"))
        return RoundRecord.from_json(store.compare_set(f"record/{number}", "", record.to_json()))


def _await(store: KeyValueStore, keys: list[str], deadline: float) -> bool:
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _card(text: bytes) -> NodeCard:
    fields = json.loads(text)
    return NodeCard(**fields | {"sizes": tuple(fields["sizes"])})


def _read(store: KeyValueStore, number: int) -> RoundRecord | None:
    key = f"record/{number}"
    return RoundRecord.from_json(store.get(key)) if store.check([key]) else None


def _before(store: KeyValueStore, number: int) -> RoundRecord | None:
    """The record of the last round before this one that came to something."""
    for earlier in range(number - 1, 0, -1):
        record = _read(store, earlier)
        if record is not None and record.agents:
            return record
    return None
