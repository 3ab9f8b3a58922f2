"""The table that all benchmarks have."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def make_table(who: str, *columns: str, **options: Any) -> Table:
    """A column of names, and numbers to its right; the options are rich's.

    >>> [column.header for column in make_table("way", "ms a step", "peak GiB").columns]
    ['way', 'ms a step', 'peak GiB']
    """
    table = Table(box=None, pad_edge=False, header_style="bold", **options)
    table.add_column(who, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
