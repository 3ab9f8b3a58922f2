"""Storage by URL: a folder of this machine, or a URL that fsspec can reach; and the check that it can be written to."""

from __future__ import annotations

import os
import re
import uuid

from distributed.checkpoint.storage.files import FileEntry, NotThere, Storage, check_name
from distributed.checkpoint.storage.local import LocalStorage
from distributed.checkpoint.storage.remote import RemoteStorage
from distributed.core.errors import CheckpointError

__all__ = [
    "FileEntry",
    "LocalStorage",
    "NotThere",
    "RemoteStorage",
    "Storage",
    "check_name",
    "check_writable",
    "open_storage",
]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|[A-Za-z][A-Za-z0-9+.-]*::")


def open_storage(url: str | Storage) -> Storage:
    """A folder of this machine, or any URL that fsspec knows.

    >>> import tempfile
    >>> storage = open_storage(tempfile.mkdtemp())
    >>> storage.write("a/b.txt", b"hello")
    >>> storage.read("a/b.txt", 1, 3), storage.size("a/b.txt"), storage.list()
    (b'ell', 5, ['a/b.txt'])
    """
    if not isinstance(url, str | os.PathLike):
        return url
    text = os.fspath(url)
    if text.startswith("file://"):
        text = text[len("file://") :]
    if not _URL.match(text):
        return LocalStorage(text)
    return RemoteStorage(text)


def check_writable(storage: Storage, expected_bytes: int = 0) -> None:
    """Raises when nothing can be written there, or when the expected bytes do not fit; for the start of a run."""
    probe = f"probe-{uuid.uuid4().hex}"
    storage.write(probe, b"probe")
    there = storage.read(probe)
    storage.delete(probe)
    if there != b"probe":
        raise CheckpointError(
            f"{storage.root} does not give back what is written to it", do="set checkpoint_dir to another place"
        )
    free = storage.free_bytes()
    if free is not None and free < expected_bytes:
        raise CheckpointError(
            f"{storage.root} has {_gib(free)} free, and one checkpoint needs {_gib(expected_bytes)}",
            why="the first save would fail",
            do="free some space, or set checkpoint_dir to another disk",
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
