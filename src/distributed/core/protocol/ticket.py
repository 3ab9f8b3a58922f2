"""Ticket: what a process that `fit` starts is given in its environment, which no other user can write."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from distributed.core.atomic import Sealed


@dataclass(frozen=True)
class Ticket:
    """Which file holds its job, and where its modules are."""

    payload: Sealed
    sys_path: tuple[str, ...]  # of the process that called fit

    def to_text(self) -> str:
        return json.dumps({"payload": asdict(self.payload), "sys_path": self.sys_path}, separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> Ticket:
        """
        >>> ticket = Ticket(Sealed("payload-1f2e.pt", owner=0, size=3, digest="ab"), ("/code",))
        >>> Ticket.from_text(ticket.to_text()) == ticket
        True
        """
        document = json.loads(text)
        return Ticket(Sealed(**document["payload"]), tuple(document["sys_path"]))
