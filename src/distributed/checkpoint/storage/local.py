"""LocalStorage: a folder; a write goes to a temporary file, is forced to the disk, and takes its name last."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed.checkpoint.storage.files import FileEntry, Names, NotThere, check_name
from distributed.core.errors import CheckpointError

_TEMPORARY = re.compile(r"\..+\.tmp")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class LocalStorage:
    """A folder of this machine, or of a disk that all machines share."""

    def __init__(self, root: str | Path, *, at: Callable[[str], None] = lambda point: None) -> None:
        """`at` is called at each named point of a write, for tests."""
        self.root, self._at = os.path.abspath(root), at

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            with open(self._path(name), "rb", buffering=0) as file:
                if start:
                    file.seek(start)
                return _read_all(file, length)
        except (FileNotFoundError, NotADirectoryError) as missing:
            raise NotThere(f"{self.locate(name)} does not exist", do="use another checkpoint") from missing
        except OSError as failed:
            raise self._explain("read", name, failed) from failed

    def write(self, name: str, data: Any) -> None:
        target = self._path(name)
        folder, last = os.path.split(target)
        temporary = os.path.join(folder, f".{last[:40]}.{uuid.uuid4().hex[:12]}.tmp")
        try:
            handle = self._create(folder, temporary)
            try:
                try:
                    _write_all(handle, data)
                    self._at(f"unsynced: {name}")
                    os.fsync(handle)
                finally:
                    os.close(handle)
                self._at(f"unnamed: {name}")
                os.rename(temporary, target)
            except BaseException:
                os.unlink(temporary)
                raise
            _sync_folder(folder)
        except OSError as failed:
            raise self._explain("write", name, failed) from failed

    def size(self, name: str) -> int | None:
        try:
            return os.stat(self._path(name)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as failed:
            raise self._explain("look at", name, failed) from failed

    def entries(self, prefix: str = "") -> dict[str, FileEntry]:
        top = self._path(prefix) if prefix else self.root
        found: dict[str, FileEntry] = {}
        for folder, _, files in os.walk(top):
            for file in files:
                path = os.path.join(folder, file)
                name = os.path.relpath(path, self.root).replace(os.sep, "/")
                try:
                    known = os.stat(path)
                except OSError:  # deleted meanwhile, or a link that leads nowhere
                    continue
                if not _TEMPORARY.fullmatch(file):
                    found[name] = FileEntry(known.st_size, known.st_mtime)
        return found

    def list(self, prefix: str = "") -> Names:
        return sorted(self.entries(prefix))

    def children(self) -> Names:
        try:
            return sorted(os.listdir(self.root))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as failed:
            raise self._explain("list", "", failed) from failed

    def delete(self, name: str) -> None:
        """Also the folders that become empty; a file that is not there is no error."""
        path = self._path(name)
        try:
            os.unlink(path)
            folder = os.path.dirname(path)
            while folder != self.root and not os.listdir(folder):
                os.rmdir(folder)
                folder = os.path.dirname(folder)
            _sync_folder(folder)
        except FileNotFoundError:
            pass
        except OSError as failed:
            if failed.errno not in (errno.ENOTEMPTY, errno.ENOENT):  # another process wrote or deleted beside us
                raise self._explain("delete", name, failed) from failed

    def refresh(self, name: str) -> None:
        """Mark a file as used now, so that no other process takes it for garbage."""
        try:
            os.utime(self._path(name))
        except OSError as failed:
            raise self._explain("mark", name, failed) from failed

    def sweep(self, older_than_s: float) -> int:
        """Delete temporary files that a killed process left; returns how many."""
        swept, now = 0, time.time()
        for folder, _, files in os.walk(self.root):
            for file in files:
                path = os.path.join(folder, file)
                try:
                    if _TEMPORARY.fullmatch(file) and now - os.stat(path).st_mtime >= older_than_s:
                        os.unlink(path)
                        swept += 1
                except OSError:  # another process swept it
                    continue
        return swept

    def free_bytes(self) -> int | None:
        folder = self.root
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return shutil.disk_usage(folder).free

    def locate(self, name: str) -> str:
        return os.path.join(self.root, name)

    def _path(self, name: str) -> str:
        return os.path.join(self.root, *check_name(name).split("/"))

    def _create(self, folder: str, path: str) -> int:
        for attempt in range(3):
            self._make_folder(folder)
            try:
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileNotFoundError:  # another process deleted the folder when it became empty
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def _make_folder(self, folder: str) -> None:
        """With the folders above it, each made known to the disk in its parent."""
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for path in reversed(missing):
            os.makedirs(path, exist_ok=True)
            _sync_folder(os.path.dirname(path))

    def _explain(self, verb: str, name: str, failed: OSError) -> CheckpointError:
        if failed.errno in _FULL:
            return CheckpointError(
                f"cannot {verb} {self.locate(name)}: the disk is full",
                why=failed.strerror or str(failed),
                do="free some space, keep fewer checkpoints, or set checkpoint_dir to another disk",
            )
        return CheckpointError(
            f"cannot {verb} {self.locate(name)}",
            why=failed.strerror or str(failed),
            do="check the permissions and the disk, or set checkpoint_dir to another place",
        )


def _read_all(file: Any, length: int | None) -> bytes:
    parts: list[bytes] = []
    left = length
    while left is None or left > 0:
        part = file.read(min(left, 1 << 24) if left is not None else 1 << 24)
        if not part:
            break
        parts.append(part)
        left = None if left is None else left - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write_all(handle: int, data: Any) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(handle, view) :]


def _sync_folder(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
