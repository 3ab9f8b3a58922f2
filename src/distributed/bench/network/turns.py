"""The turns of a measurement, the same on all nodes, and what came out of them.

each pair of nodes in turn, all others wait:
latency │ 1 stream ▶ │ ◀ 1 stream │ N streams ▶ │ ◀ N streams │ ◀ N ▶ at once │ RDMA ▶ │ ◀ RDMA
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any, Literal

from distributed.bench.machine import describe_machine, describe_versions, load_average

Kind = Literal["latency", "stream", "both", "rdma"]


@dataclass(frozen=True)
class NetworkTurn:
    """One measurement of two nodes; the first of them dials."""

    kind: Kind
    asker: int
    answerer: int
    streams: int = 1
    asker_sends: bool = True

    @property
    def nodes(self) -> tuple[int, int]:
        return self.asker, self.answerer

    @property
    def sends(self) -> tuple[bool, ...]:
        """For each line of the turn: whether the asker sends on it."""
        if self.kind == "both":
            return (True,) * self.streams + (False,) * self.streams
        return (self.asker_sends,) * self.streams


@dataclass(frozen=True)
class MeasuredNode:
    """A node as it introduces itself to the others."""

    rank: int
    host: str
    interface: str
    address: str
    port: int = 0
    speed_mbit: int = 0  # the link's nominal rate; 0: not known
    mtu: int = 0
    rdma: str = ""  # device/port that ib_write_bw can measure here; "": none


_TOLD = ("rank", "host", "interface", "speed_mbit", "mtu", "rdma")  # in the record, without addresses


@dataclass(frozen=True)
class NetworkAsked:
    """What is measured."""

    streams: int = 4
    seconds: float = 2.0

    @property
    def omitted_s(self) -> float:
        """Of the beginning, while TCP finds out how fast it may send."""
        return min(1.0, self.seconds / 4)

    @property
    def turn_timeout_s(self) -> float:
        return 60.0 + 4 * self.seconds


def plan_turns(nodes: Sequence[MeasuredNode], streams: int) -> tuple[NetworkTurn, ...]:
    """
    >>> nodes = [MeasuredNode(rank, f"n{rank}", "eth0", "") for rank in range(2)]
    >>> [(turn.kind, turn.streams, turn.asker_sends) for turn in plan_turns(nodes, 4)][:3]
    [('latency', 1, True), ('stream', 1, True), ('stream', 1, False)]
    """
    return tuple(turn for one, other in combinations(nodes, 2) for turn in _of_pair(one, other, streams))


def _of_pair(one: MeasuredNode, other: MeasuredNode, streams: int) -> Iterator[NetworkTurn]:
    a, b = one.rank, other.rank
    yield NetworkTurn("latency", a, b)
    for count in dict.fromkeys((1, streams)):
        yield NetworkTurn("stream", a, b, count)
        yield NetworkTurn("stream", a, b, count, asker_sends=False)
    yield NetworkTurn("both", a, b, streams)
    if one.rdma and other.rdma:
        yield NetworkTurn("rdma", a, b)
        yield NetworkTurn("rdma", b, a)


@dataclass(frozen=True)
class NetworkTimes:
    """What came out, by turn and direction."""

    nodes: tuple[MeasuredNode, ...]
    asked: NetworkAsked
    latency: tuple[dict[str, Any], ...] = ()
    throughput: tuple[dict[str, Any], ...] = ()
    missing: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "network",
            "unit": "10^9 bits a second of payload, as they arrive; microseconds there and back",
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": asdict(self.asked),
            "load_average": {"before": None, "after": load_average()},
            "nodes": [{name: getattr(node, name) for name in _TOLD} for node in self.nodes],
            "latency": list(self.latency),
            "throughput": list(self.throughput),
            "missing": self.missing,
        }


Said = dict[int, dict[str, Any]]  # what the two nodes of a turn said of it, by rank


def collect(
    nodes: Sequence[MeasuredNode], asked: NetworkAsked, turns: Sequence[NetworkTurn], results: Sequence[Said]
) -> NetworkTimes:
    """All of it in rows; `results` has a value for each turn."""
    latency, throughput, missing = [], [], {}
    for turn, said in zip(turns, results, strict=True):
        if turn.kind == "latency":
            latency.append({"from": turn.asker, "to": turn.answerer} | said[turn.asker]["trips"])
            continue
        for receiver, sender in (turn.nodes, turn.nodes[::-1]):
            if failed := said[receiver].get("failed"):
                missing[f"ib_write_bw from node {sender} to node {receiver}"] = failed
            if (arrived := said[receiver].get("arrived")) is not None:
                nominal = _nominal(nodes[sender], nodes[receiver])
                row = {"from": sender, "to": receiver, "kind": turn.kind, "streams": turn.streams} | arrived
                row["retransmits"] = said[sender].get("retransmits")
                row["of_nominal"] = round(arrived["gbit_s"] * 1000 / nominal, 4) if nominal else None
                throughput.append(row)
    return NetworkTimes(tuple(nodes), asked, tuple(latency), tuple(throughput), missing)


def _nominal(one: MeasuredNode, other: MeasuredNode) -> int:
    """Mbit/s of the slower of both links; 0: of one it is not known."""
    return min(one.speed_mbit, other.speed_mbit)
