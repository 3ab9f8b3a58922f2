"""What `distributed bench throughput` found, as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from distributed.bench.table import make_table
from distributed.bench.throughput.contenders import OWN
from distributed.bench.throughput.results import TOLERANCE, Throughput, WorkloadResult


def throughput_table(found: Throughput) -> Group:
    """A table a workload, then who the contenders are."""
    parts: list[Table | Text] = []
    for result in found.results:
        parts += [_table(result), Text("\n".join([*_notes(result), ""]))]
    taking = {row.contender for result in found.results for row in result.rows}
    setups = [f"{name}: {setup}" for name, setup in found.setups.items() if name in taking]
    absent = [f"{name}: {why}" for name, why in found.missing.items()]
    where = f"{found.processes} process{'es' if found.processes > 1 else ''} on {found.device}, {found.precision}"
    load = f"load average {found.load_before} before, {found.load_after} after"
    return Group(*parts, Text("\n".join([where, *setups, *absent, load])))


def _table(result: WorkloadResult) -> Table:
    title = f"{result.workload}: {result.describes}, {result.batch} samples a process"
    figures = (f"{result.unit}/s", "±", "ms a step", f"of {result.reference}", "of peak", "GiB", "loss")
    table = make_table("contender", *figures, title=title, title_justify="left")
    for row in result.rows:
        spread = f"{(row.high - row.low) / 2 / row.units_per_second:.0%}" if result.rounds > 1 else ""
        cells = [f"{row.units_per_second:,.0f}", spread, f"{row.step_ms:.3f}"]
        cells += [f"{row.ratio:.3f}", "" if row.part_of_peak is None else f"{row.part_of_peak:.2f}"]
        cells += [f"{row.peak_gib:.2f}", f"{row.loss:.4f}"]
        table.add_row(row.contender, *cells, style="bold" if row.contender in OWN else None)
    return table


def _notes(result: WorkloadResult) -> Iterator[str]:
    steps = f"of {result.steps} timed steps, after {result.warm} that are not"
    many = f"median of {result.rounds} rounds {steps}; ± half of what lies between the quartiles"
    yield many if result.rounds > 1 else f"one round {steps}"
    if result.losses_agree is not None:
        agree = "agree" if result.losses_agree else "DO NOT AGREE: not all may have trained the same"
        yield f"losses from {result.start_loss:.4f} {agree} (to {TOLERANCE:.0%} of that)"
    for name, over in result.ours_over_peers.items():
        yield f"ours over {name}: {over}"
    yield from (f"{name} is left out: {why}" for name, why in result.missing.items())
