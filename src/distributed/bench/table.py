"""The table of a benchmark as all of them have it."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def figures_table(who: str, *figures: str, **options: Any) -> Table:
    """A column of names, and figures to its right; the options are rich's.

    >>> [column.header for column in figures_table("way", "ms a step", "peak GiB").columns]
    ['way', 'ms a step', 'peak GiB']
    """
    table = Table(box=None, pad_edge=False, header_style="bold", **options)
    table.add_column(who, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table
