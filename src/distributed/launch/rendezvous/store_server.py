"""StoreServer: the run's key-value store in a thread of a launcher; clients must prove that they know its secret.

An unauthenticated connection costs little: at most 64 bytes are read of it, it has a deadline, and too many of them
drop the oldest.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import selectors
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distributed.core.env import StoreDoor
from distributed.core.protocol.store_wire import (
    CLIENT_BYTES,
    HELLO,
    LENGTH_BYTES,
    NONCE_BYTES,
    frame_length,
    is_proof,
    new_nonce,
    pack,
    peer_is_other_user,
    proof,
    unpack,
)

_MOST_STRANGERS = 1024  # connections that are not authenticated yet: ranks too, which all connect at once
_STRANGER_S = 5.0  # for a connection to authenticate
_BACKLOG = 1024
_READ_BYTES = 1 << 16
_PAUSE_S = 0.05  # when this process can open no more connections


@dataclass(eq=False)
class _Guest:
    """One client's connection."""

    line: socket.socket
    nonce: bytes = b""  # the challenge that was sent to it; "": it is authenticated
    since: float = 0.0
    heard: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    awaits: tuple[bytes, ...] = ()  # the keys that its request waits for


class StoreServer:
    """Serves the store until `close`. More than `most_strangers` unauthenticated connections drop the oldest."""

    def __init__(self, listener: socket.socket, secret: str, *, most_strangers: int = _MOST_STRANGERS) -> None:
        self._listener, self._secret, self._most_strangers = listener, secret, most_strangers
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, set[_Guest]] = {}  # by one of the keys that each waits for
        self._strangers: dict[_Guest, None] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._is_closed = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="store-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections and end the thread."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(BrokenPipeError):  # the thread was awake, and has ended
                self._wake.send(b"x")
            self._thread.join()
            self._wake.close()

    def _serve(self) -> None:
        while not self._is_closed:
            for key, events in self._selector.select(_STRANGER_S if self._strangers else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._tend(key.data, events)
            self._drop_late_strangers()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError:  # the client disconnected, or this process has no descriptor left
            if not _allow_more_files():
                self._drop_oldest_stranger()
                time.sleep(_PAUSE_S)
            return
        try:
            self._greet(line)
        except (OSError, ValueError):  # the client is another user's, or disconnected
            line.close()

    def _greet(self, line: socket.socket) -> None:
        if peer_is_other_user(line):
            raise ConnectionRefusedError
        if len(self._strangers) >= self._most_strangers:
            self._drop_oldest_stranger()
        line.setblocking(False)
        if line.family != socket.AF_UNIX:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        guest = _Guest(line, new_nonce(), time.monotonic())
        self._selector.register(line, selectors.EVENT_READ, guest)
        self._strangers[guest] = None
        self._send(guest, HELLO + guest.nonce)

    def _tend(self, guest: _Guest, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(guest, b"")
            if events & selectors.EVENT_READ:
                self._hear(guest)
        except (OSError, ValueError, LookupError):  # the client disconnected, or broke the protocol
            self._drop(guest)

    def _hear(self, guest: _Guest) -> None:
        part = guest.line.recv(CLIENT_BYTES - len(guest.heard) if guest.nonce else _READ_BYTES)
        if not part:
            raise ConnectionResetError
        guest.heard += part
        if guest.nonce:
            if len(guest.heard) == CLIENT_BYTES:
                self._welcome(guest)
            return
        while not guest.awaits and len(guest.heard) >= LENGTH_BYTES:
            end = LENGTH_BYTES + frame_length(bytes(guest.heard[:LENGTH_BYTES]))
            if len(guest.heard) < end:
                return
            request = unpack(bytes(guest.heard[LENGTH_BYTES:end]))
            del guest.heard[:end]
            self._answer(guest, request)

    def _welcome(self, guest: _Guest) -> None:
        theirs, shown = bytes(guest.heard[:NONCE_BYTES]), bytes(guest.heard[NONCE_BYTES:])
        if not is_proof(shown, self._secret, "client", guest.nonce, theirs):
            raise ConnectionRefusedError
        answer = proof(self._secret, "server", guest.nonce, theirs)
        guest.nonce = b""
        guest.heard.clear()
        self._strangers.pop(guest, None)
        self._send(guest, answer)

    def _answer(self, guest: _Guest, request: Sequence[bytes]) -> None:
        if not request:
            raise ValueError("an empty request")
        name, *words = request
        if name == b"wait":
            self._await(guest, tuple(words))
            return
        if name not in _ANSWERS:
            raise ValueError(f"no request of this version: {name!r}")
        answer = _ANSWERS[name](self._values, words)
        self._send(guest, pack(answer))
        if name in _CHANGES:
            for key in words[::2] if name == b"set" else words[:1]:
                self._tell(key)

    def _await(self, guest: _Guest, keys: tuple[bytes, ...]) -> None:
        missing = next((key for key in keys if key not in self._values), None)
        guest.awaits = () if missing is None else keys
        if missing is None:
            self._send(guest, pack([self._values[key] for key in keys]))
        else:
            self._waiting.setdefault(missing, set()).add(guest)

    def _tell(self, key: bytes) -> None:
        """Answer the clients that wait for a key that is set now."""
        for guest in self._waiting.pop(key, ()):
            self._await(guest, guest.awaits)

    def _send(self, guest: _Guest, more: bytes) -> None:
        guest.unsent += more
        try:
            while guest.unsent:
                del guest.unsent[: guest.line.send(guest.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(guest)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.unsent else 0)
        if self._selector.get_key(guest.line).events != events:
            self._selector.modify(guest.line, events, guest)

    def _drop(self, guest: _Guest) -> None:
        self._strangers.pop(guest, None)
        for key in guest.awaits:
            self._waiting.get(key, set()).discard(guest)
        with contextlib.suppress(KeyError, ValueError):  # dropped already
            self._selector.unregister(guest.line)
        guest.line.close()

    def _drop_oldest_stranger(self) -> None:
        if self._strangers:
            self._drop(next(iter(self._strangers)))

    def _drop_late_strangers(self) -> None:
        late = time.monotonic() - _STRANGER_S
        for guest in [guest for guest in self._strangers if guest.since < late]:
            self._drop(guest)


_Values = dict[bytes, bytes]


def _set(values: _Values, words: list[bytes]) -> list[bytes]:
    values.update(zip(words[::2], words[1::2], strict=True))
    return []


def _add(values: _Values, words: list[bytes]) -> list[bytes]:
    key, amount = words
    values[key] = str(int(values.get(key, b"0")) + int(amount)).encode()
    return [values[key]]


def _compare(values: _Values, words: list[bytes]) -> list[bytes]:
    """Compare and set as torch's stores do: a missing key equals an empty value."""
    key, expected, desired = words
    if key not in values and expected:
        return [expected]
    if values.get(key, b"") == expected or key not in values:
        values[key] = desired
    return [values[key]]


def _append(values: _Values, words: list[bytes]) -> list[bytes]:
    key, value = words
    values[key] = values.get(key, b"") + value
    return []


_ANSWERS: dict[bytes, Callable[[_Values, list[bytes]], list[bytes]]] = {
    b"set": _set,
    b"read": lambda values, keys: [b"1" + values[key] if key in values else b"0" for key in keys],
    b"check": lambda values, keys: [b"1" if all(key in values for key in keys) else b"0"],
    b"add": _add,
    b"compare": _compare,
    b"append": _append,
    b"delete": lambda values, keys: [b"1" if values.pop(keys[0], None) is not None else b"0"],
    b"keys": lambda values, words: [key for key in values if key.startswith(words[0])],
}
_CHANGES = frozenset((b"set", b"add", b"compare", b"append"))


def _allow_more_files() -> bool:
    """Raise the limit of open files: the store has a connection for each rank, and default limits are low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return True
    return False


class LocalStore:
    """The store of a run on one machine: a Unix socket of this user, and no port."""

    def __init__(self) -> None:
        secret = secrets.token_hex(32)
        self._folder = ""
        listener = socket.socket(socket.AF_UNIX)
        if sys.platform.startswith("linux"):  # without a file, so that a killed launcher leaves none
            name = f"@distributed-{secrets.token_hex(16)}"
            listener.bind("\0" + name[1:])
        else:
            self._folder = tempfile.mkdtemp(prefix="distributed-")  # for this user only
            name = os.path.join(self._folder, "store")
            listener.bind(name)
        listener.listen(_BACKLOG)
        self.door = StoreDoor(f"unix:{name}", secret)
        self._server = StoreServer(listener, secret)

    def close(self) -> None:
        self._server.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
