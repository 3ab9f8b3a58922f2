"""What the collectives benchmark found, as a table."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from distributed.bench.collectives.benchmark import OPERATIONS, Collectives
from distributed.bench.table import make_table


def collectives_table(found: Collectives) -> Group:
    """A row an operation and size."""
    table = make_table("operation", "bytes", "µs", "quartiles", "GB/s")
    for row in sorted(found.rows, key=lambda row: OPERATIONS.index(row.operation)):
        cells = [f"{row.latency_us:.0f}", f"{row.low_us:.0f}–{row.high_us:.0f}", f"{row.bus_gb_s:.3f}"]
        table.add_row(row.operation, f"{row.size_bytes:,}", *cells)
    notes = [
        "",
        f"{found.processes} processes on {found.backend}; median of {found.rounds} rounds. µs: a call. GB/s: 10⁹ bytes",
        "a second that each link carries.",
        *(f"{operation} is left out: {why}" for operation, why in found.missing.items()),
        f"load average {found.load_before} before, {found.load_after} after",
    ]
    return Group(table, Text("\n".join(notes)))
