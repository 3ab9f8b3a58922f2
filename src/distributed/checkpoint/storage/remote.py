"""RemoteStorage: any fsspec URL, with a bounded number of tries; an object store puts an object whole or not at all."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

import fsspec

from distributed.checkpoint.storage.files import FileEntry, Names, NotThere, check_name
from distributed.core.errors import CheckpointError, MissingExtraError

T = TypeVar("T")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "abfs": "abfs", "abfss": "abfs", "az": "abfs"}
_LASTING = (PermissionError, IsADirectoryError, NotADirectoryError, ValueError, TypeError, NotImplementedError)


class RemoteStorage:
    """Transient failures are tried again `tries` times, waiting longer each time."""

    def __init__(
        self,
        url: str,
        *,
        options: dict[str, Any] | None = None,
        tries: int = 5,
        first_pause_s: float = 0.2,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.root = url.rstrip("/")
        self._chance = random.Random()  # the global generator belongs to the training
        self._tries, self._first_pause_s, self._sleep = tries, first_pause_s, sleep
        try:
            # Listings must not be remembered: other ranks write beside us.
            chosen = {"use_listings_cache": False, "skip_instance_cache": True} | (options or {})
            self._fs, base = fsspec.core.url_to_fs(self.root, **chosen)
        except (ImportError, ValueError) as failed:
            extra = _EXTRAS.get(url.partition(":")[0])
            if isinstance(failed, ImportError) and extra is not None:
                raise MissingExtraError(
                    f"{url} needs an extra that is not installed", do=f'pip install "distributed-training[{extra}]"'
                ) from failed
            raise CheckpointError(
                f"checkpoints cannot be kept at {url}", why=str(failed), do="use a folder, or a URL that fsspec knows"
            ) from failed
        self._base = str(base).rstrip("/")

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        end = None if length is None else start + length
        whole = start == 0 and length is None
        path = self._path(name)

        def get() -> bytes:
            try:
                return bytes(self._fs.cat_file(path) if whole else self._fs.cat_file(path, start=start, end=end))
            except FileNotFoundError:
                raise
            except Exception:
                # A range past the end is refused by some stores; what is there is then read whole, within its bound.
                size = None if whole else self.size(name)
                if size is None or start + (length or 0) <= size:
                    raise
                return b"" if start >= size else bytes(self._fs.cat_file(path, start=start, end=size))

        return self._try("read", name, get)

    def write(self, name: str, data: Any) -> None:
        path, body = self._path(name), bytes(data)
        self._try("write", name, lambda: self._fs.pipe_file(path, body))

    def create(self, name: str, data: Any) -> bool:
        """Write an object unless there is one: the store itself sees to that, where it can."""
        path, body = self._path(name), bytes(data)
        if self.size(name) is not None:
            return False

        def put() -> bool:
            try:
                self._fs.pipe_file(path, body, mode="create")
            except FileExistsError:
                return False
            except (TypeError, NotImplementedError, ValueError):  # it knows no such mode
                self._fs.pipe_file(path, body)
            return True

        return self._try("write", name, put)

    def size(self, name: str) -> int | None:
        try:
            return int(self._try("look at", name, lambda: self._fs.info(self._path(name)))["size"])
        except NotThere:
            return None

    def entries(self, prefix: str = "") -> dict[str, FileEntry]:
        top = self._path(prefix) if prefix else self._base

        def find() -> dict[str, Any]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(top, detail=True)
                # Of a file that is asked for by its own name, adlfs has a list.
                return dict(found) if isinstance(found, dict) else {path: self._fs.info(path) for path in found}
            except FileNotFoundError:
                return {}

        found = self._try("list", prefix or "the files", find)
        skip = len(self._base) + 1
        return {path[skip:]: FileEntry(int(info.get("size") or 0), _modified(info)) for path, info in found.items()}

    def list(self, prefix: str = "") -> Names:
        return sorted(self.entries(prefix))

    def children(self) -> Names:
        def look() -> Names:
            self._fs.invalidate_cache()
            return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._base, detail=False)]

        try:
            return sorted(self._try("list", "", look))
        except NotThere:
            return []

    def delete(self, name: str) -> None:
        with suppress(NotThere):
            self._try("delete", name, lambda: self._fs.rm_file(self._path(name)))

    def refresh(self, name: str) -> None:
        """Object stores have no such thing; there a run must have its folder for itself."""

    def sweep(self, older_than_s: float) -> int:
        return 0  # nothing is written under a temporary name

    def free_bytes(self) -> int | None:
        return None

    def locate(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._base}/{check_name(name)}"

    def _try(self, verb: str, name: str, call: Callable[[], T]) -> T:
        pause = self._first_pause_s
        for attempt in range(1, self._tries + 1):
            try:
                return call()
            except FileNotFoundError as missing:
                raise NotThere(f"{self.locate(name)} does not exist", do="check the URL and the bucket") from missing
            except Exception as failed:  # the boundary to libraries that each have errors of their own
                if isinstance(failed, _LASTING) or attempt == self._tries:
                    raise CheckpointError(
                        f"cannot {verb} {self.locate(name)}" + (f", tried {attempt} times" if attempt > 1 else ""),
                        why=f"{type(failed).__name__}: {failed}",
                        do="check the URL, the credentials and that the store is up",
                    ) from failed
            self._sleep(pause * self._chance.uniform(0.5, 1.0))  # ranks that failed together do not come back together
            pause = min(pause * 2, 10.0)
        raise AssertionError("unreachable")


def _modified(info: dict[str, Any]) -> float:
    """When a file was last written, or now where the store does not say: then it is never taken for garbage."""
    for key in ("LastModified", "mtime", "updated", "last_modified", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return time.time()
