"""The wire of the run's key-value store: frames of byte strings behind a handshake over the run's secret.

    server                                              client
    HELLO, its nonce                           ->
                                               <-       its nonce, HMAC(secret, "client", both nonces)
    HMAC(secret, "server", both nonces)        ->
    then frames: a request from the client, an answer from the server, and so on

A client without the secret gets a random number and is dropped: nothing of it is read but those 64 bytes. What
is read afterwards are byte strings; nothing is ever unpickled.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Sequence

HELLO = b"distsv1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
CLIENT_BYTES = NONCE_BYTES + PROOF_BYTES  # all that is read of a client which has not shown the secret yet
LENGTH_BYTES = 4
MOST_BYTES = 1 << 28  # of a frame: what is longer is no request of ours

_AGAIN_AFTER_S = (0.05, 0.15, 0.5)  # when a store hangs up on a proof

_COUNT = struct.Struct(">I")


class StoreLostError(RuntimeError):
    """The store does not answer any more, or never did; a RuntimeError, as torch's own stores raise."""

    collateral = True  # the cause is what ended the store, not the process that noticed
    do = ""  # what a user can do about it, where that is known


class StoreLateError(StoreLostError):
    """The store did not answer in time."""


class StoreRefusedError(StoreLostError):
    """The listener has another secret, or is no store of ours."""


class _HungUpError(StoreRefusedError):
    """The listener closed the connection on a proof: it has another secret, or too many connections at once."""


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: str, side: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """What shows that a side knows the secret, for this one connection."""
    return hmac.digest(secret.encode(), side.encode() + server_nonce + client_nonce, "sha256")


def is_proof(shown: bytes, secret: str, side: str, server_nonce: bytes, client_nonce: bytes) -> bool:
    return hmac.compare_digest(shown, proof(secret, side, server_nonce, client_nonce))


def pack(parts: Sequence[bytes]) -> bytes:
    """A frame.

    >>> unpack(pack([b"set", b"key", b""])[LENGTH_BYTES:])
    [b'set', b'key', b'']
    """
    body = b"".join(_COUNT.pack(len(part)) + part for part in parts)
    return _COUNT.pack(len(body)) + body


def frame_length(head: bytes) -> int:
    """Of the frame that begins with these LENGTH_BYTES."""
    length: int = _COUNT.unpack(head)[0]
    if length > MOST_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return length


def unpack(body: bytes) -> list[bytes]:
    """The parts of a frame without its head; ValueError if it is none."""
    parts, at = [], 0
    while at < len(body):
        if at + LENGTH_BYTES > len(body):
            raise ValueError("a frame that ends in a length")
        end = at + LENGTH_BYTES + _COUNT.unpack_from(body, at)[0]
        if end > len(body):
            raise ValueError("a frame that is too short")
        parts.append(body[at + LENGTH_BYTES : end])
        at = end
    return parts


def receive(line: socket.socket, count: int) -> bytes:
    """Exactly that many bytes; StoreLostError when the other side closes the connection."""
    received = bytearray()
    while len(received) < count:
        part = line.recv(count - len(received))
        if not part:
            raise StoreLostError("the run's store closed the connection")
        received += part
    return bytes(received)


def dial(address: str, secret: str, timeout_s: float) -> socket.socket:
    """A connection to the store at `unix:name` (`@name`: without a file) or `tcp:host:port`, the handshake done.

    Raises OSError when nothing answers, and StoreRefusedError when the store has another secret: it hangs up,
    but so does one that too many connect to at once, and that one lets this side in when it comes again.
    """
    for pause_s in _AGAIN_AFTER_S:
        try:
            return _dial_once(address, secret, timeout_s)
        except _HungUpError:
            time.sleep(pause_s)
    return _dial_once(address, secret, timeout_s)


def _dial_once(address: str, secret: str, timeout_s: float) -> socket.socket:
    line = _connect(address, timeout_s)
    try:
        _shake_hands(line, address, secret)
    except BaseException:
        line.close()
        raise
    return line


def _connect(address: str, timeout_s: float) -> socket.socket:
    kind, _, where = address.partition(":")
    if kind == "unix":
        line = socket.socket(socket.AF_UNIX)
        try:
            line.settimeout(timeout_s)
            line.connect("\0" + where[1:] if where.startswith("@") else where)
        except BaseException:
            line.close()
            raise
        return line
    host, _, port = where.rpartition(":")
    line = socket.create_connection((host, int(port)), timeout_s)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return line


def _shake_hands(line: socket.socket, address: str, secret: str) -> None:
    try:
        hello = receive(line, len(HELLO) + NONCE_BYTES)
    except StoreLostError:
        raise StoreLostError(f"what listens at {address} closed the connection") from None
    if not hello.startswith(HELLO):
        raise StoreRefusedError(f"what listens at {address} is no launcher of this version of distributed-training")
    theirs, mine = hello[len(HELLO) :], new_nonce()
    try:
        line.sendall(mine + proof(secret, "client", theirs, mine))
        shown = receive(line, PROOF_BYTES)
    except (StoreLostError, ConnectionError):
        raise _HungUpError(f"the run at {address} has another join token") from None
    if not is_proof(shown, secret, "server", theirs, mine):
        raise StoreRefusedError(f"what listens at {address} does not know this run's join token")


def peer_is_other_user(line: socket.socket) -> bool:
    """Whether a process of another user is at the other end of a local socket, where the kernel reports it."""
    if line.family != socket.AF_UNIX or not sys.platform.startswith("linux"):
        return False
    _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid != os.geteuid())
