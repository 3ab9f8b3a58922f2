"""A rank's end of the line to its launcher: which world it is told to leave, and which one comes next."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.core.env import WorkerEnv
from distributed.core.protocol.rank_protocol import (
    Close,
    Closed,
    Dump,
    Joined,
    Leave,
    Lost,
    Message,
    World,
    decode,
    encode,
)
from distributed.runtime import flight_recorder
from distributed.runtime.agent_line import AgentLine


class Launcher:
    """The other end."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._lines = self._ours.makefile("rb")
        self.line = AgentLine(theirs)

    def tell(self, *messages: Message) -> None:
        for message in messages:
            self._ours.sendall(encode(message))

    def hear(self) -> Message | None:
        return decode(self._lines.readline())

    def hang_up(self) -> None:
        self._lines.close()
        self._ours.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.hang_up()


def world(attempt: int) -> World:
    env = WorkerEnv(world_size=2, launcher="distributed", attempt=attempt, restarts=attempt)
    return World(env.to_environ())


def test_next_world_is_the_newest_later_attempt(launcher: Launcher) -> None:
    launcher.tell(world(1), world(2))
    first = launcher.line.next_world(0)
    assert first is not None
    assert first.attempt in (1, 2), "the newest that has come"
    if first.attempt == 1:
        first = launcher.line.next_world(1)
        assert first is not None
    assert first.attempt == 2


def test_past_world_is_skipped(launcher: Launcher) -> None:
    launcher.tell(world(1), world(4))
    env = launcher.line.next_world(3)
    assert env is not None
    assert env.attempt == 4


def test_without_launcher_there_is_no_next_world(launcher: Launcher) -> None:
    launcher.hang_up()
    assert launcher.line.next_world(0) is None


def test_leave_in_order_does_not_cut_off_the_rank(launcher: Launcher) -> None:
    line = launcher.line
    launcher.tell(Leave(3, in_order=True), world(9))
    line.next_world(8)  # what was said before has been heard
    assert line.asked_to_leave(3)
    assert not line.asked_to_leave(4)
    assert not line.is_cut_off(3)


def test_leave_at_once_cuts_off_until_the_rank_left(launcher: Launcher) -> None:
    line, cuts = launcher.line, threading.Semaphore(0)
    line.on_cut_off(cuts.release)
    launcher.tell(Leave(3, in_order=False))
    assert cuts.acquire(timeout=30)
    assert cuts.acquire(timeout=30), "it may have been about to begin a collective"
    assert line.is_cut_off(3)
    assert line.is_cut_off(2)
    assert not line.is_cut_off(4)
    launcher.tell(world(4))
    env = line.next_world(3)
    assert env is not None
    for thread in threading.enumerate():
        if thread.name == "cut-off":
            thread.join(30)
            assert not thread.is_alive()


def test_gate_is_closed_before_the_launcher_hears_of_it(launcher: Launcher) -> None:
    closed = threading.Event()
    launcher.line.on_close(3, closed.set)
    launcher.tell(Close(3))
    assert launcher.hear() == Closed(3)
    assert closed.is_set()


def test_gate_made_after_close_is_closed_at_once(launcher: Launcher) -> None:
    """The message comes while a rank is in the rendezvous of that world."""
    earlier, closed, later = threading.Event(), threading.Event(), threading.Event()
    launcher.line.on_close(2, earlier.set)
    launcher.tell(Close(3))
    assert launcher.hear() == Closed(3)
    launcher.line.on_close(3, closed.set)
    assert closed.is_set()
    launcher.line.on_close(4, later.set)
    assert not later.is_set()


def test_gate_is_closed_while_a_dump_hangs(launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ends = threading.Event(), threading.Event()

    def hang(**options: bool) -> bytes:
        """As torch's own does while it waits for a device."""
        begun.set()
        ends.wait(60)
        raise RuntimeError

    monkeypatch.setattr(flight_recorder, "dump_nccl_trace", hang)
    launcher.tell(Dump(str(tmp_path / "collectives.json")))
    assert begun.wait(30)
    launcher.tell(Close(3))
    assert launcher.hear() == Closed(3)
    assert not ends.is_set()
    ends.set()


def test_launcher_link_tracks_whether_the_rank_can_regroup(launcher: Launcher) -> None:
    assert not launcher.line.regroups
    launcher.line.tell(Joined(True, in_run=True))
    assert launcher.line.regroups
    launcher.line.tell(Joined(False, is_done=True))
    assert not launcher.line.regroups
    assert [launcher.hear(), launcher.hear()] == [Joined(True, in_run=True), Joined(False, is_done=True)]


def test_message_to_a_dead_launcher_is_dropped(launcher: Launcher) -> None:
    launcher.hang_up()
    launcher.line.tell(Lost(0))
