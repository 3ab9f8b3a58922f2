"""How checkpoints are shown: sizes, ages, tables, and a bar for what takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def size(count: int | None) -> str:
    """
    >>> size(0), size(1536), size(3 * 2**30), size(None)
    ('0 B', '1.5 KiB', '3.0 GiB', '?')
    """
    if count is None:
        return "?"
    number, unit = float(count), 0
    while number >= 1024 and unit < 4:
        number, unit = number / 1024, unit + 1
    return f"{number:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}" if unit else f"{count} B"


def age(created: str, now: datetime | None = None) -> str:
    """
    >>> age("2026-01-01T00:00:00+00:00", datetime(2026, 1, 1, 2, 5, tzinfo=UTC))
    '2 h ago'
    """
    try:
        made = datetime.fromisoformat(created)
    except ValueError:
        return "?"
    if made.tzinfo is None:
        made = made.replace(tzinfo=UTC)
    seconds = int(((now or datetime.now(UTC)) - made).total_seconds())
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit} ago"
    return f"{max(seconds, 0)} s ago"


@contextmanager
def byte_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr that is gone at the end; nothing where stderr is no terminal."""
    stderr = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
