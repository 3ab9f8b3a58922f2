"""Locks: a folder has one run at a time. The lock is a file that names its holder, who may have ended.

create ──► held ──► removed             a heartbeat while it is held
  │ there is one
  ├── of the same launch ─────────────► taken over (a restarted world)
  ├── its process has ended ──────────► taken over, with a word
  ├── of another host, no heartbeat ──► taken over after STALE_S, with a word
  └── living ─────────────────────────► waited for as long as the caller says, then refused
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Protocol

import psutil

from distributed.core.atomic import replace_file
from distributed.core.errors import DistributedError, Problem
from distributed.core.run_dir import LOCK

BEAT_S = 10.0
STALE_S = 60.0  # without a heartbeat: six were missed
REQUEUE_S = 30.0  # how long a run that resumes waits for the one before it, which may be saving its last
_LOOK_EVERY_S = 0.5
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Owner:
    """Who holds a lock."""

    token: str  # of the launch: the same in its restarted worlds
    host: str
    pid: int
    started: str  # distinguishes the process from a later one with the same number
    machine: str  # identifies the kernel and the namespace that the number is of; host names may be the same
    since: float  # seconds since 1970
    beat: int = 0  # counts up, where a place has no clock of its own

    @staticmethod
    def me(token: str) -> Owner:
        pid = os.getpid()
        return Owner(token, socket.gethostname(), pid, _started(pid) or "", _machine(), time.time())

    @staticmethod
    def parse(text: bytes) -> Owner | None:
        try:
            return Owner(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def to_text(self) -> bytes:
        return (json.dumps(asdict(self)) + "\n").encode()

    @property
    def is_gone(self) -> bool | None:
        """None: not known from here."""
        if (self.host, self.machine) != (socket.gethostname(), _machine()):
            return None
        try:
            return _started(self.pid) != self.started
        except PermissionError:
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {datetime.fromtimestamp(self.since):%Y-%m-%d %H:%M:%S}"


@dataclass(frozen=True)
class Seen:
    """A lock as it was found."""

    text: bytes
    age_s: float  # since its last heartbeat, as far as the place knows


class LockPlace(Protocol):
    """Where a lock is kept."""

    @property
    def name(self) -> str:
        """Of the locked folder, for people."""

    def create(self, text: bytes) -> bool:
        """False where there is one. Of several who try, one gets it."""

    def read(self) -> bytes | None: ...

    def look(self) -> Seen | None: ...

    def take(self, seen: Seen, text: bytes) -> bool:
        """Replace the lock that was seen; False where it is another one by now."""

    def renew(self, text: bytes) -> None:
        """A heartbeat."""

    def remove(self) -> None: ...


class InUse(Exception):
    """A living run holds the lock."""

    def __init__(self, owner: Owner | None, name: str) -> None:
        super().__init__(name)
        self.owner = owner

    def problem(self, what: str, setting: str) -> Problem:
        """`what` is locked, in words, and can be chosen by a `setting`."""
        who = str(self.owner) if self.owner is not None else "a process that does not say who it is"
        stop = f"; to stop it: kill -INT {self.owner.pid} on {self.owner.host}" if self.owner is not None else ""
        return Problem(
            f"{what} {self} is in use by {who}",
            why="two runs there would write over each other's files",
            do=f"set another {setting}, or wait for that run to end{stop}",
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ask_to_stop() -> None:
    """This process, as a launcher or a cluster would."""
    os.kill(os.getpid(), signal.SIGTERM)


@dataclass
class Lock:
    """Held from `acquire` to `release`, by this process alone and not by forks of it."""

    place: LockPlace
    owner: Owner
    say: Callable[[str], None] = _say
    on_lost: Callable[[], None] = ask_to_stop  # from the thread of the heartbeat
    is_lost: bool = field(default=False, init=False)  # another run has taken it
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def acquire(self, timeout_s: float = 0.0) -> Lock:
        """Raises InUse while another living run holds it, after waiting so long for that one to end."""
        text = self.owner.to_text()
        begun = changed = time.monotonic()
        before: Seen | None = None
        is_reported = lives = False
        while not self.place.create(text):
            seen = self.place.look()
            if seen is None:
                continue
            other = Owner.parse(seen.text)
            now = time.monotonic()
            if before is not None and (seen.text != before.text or seen.age_s < before.age_s):
                changed, lives = now, True
            before = seen
            is_gone = other.is_gone if other is not None else None
            quiet_s = max(seen.age_s, now - changed)
            is_stale = is_gone is True or (is_gone is None and quiet_s >= STALE_S)
            is_same = other is not None and other.token == self.owner.token
            if is_same or is_stale:
                if self.place.take(seen, text):
                    if not is_same:
                        self.say(f"{self.place.name} was left locked by {other or 'a run'}, which is gone; it is taken")
                    break
                time.sleep(_LOOK_EVERY_S)  # another process is taking it, or died in that instant
                continue
            if (lives or is_gone is False) and now - begun >= timeout_s:
                raise InUse(other, self.place.name)
            if not is_reported:
                is_reported = True
                self.say(f"{self.place.name} is locked by {other or 'another run'}: waiting to see whether it ends")
            time.sleep(_LOOK_EVERY_S)
        self._thread = threading.Thread(target=self._keep, daemon=True, name="lock-heartbeat")
        self._thread.start()
        return self

    def release(self) -> None:
        if self._thread is None or os.getpid() != self.owner.pid:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        with suppress(OSError, DistributedError):
            if self._is_ours(self.place.read()):
                self.place.remove()

    def is_held(self) -> bool:
        """A fresh look: a process that was suspended may have lost it. A lock that is gone was taken and released."""
        return self._thread is not None and not self.is_lost and self._is_ours(self.place.read())

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *failed: object) -> None:
        self.release()

    def _is_ours(self, text: bytes | None) -> bool:
        other = Owner.parse(text) if text is not None else None
        mine = self.owner
        return other is not None and (other.token, other.host, other.pid) == (mine.token, mine.host, mine.pid)

    def _keep(self) -> None:
        beats = 0
        while not self._stop.wait(BEAT_S):
            beats += 1
            with suppress(OSError, DistributedError):  # the disk or the store does not answer just now
                text = self.place.read()
                other = Owner.parse(text) if text is not None else None
                if self._is_ours(text):
                    self.place.renew(replace(self.owner, beat=beats).to_text())
                elif other is not None and other.token != self.owner.token:
                    self.is_lost = True
                    self.say(f"{self.place.name} was taken by {other}, to whom this run looked dead: it stops")
                    self.on_lost()
                    return


@dataclass
class LockFile:
    """A lock in a folder of this machine, or of a disk that machines share: link(2) is atomic also over NFS."""

    folder: Path
    _path: Path = field(init=False)

    def __post_init__(self) -> None:
        self._path = self.folder / LOCK

    @property
    def name(self) -> str:
        return str(self.folder)

    def create(self, text: bytes) -> bool:
        partial = self._write(text)
        try:
            os.link(partial, self._path)
        except FileExistsError:
            return os.stat(partial).st_nlink == 2  # a server's answer was lost, and the call made again
        except OSError:  # a file system without links
            return self._create_exclusively(text)
        finally:
            os.unlink(partial)
        return True

    def read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def look(self) -> Seen | None:
        now = self._now()
        try:
            with self._path.open("rb") as file:  # opening reads from the server again
                return Seen(file.read(), now - os.fstat(file.fileno()).st_mtime)
        except FileNotFoundError:
            return None

    def take(self, seen: Seen, text: bytes) -> bool:
        """One at a time, and by a name that is never free in between: no process can create a lock meanwhile."""
        guard = self.folder / f".{LOCK}.taking"
        try:
            os.close(os.open(guard, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            self._remove_left_over(guard)
            return False
        try:
            if self.read() != seen.text:  # another process was faster
                return False
            replace_file(self._path, text)
            return True
        finally:
            guard.unlink(missing_ok=True)

    def _remove_left_over(self, guard: Path) -> None:
        """Of a process that died while taking it. It is moved away and read again: by then it may be another's."""
        with suppress(OSError):
            if self._is_stale(guard):
                moved = guard.rename(self._partial())
                if self._is_stale(moved):
                    moved.unlink()
                else:
                    moved.rename(guard)

    def _is_stale(self, guard: Path) -> bool:
        modified = guard.stat().st_mtime
        return self._now() - modified >= STALE_S

    def renew(self, text: bytes) -> None:
        os.utime(self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _write(self, text: bytes) -> Path:
        partial = self._partial()
        partial.write_bytes(text)
        return partial

    def _create_exclusively(self, text: bytes) -> bool:
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        return True

    def _partial(self) -> Path:
        return self.folder / f".{LOCK}.{uuid.uuid4().hex[:12]}.tmp"

    def _now(self) -> float:
        """By the clock of the file system, which may be another machine's."""
        probe = self._partial()
        try:
            probe.touch()
            return probe.stat().st_mtime
        except OSError:
            return time.time()
        finally:
            with suppress(OSError):
                probe.unlink()


def _machine() -> str:
    parts = []
    with suppress(OSError):
        parts.append(_BOOT.read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink(_NAMESPACE))
    return " ".join(parts)


def _started(pid: int) -> str | None:
    """When a process was started, in units that distinguish it from another one; None: it has ended. Raises
    PermissionError where other users' processes are hidden (/proc with hidepid) and this is one."""
    try:
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return None
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[19]
    except psutil.AccessDenied as hidden:
        raise PermissionError(str(hidden)) from hidden
    except (psutil.NoSuchProcess, ProcessLookupError) as missing:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        raise PermissionError(f"process {pid} is there, and hidden") from missing
    except PermissionError:
        raise
    except OSError:
        return f"{psutil.Process(pid).create_time():.0f}" if psutil.pid_exists(pid) else None
