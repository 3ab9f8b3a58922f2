"""Atomic files: a file appears whole or not at all, and what a run writes down belongs to this user alone.

The one place for "write beside, then replace". Checkpoints have their own (checkpoint/storage/local.py and
checkpoint/exchange/files.py): they are forced to the disk, many at once, and a full disk is an error that says so.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path

from distributed.core.errors import LaunchError

FOLDER_MODE, FILE_MODE = 0o700, 0o600
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(path: str | os.PathLike[str]) -> Path:
    """A folder for this user alone, unless it is there: then its permissions stay."""
    folder = Path(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(folder, FOLDER_MODE)
    except FileExistsError:
        if not folder.is_dir():
            raise
    return folder


def write_private(path: str | os.PathLike[str], data: bytes | str) -> None:
    """A file for this user alone, which takes its name when it is whole."""
    replace_file(path, data, mode=FILE_MODE)


def replace_file(path: str | os.PathLike[str], data: bytes | str, *, mode: int = 0o666) -> None:
    """A process that has the file open keeps its content: a new file takes the name, the old one is never truncated.

    `mode` is what the umask leaves of it.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex[:12]}.tmp")
    handle = os.open(partial, _NEW, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def append_line(path: Path, line: str) -> None:
    """A line at the end of a file, in one write, so that lines of several processes do not mix."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE_MODE)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)


def create_private(path: str | os.PathLike[str]) -> int:
    """A new file to write to and read from; raises FileExistsError where there is one."""
    return os.open(path, _NEW, FILE_MODE)


def replace_folder(partial: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Give a folder that is whole its name, in place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)


@dataclass(frozen=True)
class Sealed:
    """A file as its writer left it, by which that file is distinguished from any other under its name.

    The digest is of what runs as code when it is read; tensors behind that are not read for it.
    """

    name: str
    owner: int  # as the file system reports it: on some of them not the writer's own number
    size: int
    digest: str
    holder: int = 0  # the process that keeps it open, as this descriptor
    descriptor: int = -1


def seal(path: str | os.PathLike[str], handle: int, code: bytes) -> Sealed:
    """Of a file that this process has just written, and keeps open as `handle` for as long as others may read it."""
    known = os.fstat(handle)
    return Sealed(os.path.basename(path), known.st_uid, known.st_size, digest_of(code), os.getpid(), handle)


def write_sealed(path: str | os.PathLike[str], code: bytes) -> Sealed:
    """A file that is code as a whole, for processes that may come when this one is gone."""
    write_private(path, code)
    known = os.stat(path, follow_symlinks=False)
    return Sealed(os.path.basename(path), known.st_uid, len(code), digest_of(code))


def read_sealed(folder: str | os.PathLike[str], sealed: Sealed) -> bytes:
    """What `write_sealed` wrote, or an error."""
    with os.fdopen(open_sealed(folder, sealed), "rb") as file:
        code = file.read()
    check_code(Path(folder) / sealed.name, code, sealed)
    return code


def digest_of(code: bytes | memoryview) -> str:
    return hashlib.sha256(code).hexdigest()


def open_sealed(folder: str | os.PathLike[str], sealed: Sealed) -> int:
    """The sealed file, opened: from the process that keeps it, which no change in the folder can reach, or by name.

    A reader compares the digest with `check_code` before anything in it is run.
    """
    try:
        handle = _from_holder(sealed)
    except OSError:  # that process is on another host, or gone
        handle = None
    return _by_name(Path(folder) / sealed.name, sealed) if handle is None else handle


def _from_holder(sealed: Sealed) -> int | None:
    if sealed.descriptor < 0:
        return None
    handle = os.open(f"/proc/{sealed.holder}/fd/{sealed.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    known = os.fstat(handle)
    if stat.S_ISREG(known.st_mode) and (known.st_uid, known.st_size) == (sealed.owner, sealed.size):
        return handle
    os.close(handle)  # of another process that has this number on another host
    return None


def _by_name(path: Path, sealed: Sealed) -> int:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as failed:
        raise _refusal(path, failed.strerror or str(failed)) from failed
    known = os.fstat(handle)
    problem = ""
    if not stat.S_ISREG(known.st_mode):
        problem = "it is not a regular file"
    elif known.st_uid != sealed.owner:
        problem = f"user {known.st_uid} owns it, and user {sealed.owner} wrote it"
    elif known.st_mode & _OTHERS_MAY_WRITE:
        problem = f"others may write to it (mode {stat.S_IMODE(known.st_mode):04o})"
    elif known.st_size != sealed.size:
        problem = f"it has {known.st_size} bytes, and {sealed.size} were written"
    if problem:
        os.close(handle)
        raise _refusal(path, problem)
    return handle


def check_code(path: str | os.PathLike[str], code: bytes | memoryview, sealed: Sealed) -> None:
    """Raises unless what would be run is what was written."""
    if digest_of(code) != sealed.digest:
        raise _refusal(Path(path), "its content is not what was written")


def _refusal(path: Path, why: str) -> LaunchError:
    return LaunchError(
        f"{path} is not the file that the launcher of this run wrote, and is not read",
        why=f"{why}; reading it would run the code in it",
        do="find out who writes to that folder, and start again with a run_dir that only you can write to",
    )
