"""events.jsonl: an event a line, each written in one call: a killed run loses nothing, a reader sees whole lines."""

from __future__ import annotations

import os

from distributed.core.atomic import FILE_MODE
from distributed.core.events import Event


class EventLog:
    """Appends each event to a file with a single write; several processes may append to the same file.

    >>> import tempfile
    >>> from distributed.core.events import Warned
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = EventLog(os.path.join(folder, "events"))
    ...     log.on(Warned(time=1.0, message="slow disk"))
    ...     log.close()
    ...     print(open(log.path).read(), end="")
    {"event":"Warned","time":1.0,"message":"slow disk"}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        self._end_torn_line()

    def on(self, event: Event) -> None:
        if self._fd >= 0:
            os.write(self._fd, event.to_json().encode() + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _end_torn_line(self) -> None:
        """A machine that went down in an earlier attempt may have kept half a line: it must not swallow our first."""
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")
