"""What the checkpoint benchmark found, as a table."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from distributed.bench.checkpoint.benchmark import TARGET_SECOND, TARGET_STALL, TARGET_STALL_GPU, CheckpointCost
from distributed.bench.table import make_table


def checkpoint_table(found: CheckpointCost) -> Group:
    """A row a way of saving, then the two ratios that we hold ourselves to."""
    table = make_table("way", "stall s", "× copy", "on disk after s", "MiB written")
    floor = found.row("copy").stall_s
    for row in found.rows:
        cells = [f"{row.stall_s:.3f}", f"{row.stall_s / floor:.2f}"]
        cells += ["" if value is None else f"{value:.2f}" for value in (row.total_s, row.written_mib)]
        table.add_row(row.name, *cells, style="bold" if row.name.startswith("save") else None)
    limit = TARGET_STALL if found.device == "cpu" else TARGET_STALL_GPU
    notes = [
        f"{found.state_mib:.0f} MiB of state on {found.device}, median of {found.rounds} interleaved rounds; load "
        f"average {found.load_before} before, {found.load_after} after",
        "copy: a plain clone" if found.device == "cpu" else "copy: to pinned host memory",
        f"stall of an asynchronous save: {found.stall_ratio:.2f} × the copy; our own limit is {limit}",
        f"5 % of the bytes changed: {found.second_part:.1%} written; our own limit is {TARGET_SECOND:.0%}",
    ]
    return Group(table, Text("\n".join(["", *notes])))
