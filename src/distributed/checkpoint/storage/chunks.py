"""Chunks: files named by the hash of their content, so that what is stored already is never written again.

A chunk that another process wrote is compared before it is relied on: one that was damaged on the disk is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distributed.checkpoint.format.digests import digest_bytes
from distributed.checkpoint.format.parsing import Damaged
from distributed.checkpoint.storage.files import NotThere, Storage
from distributed.core.errors import CheckpointError

FOLDER = "chunks"


def chunk_name(digest: str) -> str:
    """
    >>> chunk_name("ab12")
    'chunks/ab/ab12'
    """
    return f"{FOLDER}/{digest[:2]}/{digest}"


class ChunkStore:
    """The chunks of one storage; `known` are digests of chunks that this process has verified."""

    def __init__(self, storage: Storage, known: Iterable[str] = ()) -> None:
        self._storage = storage
        self._known = set(known)

    def put(self, data: Any) -> tuple[str, int]:
        """Store a chunk: its digest, and the bytes that had to be written."""
        digest = digest_bytes(data)
        name, length = chunk_name(digest), memoryview(data).nbytes
        if self._storage.size(name) == length and (digest in self._known or self._holds(name, digest, length)):
            self._storage.refresh(name)
            self._known.add(digest)
            return digest, 0
        self._storage.write(name, data)
        self._known.add(digest)
        return digest, length

    def get(self, digest: str, length: int) -> bytes:
        """A chunk's content, which is what was stored or an error."""
        name = chunk_name(digest)
        try:
            data = self._storage.read(name, 0, length + 1)  # one more, so that a longer file shows
        except NotThere as missing:
            raise Damaged(
                f"the chunk {digest[:12]} is missing", why=f"{self._storage.locate(name)} does not exist", do=_DO
            ) from missing
        if len(data) != length:
            stored = self._storage.size(name)
            raise Damaged(
                f"the chunk {digest[:12]} has {stored} bytes and should have {length}",
                why=f"{self._storage.locate(name)} was cut short or overwritten",
                do=_DO,
            )
        if digest_bytes(data) != digest:
            raise Damaged(
                f"the content of the chunk {digest[:12]} has changed",
                why=f"{self._storage.locate(name)} does not have the hash that is its name",
                do=_DO,
            )
        self._known.add(digest)
        return data

    def check_sizes(self, lengths: dict[str, int]) -> None:
        """Raises unless every chunk is there with its size."""
        for digest, stored in self.wrong_sizes(lengths).items():
            name, length = chunk_name(digest), lengths[digest]
            if stored is None:
                raise Damaged(
                    f"the chunk {digest[:12]} is missing", why=f"{self._storage.locate(name)} does not exist", do=_DO
                )
            raise Damaged(
                f"the chunk {digest[:12]} has {stored} bytes and should have {length}",
                why=f"{self._storage.locate(name)} was cut short or overwritten",
                do=_DO,
            )

    def wrong_sizes(self, lengths: Mapping[str, int], *, again: bool = False) -> dict[str, int | None]:
        """The chunks that are not there with their sizes, and what is; for many a listing is cheaper than single looks.

        `again`: their folders are listed first, which makes a client of a shared disk forget what it believed of them.
        """
        listed = self._storage.entries(FOLDER) if len(lengths) > 64 else None
        wrong: dict[str, int | None] = {}
        for digest, length in lengths.items():
            name = chunk_name(digest)
            if listed is None:
                if again:
                    self._storage.entries(name.rpartition("/")[0])
                stored = self._storage.size(name)
            else:
                stored = listed[name].size if name in listed else None
            if stored != length:
                wrong[digest] = stored
        return wrong

    @property
    def known(self) -> frozenset[str]:
        return frozenset(self._known)

    def _holds(self, name: str, digest: str, length: int) -> bool:
        try:
            return digest_bytes(self._storage.read(name, 0, length + 1)) == digest
        except CheckpointError:
            return False  # unreadable: it is written again


_DO = "use an older checkpoint; a checkpoint needs its own folder and the files of its chunks"
