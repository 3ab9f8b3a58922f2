"""Rounds: agents join the open round of the rendezvous, or open the next one, and agree on one record.

Each round has a number and is decided once: by its record, or by an entry that it failed. The first of the two that
is written to the store holds for all nodes, so that no two nodes form different worlds.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict

from distributed.launch.rendezvous.attendance import Terms, TooLate, take_seat
from distributed.launch.rendezvous.node_channel import ROUND, KeyValueStore, NodeChannel
from distributed.launch.rendezvous.seating import NodeOffer, RoundRecord, arrange
from distributed.launch.request import LaunchRequest

_POLL_S = 0.02
_IDLE_POLL_S = 0.1
_CARD_S = 5.0  # for a node that has a seat to write its offer
_RECORD_S = 3.0  # after that, for the record to be written
_MEMBERS_FIRST_S = 2.0  # in a full run, for the nodes of the last round to rejoin before others take their seats


class Abandoned(Exception):
    """The caller that waited for this thread gave up."""


class RoundOver(Exception):
    """The nodes have moved to a later round."""


class Rounds:
    """The rounds of a run, from the side of one node."""

    def __init__(self, request: LaunchRequest, *, first_call_s: float = 30.0, last_call_s: float = 3.0) -> None:
        self._request = request
        self._first_call_s = first_call_s
        self._last_call_s = last_call_s
        self._last = 0  # the newest round that this node tried
        self._was_member = False
        self.is_spare = False  # other nodes are in a complete round, and this one waits for the next
        self.is_full_for_good = False  # and no later round will have a seat for it, unless a node is lost

    def forget(self) -> None:
        """Count rounds from the start, because the store is a new one."""
        self._last = 0

    def join(
        self, store: KeyValueStore, talk: NodeChannel, card: NodeOffer, abandoned: threading.Event
    ) -> tuple[int, RoundRecord]:
        """Join the next round with a seat for this node. Runs in a thread that is abandoned if the store hangs."""

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
                seat = take_seat(store, number, terms, check)
                self._last = number
                record = self._agree(store, number, card, before=before, seat=seat[0], seats=seat[1])
            except RoundOver:
                self._last = number
                continue
            except TooLate:
                if time.monotonic() > late_since.setdefault(number, time.monotonic()) + _CARD_S + 2 * _RECORD_S:
                    store.compare_set(
                        f"record/{number}", "", RoundRecord().to_json()
                    )  # the nodes that it was sealed with are gone
                time.sleep(_IDLE_POLL_S)
                continue
            if card.agent in record.agents:
                self._was_member = True
                return number, record

    def _open(self, store: KeyValueStore, talk: NodeChannel, number: int) -> None:
        """Open a round. After the first one, only nodes with a recent heartbeat are waited for."""
        fewest, most = self._request.fewest_nodes, self._request.most_nodes
        if _before(store, number) is None:
            terms = Terms(fewest, max(fewest, min(most, self._request.num_nodes)), self._first_call_s)
        else:
            terms = Terms(fewest, max(fewest, min(most, len(talk.alive()))), self._last_call_s)
        store.compare_set(f"terms/{number}", "", json.dumps(asdict(terms)))
        store.compare_set(ROUND, str(number - 1), str(number))

    def _wait_outside(self, talk: NodeChannel, number: int, decided: RoundRecord) -> None:
        there = talk.alive()
        if not any(agent in there for agent in decided.agents):  # no node is left that could open the next one
            self._last = number
            return
        fixed = self._request.fewest_nodes == self._request.most_nodes
        full = len(decided.agents) >= self._request.most_nodes and all(agent in there for agent in decided.agents)
        self.is_full_for_good = fixed and full and not self._was_member
        time.sleep(_IDLE_POLL_S)

    def _steps_back(self, card: NodeOffer, before: RoundRecord | None) -> bool:
        return before is not None and card.agent not in before.agents and len(before.agents) >= self._request.most_nodes

    def _agree(
        self, store: KeyValueStore, number: int, card: NodeOffer, *, before: RoundRecord | None, seat: int, seats: int
    ) -> RoundRecord:
        """Write this node's offer; the node in seat 0 then writes the record."""
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


def _card(text: bytes) -> NodeOffer:
    fields = json.loads(text)
    return NodeOffer(**fields | {"sizes": tuple(fields["sizes"])})


def _read(store: KeyValueStore, number: int) -> RoundRecord | None:
    key = f"record/{number}"
    return RoundRecord.from_json(store.get(key)) if store.check([key]) else None


def _before(store: KeyValueStore, number: int) -> RoundRecord | None:
    """The record of the last successful round before this one."""
    for earlier in range(number - 1, 0, -1):
        record = _read(store, earlier)
        if record is not None and record.agents:
            return record
    return None
