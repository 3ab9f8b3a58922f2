"""What `distributed bench throughput --script` found, as a table."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.text import Text

from distributed.bench.script.results import ScriptThroughput
from distributed.bench.table import make_table


def script_table(found: ScriptThroughput) -> Group:
    """A row a number of ranks."""
    figures = ("global batch", "samples/s", "±", "ms a step", "speed-up", "efficiency", "loss")
    table = make_table("ranks", *figures, title=f"{found.script}", title_justify="left")
    for row in found.rows:
        spread = f"{(row.high - row.low) / 2 / row.samples_per_second:.0%}" if found.rounds > 1 else ""
        cells = [f"{row.global_batch:,}", f"{row.samples_per_second:,.0f}", spread, f"{row.step_ms:.2f}"]
        cells += [f"{row.speed_up:.2f}", f"{row.efficiency:.0%}", f"{row.loss:.4f}"]
        table.add_row(str(row.processes), *cells)
    return Group(table, Text("\n".join(_notes(found))))


def _notes(found: ScriptThroughput) -> Iterator[str]:
    steps = f"of {found.steps} timed steps, after {found.warm} that are not; evaluations are left out"
    yield f"median of {found.rounds} rounds {steps}" if found.rounds > 1 else f"one round {steps}"
    yield "the same settings for both: a device's batch is the same, so the global batch grows with the ranks"
    yield from [f"settings: {' '.join(found.settings)}"] if found.settings else []
    most = found.rows[-1].processes
    if found.device == "cpu":
        few = f", fewer than {most} ranks" if found.devices < most else ""
        yield f"this machine has {found.devices} cores{few}; one rank has them all, several share them"
        yield "with OMP_NUM_THREADS=1 before the command, each rank has one"
    yield f"load average {found.load_before} before, {found.load_after} after"
