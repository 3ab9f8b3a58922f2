"""What the network benchmark found, as two tables: round trips, and rates by direction and number of streams."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.text import Text

from distributed.bench.network.turns import MeasuredNode, NetworkTimes
from distributed.bench.table import make_table

_KINDS = {"stream": "TCP", "both": "TCP, both ways", "rdma": "ib_write_bw"}
_RATES = ("how", "streams", "Gbit/s", "least", "most", "nominal", "resent")
_ABOUT = """\
Bytes that arrive, in 10⁹ bits a second; least and most: of tenths of a second. nominal: their part of the slower
link's speed, headers not counted. resent: TCP segments. both ways: at once. Round trips: of 64 bytes, one at a time;
jitter: from one to the next, on average."""


def network_table(found: NetworkTimes) -> Group:
    """A row a pair of nodes, and a row a direction and kind."""
    trips = make_table("round trips", "median µs", "p99 µs", "least µs", "jitter µs", padding=(0, 1, 0, 0))
    for row in found.latency:
        shown = (row[name] for name in ("median_us", "p99_us", "low_us", "jitter_us"))
        trips.add_row(f"{row['from']} ⇄ {row['to']}", *(f"{value:.1f}" for value in shown))
    rates = make_table("nodes", *_RATES, padding=(0, 1, 0, 0))
    for row in found.throughput:
        figures = (_rate(row[name]) for name in ("gbit_s", "low_gbit_s", "high_gbit_s"))
        again = "–" if row["retransmits"] is None else str(row["retransmits"])
        line = (
            f"{row['from']} → {row['to']}",
            _KINDS[row["kind"]],
            str(row["streams"]),
            *figures,
            _percent(row),
            again,
        )
        rates.add_row(*line)
    notes = ["", *map(_node, found.nodes), _ABOUT]
    notes += [f"{what} is left out: {why}" for what, why in found.missing.items()]
    return Group(trips, Text(), rates, Text("\n".join(notes)))


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _percent(row: dict[str, Any]) -> str:
    return "not known" if row["of_nominal"] is None else f"{row['of_nominal']:.0%}"


def _node(node: MeasuredNode) -> str:
    speed = f"{node.speed_mbit / 1000:g} Gbit/s" if node.speed_mbit else "speed not known"
    return f"node {node.rank}: {node.host}, {node.interface} ({speed}, MTU {node.mtu})"
