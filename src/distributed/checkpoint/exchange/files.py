"""Files that an export writes: they have their names only when all of them are whole and on the disk."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from distributed.core.errors import CheckpointError


def check_space(folder: Path, needed: int) -> None:
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder} has {free / 2**30:.2f} GiB free, and the export needs {needed / 2**30:.2f} GiB",
            do="free some space, or write elsewhere",
        )


class Counting:
    """A file for torch.save that reports how much was written."""

    def __init__(self, stream: IO[bytes], notify: Callable[[int], None]) -> None:
        self._stream, self._notify, self._done = stream, notify, 0

    def write(self, data: Any) -> int:
        written = self._stream.write(data)
        self._done += written
        self._notify(self._done)
        return written

    def flush(self) -> None:
        self._stream.flush()


class Files:
    """Files that take their names together at the end, in the order in which they were made; else they are removed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._token = folder, uuid.uuid4().hex[:12]
        self._made: list[str] = []

    def __enter__(self) -> Files:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        self._made.append(name)
        with open(self._temporary(name), "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def publish(self, replaced: list[Path] | None = None) -> None:
        """Give the names. An index that is replaced goes first: it must never name shards of two exports."""
        old = [path for path in replaced or [] if path.name not in self._made]
        for path in replaced or []:
            if path.suffix == ".json":
                path.unlink(missing_ok=True)
        for name in self._made:
            os.replace(self._temporary(name), self._folder / name)
        self._made.clear()
        for path in old:
            path.unlink(missing_ok=True)
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def __exit__(self, *_: object) -> None:
        for name in self._made:
            self._temporary(name).unlink(missing_ok=True)

    def _temporary(self, name: str) -> Path:
        return self._folder / f".{name}.{self._token}.tmp"
