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

_MAX_UNAUTHENTICATED = 1024  # connections that are not authenticated yet: ranks too, which all connect at once
_AUTHENTICATION_S = 5.0  # for a connection to authenticate
_BACKLOG = 1024
_READ_BYTES = 1 << 16
_PAUSE_S = 0.05  # when this process can open no more connections


@dataclass(eq=False)
class _Client:
    """One client's connection."""

    connection: socket.socket
    nonce: bytes = b""  # the challenge that was sent to it; "": it is authenticated
    since: float = 0.0
    heard: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    awaits: tuple[bytes, ...] = ()  # the keys that its request waits for


class StoreServer:
    """Serves the store until `close`. More than `max_unauthenticated` unauthenticated connections drop the oldest."""

    def __init__(
        self, listener: socket.socket, secret: str, *, max_unauthenticated: int = _MAX_UNAUTHENTICATED
    ) -> None:
        self._listener, self._secret, self._max_unauthenticated = listener, secret, max_unauthenticated
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, set[_Client]] = {}  # by one of the keys that each waits for
        self._unauthenticated: dict[_Client, None] = {}  # the oldest first
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
            for key, events in self._selector.select(_AUTHENTICATION_S if self._unauthenticated else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._serve_client(key.data, events)
            self._drop_late_unauthenticated()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client disconnected, or this process has no descriptor left
            if not _allow_more_files():
                self._drop_oldest_unauthenticated()
                time.sleep(_PAUSE_S)
            return
        try:
            self._challenge(connection)
        except (OSError, ValueError):  # the client is another user's, or disconnected
            connection.close()

    def _challenge(self, connection: socket.socket) -> None:
        if peer_is_other_user(connection):
            raise ConnectionRefusedError
        if len(self._unauthenticated) >= self._max_unauthenticated:
            self._drop_oldest_unauthenticated()
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        client = _Client(connection, new_nonce(), time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._unauthenticated[client] = None
        self._send(client, HELLO + client.nonce)

    def _serve_client(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(client, b"")
            if events & selectors.EVENT_READ:
                self._receive(client)
        except (OSError, ValueError, LookupError):  # the client disconnected, or broke the protocol
            self._drop(client)

    def _receive(self, client: _Client) -> None:
        part = client.connection.recv(CLIENT_BYTES - len(client.heard) if client.nonce else _READ_BYTES)
        if not part:
            raise ConnectionResetError
        client.heard += part
        if client.nonce:
            if len(client.heard) == CLIENT_BYTES:
                self._authenticate(client)
            return
        while not client.awaits and len(client.heard) >= LENGTH_BYTES:
            end = LENGTH_BYTES + frame_length(bytes(client.heard[:LENGTH_BYTES]))
            if len(client.heard) < end:
                return
            request = unpack(bytes(client.heard[LENGTH_BYTES:end]))
            del client.heard[:end]
            self._answer(client, request)

    def _authenticate(self, client: _Client) -> None:
        theirs, shown = bytes(client.heard[:NONCE_BYTES]), bytes(client.heard[NONCE_BYTES:])
        if not is_proof(shown, self._secret, "client", client.nonce, theirs):
            raise ConnectionRefusedError
        answer = proof(self._secret, "server", client.nonce, theirs)
        client.nonce = b""
        client.heard.clear()
        self._unauthenticated.pop(client, None)
        self._send(client, answer)

    def _answer(self, client: _Client, request: Sequence[bytes]) -> None:
        if not request:
            raise ValueError("an empty request")
        name, *words = request
        if name == b"wait":
            self._await(client, tuple(words))
            return
        if name not in _ANSWERS:
            raise ValueError(f"no request of this version: {name!r}")
        answer = _ANSWERS[name](self._values, words)
        self._send(client, pack(answer))
        if name in _CHANGES:
            for key in words[::2] if name == b"set" else words[:1]:
                self._answer_waiting(key)

    def _await(self, client: _Client, keys: tuple[bytes, ...]) -> None:
        missing = next((key for key in keys if key not in self._values), None)
        client.awaits = () if missing is None else keys
        if missing is None:
            self._send(client, pack([self._values[key] for key in keys]))
        else:
            self._waiting.setdefault(missing, set()).add(client)

    def _answer_waiting(self, key: bytes) -> None:
        """Answer the clients that wait for a key that is set now."""
        for client in self._waiting.pop(key, ()):
            self._await(client, client.awaits)

    def _send(self, client: _Client, more: bytes) -> None:
        client.unsent += more
        try:
            while client.unsent:
                del client.unsent[: client.connection.send(client.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        if self._selector.get_key(client.connection).events != events:
            self._selector.modify(client.connection, events, client)

    def _drop(self, client: _Client) -> None:
        self._unauthenticated.pop(client, None)
        for key in client.awaits:
            self._waiting.get(key, set()).discard(client)
        with contextlib.suppress(KeyError, ValueError):  # dropped already
            self._selector.unregister(client.connection)
        client.connection.close()

    def _drop_oldest_unauthenticated(self) -> None:
        if self._unauthenticated:
            self._drop(next(iter(self._unauthenticated)))

    def _drop_late_unauthenticated(self) -> None:
        late = time.monotonic() - _AUTHENTICATION_S
        for client in [client for client in self._unauthenticated if client.since < late]:
            self._drop(client)


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
