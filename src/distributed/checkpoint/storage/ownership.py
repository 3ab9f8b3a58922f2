"""One run at a time writes to a checkpoint folder: a lock file in it, or an object where the folder is a URL."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distributed.checkpoint.storage.files import Entry, NotThere, Storage
from distributed.checkpoint.storage.remote import RemoteStorage
from distributed.core.errors import CheckpointError
from distributed.core.locks import REQUEUE_S, STALE_S, InUse, Lock, LockFile, LockPlace, Owner, Seen, ask_to_stop
from distributed.core.run_dir import LOCK

_LONG_AGO_S = 3600.0  # by two clocks that are not synchronized
_SETTLE_S = 1.0  # in which others who take a stale lock at the same time have written


class FolderTakenError(CheckpointError):
    """Another run has the checkpoint folder by now: this one must end, and write nothing there."""


def hold_folder(storage: Storage, token: str, *, resume: bool, on_lost: Callable[[], None] | None = None) -> Lock:
    """The lock of a checkpoint folder; raises while another run writes there. `on_lost`: else the process gets SIGTERM
    when another run takes it."""
    try:
        lock = Lock(_place(storage), Owner.me(token), on_lost=on_lost or ask_to_stop)
        return lock.acquire(REQUEUE_S if resume else 0.0)
    except InUse as used:
        raise CheckpointError([used.problem("checkpoint_dir", "checkpoint_dir")]) from None
    except OSError as failed:
        raise CheckpointError(
            f"cannot write {storage.locate(LOCK)}",
            why=failed.strerror or str(failed),
            do="check the permissions and the disk, or set checkpoint_dir to another place",
        ) from failed


def check_held(lock: Lock) -> None:
    """Right before something is written or removed that another run would miss."""
    if not lock.is_held():
        raise FolderTakenError(
            f"the checkpoint folder {lock.place.name} was taken by another run; nothing more is saved there",
            why=f"the run did not renew its {LOCK} for {STALE_S:.0f} s, as when its machine is suspended, or the file "
            "was removed; what the run saves now would replace checkpoints of the run that took its place",
            do="let that run finish, or wait for it to end and resume: resume_from_checkpoint=true",
        )


def _place(storage: Storage) -> LockPlace:
    if isinstance(storage, RemoteStorage):
        return LockObject(storage)
    os.makedirs(storage.root, exist_ok=True)
    return LockFile(Path(storage.root))


@dataclass
class LockObject:
    """A lock in an object store. Most stores create an object only where there is none; where one does not, two runs
    that begin within the same second may both believe to have it. Of several who take a stale one, the last to write
    has it; a run that lost it finds that out before it writes a checkpoint."""

    storage: RemoteStorage
    sleep: Callable[[float], None] = time.sleep

    @property
    def name(self) -> str:
        return self.storage.root

    def create(self, text: bytes) -> bool:
        return self.storage.create(LOCK, text) and self.read() == text

    def read(self) -> bytes | None:
        try:
            return self.storage.read(LOCK)
        except NotThere:
            return None

    def look(self) -> Seen | None:
        text = self.read()
        if text is None:
            return None
        age_s = time.time() - self._entry().modified
        return Seen(text, age_s if age_s > _LONG_AGO_S else 0.0)  # else it counts as live until it stops changing

    def take(self, seen: Seen, text: bytes) -> bool:
        if self.read() != seen.text:
            return False
        self.storage.write(LOCK, text)
        self.sleep(_SETTLE_S)
        return self.read() == text

    def renew(self, text: bytes) -> None:
        self.storage.write(LOCK, text)

    def remove(self) -> None:
        self.storage.delete(LOCK)

    def _entry(self) -> Entry:
        found = self.storage.entries(LOCK)
        return found.get(LOCK, Entry(0, time.time()))
