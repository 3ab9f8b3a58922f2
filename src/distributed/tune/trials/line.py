"""LineServer: the search's end of the socket on which trials and their ranks report (observe/trial.py has theirs).

It listens on a Unix socket in a folder that only this user can enter. It has no thread: its owner waits on its
`fileno` together with all else that can happen, and calls `pump`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import socket
import tempfile
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
_MOST_BYTES = 1 << 24  # of one message that has not ended
_MOST_PATH = 100  # bytes of a socket's path: the kernel has room for 107, on some systems for 103
_SHORT = "/tmp"


def _make_folder() -> str:
    """In the temporary folder, or where a path is shorter."""
    folder = tempfile.mkdtemp(prefix="distributed-tune-")
    if len(os.fsencode(folder)) > _MOST_PATH - len("/line"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="distributed-tune-", dir=_SHORT)
    return folder


class LineServer:
    """`answer` is given each message and returns what to reply; messages of one process come in order."""

    def __init__(self, answer: Callable[[Message], Message]) -> None:
        self._answer = answer
        self._folder = _make_folder()
        self.path = os.path.join(self._folder, "line")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._received: dict[socket.socket, bytes] = {}

    def fileno(self) -> int:
        """Readable when `pump` has something to do."""
        return self._selector.fileno()  # type: ignore[attr-defined,no-any-return]

    def pump(self, timeout_s: float | None = 0) -> None:
        """Answer everything that has come; waits for something at most so long."""
        ready = self._selector.select(timeout_s)
        while ready:
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.fileobj)  # type: ignore[arg-type]
            ready = self._selector.select(0)

    def close(self) -> None:
        for connection in list(self._received):
            self._drop(connection)
        self._listener.close()
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setblocking(True)
            self._received[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        try:
            part = connection.recv(1 << 16)
        except OSError:
            part = b""
        *lines, rest = (self._received[connection] + part).split(b"\n")
        if not part or len(rest) > _MOST_BYTES:
            self._drop(connection)
            return
        self._received[connection] = rest
        for line in lines:
            reply = self._answer(json.loads(line))
            with contextlib.suppress(OSError):  # it has ended meanwhile
                connection.sendall(json.dumps(reply, separators=(",", ":")).encode() + b"\n")

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._received.pop(connection)
        connection.close()
