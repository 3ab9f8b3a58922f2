"""What the collectives benchmark found, as tables: nccl-tests' columns, and a matrix of all pairs of ranks."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from distributed.bench.collectives.benchmark import MORE_OPERATIONS, OPERATIONS, CollectiveTimes
from distributed.bench.collectives.pairs import PairTimes
from distributed.bench.table import make_table

_COLUMNS = ("size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong")  # those of nccl-tests
_ORDER = (*OPERATIONS, *MORE_OPERATIONS)


def collectives_table(found: CollectiveTimes) -> Group:
    """A row an operation and size."""
    table = make_table("operation", *_COLUMNS, padding=(0, 1, 0, 0))
    for row in sorted(found.rows, key=lambda row: (_ORDER.index(row.operation), row.algorithm)):
        rates = (f"{row.latency_us:.0f}", f"{row.alg_gb_s:.3f}", f"{row.bus_gb_s:.3f}", str(row.wrong))
        table.add_row(row.name, str(row.size_bytes), str(row.count), "float", row.redop, *rates)
    notes = [
        "",
        f"{found.processes} processes on {found.backend}; median of {found.rounds} rounds. size: bytes.",
        "time: µs a call. algbw: 10⁹ bytes of the message a second; busbw: those that each link carries.",
        *(f"{operation} is left out: {why}" for operation, why in found.missing.items()),
        f"load average {found.load_before} before, {found.load_after} after",
    ]
    return Group(table, Text("\n".join(notes)))


def pairs_table(found: PairTimes) -> Group:
    """From each rank to each other one."""
    parts = []
    for title, cells in (
        (f"GB/s of messages of {found.large_bytes:,} bytes", {pair: f"{v:.3f}" for pair, v in found.gb_s.items()}),
        (f"µs of messages of {found.small_bytes:,} bytes", {pair: f"{v:.0f}" for pair, v in found.latency_us.items()}),
    ):
        table = make_table("from \\ to", *map(str, range(found.processes)), title=title, title_justify="left")
        for source in range(found.processes):
            row = (cells.get((min(source, to), max(source, to)), "–") for to in range(found.processes))
            table.add_row(str(source), *row)
        parts.append(table)
    note = f"{found.processes} processes on {found.backend}; half of the way there and back; median of {found.rounds}"
    return Group(*parts, Text(f"\n{note} rounds\nload average {found.load_before} before, {found.load_after} after"))
