"""What all benchmark commands have in common: progress, a table, and the two files that they may write."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from distributed.bench.pictures import draw
from distributed.core.errors import ConfigError
from distributed.observe.charts import FORMATS, require_drawing

Drawing = Callable[[dict[str, Any], str], bytes]  # from a record and a format to a file


def check_target(target: Path | None) -> Path | None:
    """Before anything is measured: a folder that is not there would be found out when all is done."""
    if target is not None and not target.parent.is_dir():
        raise ConfigError(
            f"{target} cannot be written",
            why=f"the folder {target.parent} does not exist",
            do=f"mkdir -p {target.parent}",
        )
    return target


def check_picture(picture: Path | None) -> Path | None:
    """Before anything is measured."""
    if picture is not None:
        if picture.suffix.lower()[1:] not in FORMATS:
            raise ConfigError(
                f"--picture {picture}",
                why=f"the ending of a picture's name is its format, one of: {', '.join(FORMATS)}",
                do=f"--picture {picture.with_suffix('.svg')}",
            )
        require_drawing(f"--picture {picture}")
    return check_target(picture)


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", callback=check_target, help="Also write all figures, with machine and versions."
    ),
]

PictureFile = Annotated[
    Path | None,
    typer.Option("--picture", metavar="FILE", callback=check_picture, help="Also draw the result, as .svg or .png."),
]


@contextmanager
def progress(*, logs: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr that is gone when the table comes; where stderr is no terminal, nothing, or a line each time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console, begun = Console(stderr=True), time.monotonic()
    options: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
    # Drawn between turns and never from a thread of its own: the benchmark shares the cores with it.
    with Progress(*columns, auto_refresh=False, **options) as bar:
        task = bar.add_task("starting")

        def notify(text: str, done: int, in_all: int) -> None:
            bar.update(task, description=text, completed=done, total=in_all, refresh=True)
            if logs and not console.is_terminal:
                print(f"{time.monotonic() - begun:.0f} s  {text}", file=sys.stderr, flush=True)

        yield notify


def show(
    table: Any, record: dict[str, Any], json_file: Path | None, picture: Path | None, drawing: Drawing = draw
) -> None:
    """The table first, so that it is seen even where a file cannot be written; then the files, and where they are."""
    console = Console(highlight=False)
    console.print(table, soft_wrap=True)
    write(record, json_file, picture, drawing)
    for written in (json_file, picture):
        if written is not None:
            console.print(f"written: {written}", soft_wrap=True, markup=False)


def write(record: dict[str, Any], json_file: Path | None, picture: Path | None, drawing: Drawing = draw) -> None:
    """The figures, and their picture, which is drawn from nothing but them."""
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if picture is not None:
        picture.write_bytes(drawing(record, picture.suffix.lower()[1:]))
