"""A small disk of a run's own, which can be made full and free again."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

_BALLAST = "ballast"


class SmallDisk:
    """A file system in memory, mounted at a folder for as long as the context lasts; then the folder holds its files.

    Linux and root are needed.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self._folder, self._size = folder, size_bytes
        self._mounted = False

    def __enter__(self) -> SmallDisk:
        self._folder.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={self._size}", "tmpfs", str(self._folder))
        self._mounted = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()
        kept = self._folder.with_name(f"{self._folder.name}-kept")
        try:
            shutil.copytree(self._folder, kept)
        finally:
            _run("umount", "--lazy", str(self._folder))  # lazy: a process that was just killed may hold a file
        self._folder.rmdir()
        kept.rename(self._folder)

    def fill(self) -> None:
        """Take all that is free; again, what was freed since."""
        with (self._folder / _BALLAST).open("ab") as ballast:
            part = 2**20
            while part >= 4096:
                try:
                    os.posix_fallocate(ballast.fileno(), os.fstat(ballast.fileno()).st_size, part)
                except OSError as full:
                    if full.errno != errno.ENOSPC:
                        raise
                    part //= 16

    def free(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / _BALLAST).unlink()


def available() -> str | None:
    """Why no disk can be mounted here; None when one can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if not shutil.which("mount") or not shutil.which("unshare"):
        return "mount and unshare are needed: apt-get install mount util-linux"
    probe = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True
    )  # in a namespace of its own, so that nothing is left of it
    return None if probe.returncode == 0 else f"no file system can be mounted here: {probe.stderr.strip()}"


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")
