"""A node of the measurement: it introduces itself, then takes its turns with each other node.

All meet in the run's store, which only those reach who know its secret; a node waits there for the turn before its own.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from distributed.bench.network.lines import Listener, MeasuredLine, dial_lines
from distributed.bench.network.measuring import StreamTurn, answer_all, ask_and_time
from distributed.bench.network.rdma import serving, write_to
from distributed.bench.network.turns import MeasuredNode, NetworkAsked, NetworkTimes, NetworkTurn, collect, plan_turns
from distributed.core.env import StoreDoor
from distributed.core.errors import LaunchError
from distributed.core.protocol.store_client import StoreClient
from distributed.core.protocol.store_wire import StoreLateError, StoreLostError

_LOOK_S = 1.0
_MEET_S = 60.0
_CONNECT_S = 10.0
_SERVER_BEGINS_S = 1.0  # ib_write_bw opens its port some time after its start

Notify = Callable[[str, int, int], None]


class NodeMeasurement:
    """This node's side of all turns. `check` raises what has become of the others, and is called while it waits."""

    def __init__(self, door: StoreDoor, me: MeasuredNode, size: int, *, check: Callable[[], None]) -> None:
        self._store = StoreClient(door.address, door.secret, prefix="bench-network/")
        self._me, self._size, self._check = me, size, check

    def run(self, asked: NetworkAsked, notify: Notify) -> NetworkTimes:
        if self._me.rank == 0:  # all measure what node 0 was asked for
            self._store.set_all(["secret", "asked"], [secrets.token_hex(32), json.dumps(asdict(asked))])
        secret, text = self._wait(["secret", "asked"], _MEET_S)
        asked = NetworkAsked(**json.loads(text))
        with closing(Listener(self._me.address, secret.decode())) as listener:
            me = replace(self._me, port=listener.port)
            self._store.set(f"node/{me.rank}", json.dumps(asdict(me)))
            texts = self._wait([f"node/{rank}" for rank in range(self._size)], _MEET_S)
            nodes = [MeasuredNode(**json.loads(text)) for text in texts]
            turns = plan_turns(nodes, asked.streams)
            results = []
            for number, turn in enumerate(turns):
                notify(_words(turn), number, len(turns))
                if me.rank in turn.nodes:
                    said = self._take(number, turn, asked, listener, nodes=nodes, secret=secret.decode())
                    self._store.set(f"result/{number}/{me.rank}", json.dumps(said))
                found = self._wait([f"result/{number}/{rank}" for rank in turn.nodes], asked.turn_timeout_s)
                results.append({rank: json.loads(text) for rank, text in zip(turn.nodes, found, strict=True)})
        return collect(nodes, asked, turns, results)

    def _take(
        self,
        number: int,
        turn: NetworkTurn,
        asked: NetworkAsked,
        listener: Listener,
        *,
        nodes: Sequence[MeasuredNode],
        secret: str,
    ) -> dict[str, Any]:
        other = nodes[turn.answerer if self._me.rank == turn.asker else turn.asker]
        try:
            if turn.kind == "rdma":
                return self._take_rdma(number, turn, asked, other)
            return self._take_lines(number, turn, asked, listener, other=other, secret=secret)
        except (LaunchError, OSError, StoreLostError) as failed:
            self._check()  # which may know what has become of the other
            why = failed.problems[0].why if isinstance(failed, LaunchError) else str(failed)
            what = f"the measurement with node {other.rank} ({other.host}) broke off"
            raise LaunchError(what, why=why, do="start it again on all nodes") from failed

    def _take_lines(
        self,
        number: int,
        turn: NetworkTurn,
        asked: NetworkAsked,
        listener: Listener,
        *,
        other: MeasuredNode,
        secret: str,
    ) -> dict[str, Any]:
        asks = self._me.rank == turn.asker
        if asks:
            lines = dial_lines(other.address, other.port, secret, number, sends=turn.sends, timeout_s=_CONNECT_S)
        else:
            lines = listener.accept(number, len(turn.sends), _CONNECT_S)
        try:
            return self._measure(turn, asked, lines, asks)
        finally:
            for line in lines:
                line.close()

    def _measure(self, turn: NetworkTurn, asked: NetworkAsked, lines: list[MeasuredLine], asks: bool) -> dict[str, Any]:
        if turn.kind == "latency":
            if asks:
                return {"trips": asdict(ask_and_time(lines[0], asked.seconds))}
            answer_all(lines[0])
            return {}
        arrived = StreamTurn(lines, asked.seconds, asked.omitted_s).run()
        sent_again = [line.retransmits for line in lines if line.sends]
        counts = [count for count in sent_again if count is not None]
        return {
            "arrived": None if arrived is None else asdict(arrived),
            "retransmits": sum(counts) if sent_again and len(counts) == len(sent_again) else None,
        }

    def _take_rdma(self, number: int, turn: NetworkTurn, asked: NetworkAsked, other: MeasuredNode) -> dict[str, Any]:
        """The answerer's memory is written to; the writer knows how fast, and tells the other."""
        if self._me.rank == turn.answerer:
            with serving(self._me.rdma, asked.seconds) as port:
                time.sleep(_SERVER_BEGINS_S)
                self._store.set(f"rdma/{number}/port", str(port))
                said: dict[str, Any] = json.loads(self._wait([f"rdma/{number}/rate"], asked.turn_timeout_s)[0])
            return said
        port = int(self._wait([f"rdma/{number}/port"], asked.turn_timeout_s)[0])
        try:
            rate = write_to(self._me.rdma, other.address, port, asked.seconds)
            said = {"arrived": {"gbit_s": rate, "low_gbit_s": None, "high_gbit_s": None}}
        except LaunchError as failed:  # the measurement over TCP counts all the same
            said = {"failed": failed.problems[0].why}
        self._store.set(f"rdma/{number}/rate", json.dumps(said))
        return {}

    def _wait(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        while True:
            self._check()
            try:
                return self._store.wait(keys, _LOOK_S)
            except StoreLateError:
                if time.monotonic() < deadline:
                    continue
            missing = [key for key in keys if not self._store.check([key])]
            raise LaunchError(
                f"node {self._me.rank} ({self._me.host}) waited {timeout_s:g} s for {', '.join(missing)}",
                why="the other node did not come to that point",
                do="see what it printed; run the same command on all nodes",
            )


def _words(turn: NetworkTurn) -> str:
    one, other = turn.nodes if turn.asker_sends else turn.nodes[::-1]
    if turn.kind == "both":
        return f"{turn.streams} streams each way between nodes {one} and {other}"
    what = {"latency": "round trips", "rdma": "RDMA"}.get(turn.kind, f"{turn.streams} streams")
    return f"{what} from node {one} to node {other}"
