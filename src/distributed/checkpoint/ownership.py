"""One run at a time writes to a checkpoint folder: a lock file in it, or an object where the folder is a URL."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from distributed.checkpoint.files import Entry, NotThere, Storage
from distributed.checkpoint.remote import RemoteStorage
from distributed.core.errors import CheckpointError
from distributed.core.locks import FILE, REQUEUE_S, InUse, Lock, LockFile, LockPlace, Owner, Seen

_LONG_AGO_S = 3600.0  # by two clocks that nobody compares


def hold_folder(storage: Storage, token: str, *, resume: bool) -> Lock:
    """The lock of a checkpoint folder; raises while another run writes there."""
    try:
        return Lock(_place(storage), Owner.me(token)).acquire(REQUEUE_S if resume else 0.0)
    except InUse as used:
        raise CheckpointError([used.problem("checkpoint_dir", "checkpoint_dir")]) from None
    except OSError as failed:
        raise CheckpointError(
            f"cannot write {storage.locate(FILE)}",
            why=failed.strerror or str(failed),
            do="check the permissions and the disk, or set checkpoint_dir to another place",
        ) from failed


def _place(storage: Storage) -> LockPlace:
    if isinstance(storage, RemoteStorage):
        return LockObject(storage)
    os.makedirs(storage.root, exist_ok=True)
    return LockFile(Path(storage.root))


@dataclass
class LockObject:
    """A lock in an object store. Most stores create an object only where there is none; where one does not, two runs
    that begin within the same second may both believe to have it."""

    storage: RemoteStorage

    @property
    def name(self) -> str:
        return self.storage.root

    def create(self, text: bytes) -> bool:
        return self.storage.create(FILE, text) and self.read() == text

    def read(self) -> bytes | None:
        try:
            return self.storage.read(FILE)
        except NotThere:
            return None

    def look(self) -> Seen | None:
        text = self.read()
        if text is None:
            return None
        age_s = time.time() - self._entry().modified
        return Seen(text, age_s if age_s > _LONG_AGO_S else 0.0)  # else whether it changes tells

    def take(self, seen: Seen, text: bytes) -> bool:
        if self.read() != seen.text:
            return False
        self.storage.delete(FILE)
        return self.create(text)

    def renew(self, text: bytes) -> None:
        self.storage.write(FILE, text)

    def remove(self) -> None:
        self.storage.delete(FILE)

    def _entry(self) -> Entry:
        found = self.storage.entries(FILE)
        return found.get(FILE, Entry(0, time.time()))
