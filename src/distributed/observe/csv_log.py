"""metrics.csv: the run's numbers as a table, a row a step, whole after each event; a resumed run adds to it.

A new column appears when something is measured for the first time: then the file is written again, in one move.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from distributed.core.atomic import FILE_MODE, write_private
from distributed.core.events import Event, RunStarted
from distributed.observe.scalars import ScalarReader

_FIRST = ("step", "epoch")


class CsvLog:
    """Adds what an event measures to the row of its step.

    >>> import tempfile
    >>> from distributed.core.events import EvaluationEnded
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = CsvLog(os.path.join(folder, "metrics.csv"))
    ...     log.on(EvaluationEnded(time=1.0, step=5, epoch=0, seconds=1.0, metrics={"loss": 0.5}))
    ...     log.close()
    ...     print(open(log.path).read(), end="")
    step,epoch,val_loss
    5,0,0.5
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._scalars = ScalarReader()
        self._columns: list[str] = list(_FIRST)
        self._row: dict[str, str] = {}  # the last one, which may get more
        self._row_at = 0  # where it begins in the file
        self._fd = -1

    def on(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._begin(event.first_step)
            return
        found = self._scalars.read(event)
        if found is None:
            return
        step, scalars = found
        if self._fd < 0:
            self._begin(0)
        if self._row.get("step") != str(step):
            self._row_at, self._row = os.fstat(self._fd).st_size, {"step": str(step)}
        self._row |= {"epoch": str(getattr(event, "epoch", ""))} | {name: repr(v) for name, v in scalars.items()}
        new = [name for name in self._row if name not in self._columns]
        if new:
            self._widen(new)
        else:
            self._write_row()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _begin(self, first_step: int) -> None:
        """Leave out what was written after the step that the run resumes from: it did not happen."""
        rows = [row for row in self._read() if int(row["step"]) <= first_step] if first_step else []
        self._columns = [*_FIRST, *(name for name in (rows[0] if rows else ()) if name not in _FIRST)]
        self._replace(rows[:-1])
        self._row = rows[-1] if rows else {}  # its step may be evaluated again
        if rows:
            self._row_at = os.fstat(self._fd).st_size
            self._write_row()

    def _widen(self, new: Sequence[str]) -> None:
        rows = [row for row in self._read() if row["step"] != self._row["step"]]
        self._columns += new
        self._replace(rows)
        self._row_at = os.fstat(self._fd).st_size
        self._write_row()

    def _replace(self, rows: Sequence[Mapping[str, str]]) -> None:
        """The file with these rows, and open for the next."""
        self.close()
        write_private(self.path, "".join([_line(self._columns), *map(self._line_of, rows)]))
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC, FILE_MODE)

    def _write_row(self) -> None:
        line = self._line_of(self._row).encode()
        os.pwrite(self._fd, line, self._row_at)
        os.ftruncate(self._fd, self._row_at + len(line))

    def _line_of(self, row: Mapping[str, str]) -> str:
        return _line([row.get(name) or "" for name in self._columns])

    def _read(self) -> list[dict[str, str]]:
        """The whole rows of an earlier part of the run."""
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8", newline="") as file:
            return [row for row in csv.DictReader(file) if (row.get("step") or "").isdigit() and None not in row]


def _line(values: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()
