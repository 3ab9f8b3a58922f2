"""What the scaling benchmark found, as a table."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from distributed.bench.scaling.benchmark import Scaling

_BAR = 24  # columns


def scaling_table(found: Scaling) -> Group:
    """A row a number of processes, with its speed-up drawn to scale."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("processes", "batch/device", "samples/s", "speed-up", "efficiency"):
        table.add_column(name, justify="right")
    table.add_column("(· is linear)", no_wrap=True)
    most = found.sizes[-1].processes
    for size in found.sizes:
        cells = [str(size.processes), str(size.batch_per_device), f"{size.samples_per_second:.0f}"]
        cells += [f"{size.speed_up:.2f}", f"{size.efficiency:.0%}", draw_bar(size.speed_up, size.processes, most)]
        style = "dim" if size.processes > found.devices else None
        table.add_row(*cells, style=style)
    return Group(table, Text("\n".join(["", *_scaling_notes(found)])))


def draw_bar(speed_up: float, linear: int, most: int) -> str:
    """
    >>> draw_bar(1.0, 1, 2), draw_bar(1.5, 2, 2)
    ('████████████', '██████████████████······')
    """
    filled = min(_BAR, int(speed_up / most * _BAR + 0.5))
    return "█" * filled + "·" * (linear * _BAR // most - filled)


def _scaling_notes(found: Scaling) -> Iterator[str]:
    kind = "strong scaling: the global batch is fixed" if found.strong else "weak scaling: a device's batch is fixed"
    yield (
        f"{kind}; {found.steps} steps an epoch, of which the first does not count; of {found.repeats} runs the fastest."
    )
    if found.device == "cpu":
        yield (
            f"This machine has {found.devices} cores. Each process has one thread, so more than {found.devices} "
            "processes cannot be faster; other programs on this machine take their part."
        )
    else:
        yield f"This machine has {found.devices} GPUs, one for each process."
    yield f"load average {found.load_before} before, {found.load_after} after"
