"""Lines of a measurement: TCP connections between two nodes that have shown each other the run's secret.

The node that asks dials, and says in a few bytes what each line is for; what it then carries are zeros.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from distributed.core.errors import LaunchError
from distributed.core.protocol.store_wire import (
    CLIENT_BYTES,
    HELLO,
    NONCE_BYTES,
    StoreLostError,
    dial,
    is_proof,
    new_nonce,
    proof,
    receive,
)

_HEAD = struct.Struct(">IHB")  # the turn, the line's number in it, and whether the dialling node sends
_STRANGER_S = 2.0  # for a connection to show the secret
_RETRANSMITS_AT = 100  # of tcpi_total_retrans in Linux's tcp_info


@dataclass(frozen=True)
class MeasuredLine:
    """One connection of a turn."""

    connection: socket.socket
    sends: bool  # this side, of a stream

    def close(self) -> None:
        self.connection.close()

    @property
    def retransmits(self) -> int | None:
        """Segments that this side sent again; None where the system does not tell."""
        if not sys.platform.startswith("linux"):
            return None
        told = self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RETRANSMITS_AT + 4)
        return int(struct.unpack_from("=I", told, _RETRANSMITS_AT)[0]) if len(told) > _RETRANSMITS_AT else None


class Listener:
    """Where other nodes dial: an address of the interface that is measured, and of no other."""

    def __init__(self, address: str, secret: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=64)
        self.address, self.port, self._secret = address, int(self._server.getsockname()[1]), secret

    def close(self) -> None:
        self._server.close()

    def accept(self, turn: int, count: int, timeout_s: float) -> list[MeasuredLine]:
        """The lines of a turn, in order. Who does not know the secret is hung up on, and costs a moment."""
        deadline = time.monotonic() + timeout_s
        found: dict[int, MeasuredLine] = {}
        while len(found) < count:
            self._server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                raise LaunchError(
                    f"{len(found)} of {count} connections came to {self.address}:{self.port} within {timeout_s:g} s",
                    why="the other node did not reach this port, which the system chose",
                    do="open the nodes' ports to each other, or name another --interface",
                ) from None
            number = self._admit(connection, turn)
            if number is not None:
                found[number[0]] = MeasuredLine(connection, sends=not number[1])
        return [found[number] for number in sorted(found)]

    def _admit(self, connection: socket.socket, turn: int) -> tuple[int, bool] | None:
        """The line's number, and whether the other side sends; None: a stranger's, which is closed."""
        nonce = new_nonce()
        try:
            connection.settimeout(_STRANGER_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(HELLO + nonce)
            heard = receive(connection, CLIENT_BYTES)
            theirs, shown = heard[:NONCE_BYTES], heard[NONCE_BYTES:]
            if is_proof(shown, self._secret, "client", nonce, theirs):
                connection.sendall(proof(self._secret, "server", nonce, theirs))
                of_turn, number, sends = _HEAD.unpack(receive(connection, _HEAD.size))
                if of_turn == turn:
                    return number, bool(sends)
        except (OSError, StoreLostError):
            pass
        with suppress(OSError):
            connection.close()
        return None


def dial_lines(
    address: str, port: int, secret: str, turn: int, *, sends: tuple[bool, ...], timeout_s: float
) -> list[MeasuredLine]:
    """A line for each of `sends`: whether this side sends on it."""
    lines: list[MeasuredLine] = []
    try:
        for number, is_sender in enumerate(sends):
            connection = dial(f"tcp:{address}:{port}", secret, timeout_s)
            lines.append(MeasuredLine(connection, is_sender))
            connection.sendall(_HEAD.pack(turn, number, is_sender))
    except (OSError, StoreLostError) as failed:
        for line in lines:
            line.close()
        raise LaunchError(
            f"this node does not reach {address}:{port}",
            why=str(failed),
            do="open the nodes' ports to each other, or name another --interface",
        ) from failed
    return lines
