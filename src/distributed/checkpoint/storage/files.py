"""What a checkpoint needs of the place where it is kept: whole files by name, and names that cannot leave it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from distributed.core.errors import CheckpointError

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,200}")


Names = list[str]


class NotThere(CheckpointError):
    """A file that was to be read does not exist."""


@dataclass(frozen=True)
class FileEntry:
    """What a listing has of one file."""

    size: int
    modified: float  # seconds since 1970 by the storage's own clock


class Storage(Protocol):
    """Names are relative, with `/` between their parts."""

    root: str

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes: ...

    def write(self, name: str, data: Any) -> None: ...

    def size(self, name: str) -> int | None: ...

    def entries(self, prefix: str = "") -> dict[str, FileEntry]: ...

    def list(self, prefix: str = "") -> Names: ...

    def children(self) -> Names: ...  # the files and folders of the root itself

    def delete(self, name: str) -> None: ...

    def refresh(self, name: str) -> None: ...

    def sweep(self, older_than_s: float) -> int: ...

    def free_bytes(self) -> int | None: ...

    def locate(self, name: str) -> str: ...


def check_name(name: str) -> str:
    """A name that cannot leave the root; raises for any other.

    >>> check_name("chunks/ab/abcd")
    'chunks/ab/abcd'
    """
    if not isinstance(name, str) or not name or not all(_SEGMENT.fullmatch(part) for part in name.split("/")):
        raise CheckpointError(
            f"{str(name)[:80]!r} is not a name that a checkpoint may use",
            why="names are relative and hold letters, digits and ._=- only, so that none can point outside its folder",
            do="do not use this checkpoint unless you know who made it",
        )
    return name
