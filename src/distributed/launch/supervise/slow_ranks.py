"""Slow ranks that ask to be replaced: by a new process in their place, once all have left the world in order.

    rank            launcher of its node
      │ ─── Slow ──▶ may all ranks hand over their state? has this place had a new process before?
      │ ◀── Leave ── in order, to all ranks
      │ ─── Lost ──▶ once all have left: another rank holds the run; the slow one is ended
                     the next world begins, with a new rank in its place

Each place gets one new process: where that one is slow again, the machine is, and not the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distributed.core.protocol.rank_protocol import Slow
from distributed.launch.node.rank_group import RankHandle


class SlowRanks:
    """Of one node, over all worlds of a run."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._asking: tuple[RankHandle, str] | None = None
        self._replaced: set[int] = set()  # slots

    def begin_world(self) -> None:
        self._asking = None

    def hear(self, member: RankHandle, message: Slow) -> None:
        if member.slot in self._replaced:
            why = "A new process in its place did not help: its device or its machine is slow"
            self._warn(member, message.message, why)
        elif self._asking is None:
            self._asking = member, message.message

    def asked(self, *, can_go_on: bool) -> tuple[int, str] | None:
        """The rank that this world is to be left for, and why; None: there is none, or it cannot be left."""
        if self._asking is None:
            return None
        member, why = self._asking
        if not can_go_on:
            self._asking = None
            self._warn(member, why, "It is not replaced, because the ranks cannot hand over their state")
            return None
        return member.rank, why

    def replace(self, members: Sequence[RankHandle]) -> None:
        """After all have left in order: end the rank that asked, if another one holds what it holds."""
        if self._asking is None:
            return
        (member, why), self._asking = self._asking, None
        may_be_elsewhere = all(other.rank for other in members)  # rank 0 always holds the state
        if not may_be_elsewhere and not any(other.holds for other in members if other is not member):
            self._warn(member, why, "It is not replaced, because no other rank of this node holds the state of the run")
            return
        self._replaced.add(member.slot)
        member.give_up()

    def _warn(self, member: RankHandle, why: str, what: str) -> None:
        self._tell(f"rank {member.rank} is slow: {why}. {what}")
