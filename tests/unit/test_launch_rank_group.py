"""The ranks of one node over the worlds of a run, without processes: who stays, who is started, who is ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed.core.env import StoreDoor
from distributed.core.errors import LaunchError
from distributed.core.protocol.rank_protocol import World
from distributed.launch.local import LocalLauncher
from distributed.launch.node.rank_group import RankGroup
from distributed.launch.request import LaunchRequest, NodePlace, NodeProcesses
from tests.fake_ranks import STEP_S, FakeClock, FakeKernel, FakeRank

DOOR = StoreDoor("/run/store", "4f2a97c1")


class Group:
    """Three slots of one node, world after world."""

    def __init__(self, folder: Path, behave: Any = lambda rank: rank.joins(), **options: Any) -> None:
        self.folder, self.clock = folder, FakeClock()
        self.kernel = FakeKernel(self.clock, behave)
        self.group = RankGroup({"PATH": "/bin"}, "python", kernel=self.kernel, clock=self.clock, **options)

    def rendered(self, attempt: int, ranks: int) -> NodeProcesses:
        request = LaunchRequest(("train.py",), str(self.folder), ranks, attempt=attempt)
        return LocalLauncher(environ={}, python="python").node_processes(request, NodePlace.alone(request, 29500))

    def begin(self, attempt: int, slots: Sequence[int] = (0, 1, 2)) -> list[FakeRank]:
        """The processes of the world, by rank."""
        self.group.begin(self.rendered(attempt, len(slots)), slots)
        return [self.kernel._by_pid(member.process.pid) for member in self.group.members]

    def look(self) -> None:
        self.clock.sleep(0.0)
        self.group.notice()
        self.group.hear()


def test_survivors_keep_their_process_and_dead_ranks_restart(tmp_path: Path) -> None:
    node = Group(tmp_path)
    first = node.begin(0)
    first[1].dies()
    node.look()
    second = node.begin(1)
    assert [one is two for one, two in zip(first, second, strict=True)] == [True, False, True]
    node.look()
    assert [rank.attempt for rank in second] == [1, 1, 1]
    assert [type(message) for message in second[0].heard] == [World]
    assert second[1].heard == []


def test_ranks_after_an_excluded_slot_move_up(tmp_path: Path) -> None:
    node = Group(tmp_path)
    first = node.begin(0)
    node.look()
    second = node.begin(1, (0, 2))
    node.look()
    assert second == [first[0], first[2]]
    assert [rank.rank for rank in second] == [0, 1]
    assert [(member.slot, member.rank, member.born_as) for member in node.group.members] == [(0, 0, 0), (2, 1, 2)]
    assert first[1].code == -signal.SIGKILL


def test_rank_that_did_not_announce_regroup_is_restarted(tmp_path: Path) -> None:
    node = Group(tmp_path, lambda rank: rank.joins(regroups=rank.rank != 1) if rank.rank else None)
    first = node.begin(0)
    node.look()
    second = node.begin(1)
    assert [one is two for one, two in zip(first, second, strict=True)] == [False, False, True]


def test_old_ranks_end_before_new_ones_need_their_gpu(tmp_path: Path) -> None:
    running: list[int] = []

    def behave(rank: FakeRank) -> None:
        running.append(sum(other.code is None for other in node.kernel.ranks))
        rank.ignores.add(signal.SIGTERM)

    node = Group(tmp_path, behave, frees_devices=True)
    node.begin(0)
    node.look()
    node.begin(1)
    assert running == [1, 2, 3, 1, 2, 3]


def test_store_secret_is_sent_to_ranks_but_not_rendered(tmp_path: Path) -> None:
    node = Group(tmp_path, door=lambda: DOOR)
    (rank,) = node.begin(0, (0,))
    assert rank.environ["PATH"] == "/bin"
    assert rank.env.store == DOOR
    node.look()
    node.begin(1, (0,))
    node.look()
    (told,) = rank.heard
    assert isinstance(told, World)
    assert told.environ.items() >= DOOR.to_environ().items()
    assert DOOR.secret not in str(node.rendered(0, 1))


def test_rank_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    class Full(FakeKernel):
        def start(self, *given: Any) -> Any:
            raise OSError("no more processes")

    node = Group(tmp_path)
    node.kernel = node.group.kernel = Full(node.clock, lambda rank: None)
    with pytest.raises(LaunchError, match="rank 0 could not be started") as failed:
        node.begin(0)
    assert "no more processes" in str(failed.value)


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.ignores |= {signal.SIGTERM} if rank.rank else set()

    node = Group(tmp_path, behave)
    ranks = node.begin(0)
    began = node.clock.now
    node.group.end(5.0)
    assert [rank.code for rank in ranks] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGKILL]
    assert 5.0 < node.clock.now - began < 6.0
    assert all(member.ending is not None and member.ending.ended_by_us for member in node.group.members)


@pytest.mark.parametrize(
    ("says", "early_at", "in_loop"),
    [("nothing", None, False), ("trains", 3, True), ("has trained", None, True)],
)
def test_exit_0_is_early_only_while_a_rank_trains(
    tmp_path: Path, says: str, early_at: int | None, in_loop: bool
) -> None:
    def behave(rank: FakeRank) -> None:
        if says != "nothing":
            rank.joins()
            rank.beat(3)
        if says == "has trained":
            rank.trained()
        rank.after(STEP_S, rank.exits, 0)

    node = Group(tmp_path, behave)
    node.begin(0, (0,))
    node.clock.sleep(1.0)
    node.look()
    (member,) = node.group.members
    assert member.ending is not None
    assert (member.ending.early_at, member.ending.in_loop) == (early_at, in_loop)


def test_failure_of_a_survivor_is_read_from_its_first_attempt(tmp_path: Path) -> None:
    node = Group(tmp_path)
    node.begin(0)
    node.look()
    ranks = node.begin(1, (0, 2))
    node.look()
    ranks[1].fails(message="in its second world")
    node.look()
    ending = node.group.members[1].ending
    assert ending is not None
    assert ending.rank == 1
    assert ending.record is not None
    assert ending.record.message == "in its second world"
