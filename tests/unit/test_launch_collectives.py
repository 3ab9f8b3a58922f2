"""Flight recorders of several ranks, compared: who has not come, who waits in what, and whose calls differ."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from distributed.core.protocol.heartbeat import Phase
from distributed.core.run_dir import AttemptDir
from distributed.launch.supervise.flight_recorders import Recorders
from distributed.launch.supervise.hangs import HangWatch, Stall
from distributed.launch.supervise.stack_query import Watched
from distributed.launch.supervise.stacks import Whereabouts
from distributed.launch.supervise.stuck_collectives import (
    Call,
    blame_mismatch,
    find_mismatch,
    find_waits,
    has_lines,
    parse_record,
    standing_in,
)
from distributed.runtime.flight_recorder import of_present_groups, write_collectives
from distributed.runtime.heartbeat import Heartbeat

WORLD = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
PAIR = {"7": {"name": "7", "desc": "mesh_pp", "ranks": "[4, 6]"}}
USER = [
    {"name": "all_reduce", "filename": "/venv/lib/python3.12/site-packages/torch/distributed/x.py", "line": 9},
    {"name": "meet", "filename": "/home/me/train.py", "line": 31},
]


def entry(
    number: int, name: str = "all_reduce", *, done: bool = False, group: str = "0", **more: Any
) -> dict[str, Any]:
    return {
        "process_group": [group, "of tests"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [[512, 10]],
        "input_dtypes": ["Float"],
        "state": "completed" if done else "scheduled",
        "frames": USER,
    } | more


def calls(*entries: dict[str, Any], groups: dict[str, Any] = WORLD) -> tuple[Call, ...]:
    return parse_record(json.dumps({"backend": "nccl", "pg_config": groups, "entries": entries}))


def message(name: str, *, seq: int = 1, done: bool = False) -> dict[str, Any]:
    return entry(0, name, done=done, group="7", is_p2p=True, p2p_seq_id=seq)


def test_rank_that_has_not_called_the_collective_is_missing() -> None:
    came, absent = calls(entry(1, done=True), entry(2)), calls(entry(1, done=True))
    waits = find_waits({0: came, 1: absent, 2: came})
    assert {rank: wait.missing for rank, wait in waits.items()} == {0: (1,), 2: (1,)}
    assert str(waits[0].call) == "all_reduce number 2 (float32 [512, 10]), called at train.py:31 in meet"


def test_rank_ahead_waits_in_its_first_unmatched_call() -> None:
    ahead = calls(entry(1, done=True), *(entry(number) for number in range(2, 9)))
    waits = find_waits({0: ahead, 1: calls(entry(1, done=True), entry(2), entry(3)), 2: ahead})
    assert waits[0].call.number == 4
    assert 1 not in waits


def test_calls_dropped_from_the_recorder_are_not_missing() -> None:
    """The recorder keeps the last ones: a rank that is far ahead has forgotten those of one that is not."""
    waits = find_waits({0: calls(entry(900), entry(901)), 1: calls(entry(5, done=True)), 2: calls(entry(901))})
    assert waits[0].missing == (1,)


def test_rank_without_a_record_counts_as_missing() -> None:
    waits = find_waits({0: calls(entry(1)), 2: calls(entry(1))})
    assert {rank: wait.missing for rank, wait in waits.items()} == {0: (1,), 2: (1,)}


def test_rank_known_absent_is_blamed_before_a_silent_one() -> None:
    groups = WORLD | {"3": {"ranks": "[0, 1]"}}
    own = calls(entry(1), entry(1, group="3"), groups=groups)
    assert find_waits({0: own, 1: calls(entry(1), groups=groups)})[0].missing == (1,)


def test_no_rank_waits_when_all_have_called() -> None:
    assert not find_waits(dict.fromkeys(range(3), calls(entry(1, done=True), entry(2))))


def test_call_before_a_finished_one_is_finished_too() -> None:
    own = calls(entry(1), entry(2, done=True), entry(3))
    assert find_waits({0: own})[0].call.number == 3


def test_sender_and_receiver_wait_for_each_other() -> None:
    receives = calls(message("recv 1<-0"), groups=PAIR)
    assert find_waits({4: calls(groups=PAIR), 6: receives})[6].missing == (4,)
    assert not find_waits({4: calls(message("send 0->1"), groups=PAIR), 6: receives})
    assert str(find_waits({6: receives})[6].call).startswith("recv from rank 4 (float32")


def test_coalesced_messages_finish_with_their_batch() -> None:
    parts = [message("send 0->1"), message("recv 0<-1")]
    whole = message("coalesced", done=True) | {"is_p2p": False}  # as torch writes it
    over = calls(*parts, whole, groups=PAIR)
    assert [(call.name, call.peer, call.is_done) for call in over] == [("send", 6, True), ("recv", 6, True)]
    again = calls(
        *parts, whole, message("send 0->1", seq=2), whole | {"p2p_seq_id": 2, "state": "scheduled"}, groups=PAIR
    )
    assert [call.is_done for call in again] == [True, True, False]


def test_coalesced_collectives_finish_with_their_batch() -> None:
    entries = entry(2, "all_gather"), entry(2, "all_gather"), entry(2, "coalesced", done=True)
    assert [(call.name, call.is_done) for call in calls(*entries)] == [("all_gather", True)] * 2


@pytest.mark.parametrize(
    "other",
    [entry(2, "_all_gather_base"), entry(2, input_sizes=[[512, 11]]), entry(2, input_dtypes=["BFloat16"], done=True)],
)
def test_different_collectives_with_one_number_are_found(other: dict[str, Any]) -> None:
    same, odd = calls(entry(1, done=True), entry(2)), calls(entry(1, done=True), other)
    assert set(find_mismatch({0: odd, 1: same, 2: same})) == {0, 1, 2}
    assert blame_mismatch({0: odd, 1: same, 2: same}, [0, 1, 2])[0] == 0
    assert blame_mismatch({0: same, 1: odd}, [0, 1])[0] == 1
    assert blame_mismatch({0: same, 1: odd}, [0]) is None


def test_all_gather_of_different_sizes_is_no_mismatch() -> None:
    rows = (calls(entry(1, "all_gather", input_sizes=[[rows, 4]])) for rows in (3, 5))
    assert not find_mismatch(dict(enumerate(rows)))


def test_finished_mismatch_is_not_blamed() -> None:
    done = entry(1, done=True)
    assert not find_mismatch({0: calls(done), 1: calls(entry(1, "broadcast", done=True))})


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"entries": [{"backend": 1}]}', '{"backend": "nccl", "entries": [{}]}']
)
def test_records_without_calls_are_empty(text: str) -> None:
    assert parse_record(text) == ()


def test_line_in_our_package_is_shown_when_user_only_calls_fit() -> None:
    fit = str(Path(__file__).parents[2] / "src/distributed/runtime/session.py")
    frames = [{"name": "sum", "filename": fit, "line": 5}, USER[1]]
    assert calls(entry(1, frames=frames))[0].line == "distributed/runtime/session.py:5 in sum"
    assert calls(entry(1, frames=[]))[0].line == ""


def test_stopped_rank_is_not_reported_as_waiting() -> None:
    (wait,) = find_waits({0: calls(entry(1))}).values()
    assert standing_in(Whereabouts("user code", "train.py:9"), wait).waits
    assert standing_in(Whereabouts("stopped", "SIGSTOP"), wait).kind == "stopped"
    assert standing_in(Whereabouts("user code", "train.py:9"), None).where == "train.py:9"


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def stalled(folder: Path, told: dict[int, Any], pid: int, phase: Phase = Phase.TRAINING, **how: Any) -> Stall | None:
    """What is found of ranks that all made their last step at once; those in `told` answer."""
    clock = Clock()
    ranks = [
        Watched(rank, pid, AttemptDir(folder).heartbeat(rank), AttemptDir(folder).stack(rank)) for rank in range(2)
    ]
    hearts = [Heartbeat(folder, rank) for rank in range(2)]
    for step in range(1, 6):
        for heart in hearts:
            heart.beat(step)
    paths = {rank: folder / f"collectives-{rank}.json" for rank in range(2)}

    def answer(rank: int) -> None:
        if rank in told:
            record = {"backend": "nccl", "pg_config": PAIR_01, "entries": told[rank]}
            paths[rank].write_text(json.dumps(record | {"has_lines": rank == 0}))  # rank 1's are late

    watch = HangWatch(ranks, 1.0, recorders=Recorders(paths, answer), clock_ns=clock, wall_ns=clock, **how)
    with ExitStack() as phases:
        for heart in hearts:
            phases.enter_context(heart.phase(phase))
        clock.now = int(hearts[0]._last)
        for _ in range(160):
            clock.now += 100_000_000
            found = watch.look()
            if found is not None:
                return found
    return None


PAIR_01 = {"0": {"ranks": "[0, 1]"}}


def test_rank_behind_is_blamed_when_stacks_are_missing(tmp_path: Path) -> None:
    """Neither has a handler for the question, so that their stacks say nothing: by them, rank 0 would be blamed."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        found = stalled(tmp_path, {0: [entry(1, done=True), entry(2)], 1: [entry(1, done=True)]}, process.pid)
        assert found is not None
        assert (found.rank, found.waiting) == (1, (0,))
        assert found.collective.startswith("all_reduce number 2")
        silent = stalled(tmp_path, {}, process.pid)
        assert silent is not None
        assert (silent.rank, silent.collective) == (0, "")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("is_overdue", [True, False])
def test_overdue_collective_is_found_outside_of_training(tmp_path: Path, is_overdue: bool) -> None:
    """An evaluation may take longer than a collective may, and its ranks may have come to one just now."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        begun = 0 if is_overdue else time.monotonic_ns() + 3600 * 10**9
        told = {0: [entry(1, done=True), entry(2, time_created_ns=begun)], 1: [entry(1, done=True)]}
        how: dict[str, Any] = {"phase": Phase.EVALUATING, "collective_s": 3.0}
        found = stalled(tmp_path, told, process.pid, ends_collectives=True, **how)
        assert (found is not None) == is_overdue
        if found is not None:
            assert (found.rank, found.waiting, found.deadline_s) == (1, (0,), 3.0)
        assert stalled(tmp_path, told, process.pid, ends_collectives=False, **how) is None
    finally:
        process.kill()
        process.wait()


def test_rank_without_nccl_writes_an_empty_record(tmp_path: Path) -> None:
    write_collectives(str(tmp_path / "told.json"))
    told = (tmp_path / "told.json").read_text()
    assert has_lines(told)
    assert parse_record(told) == ()


def test_calls_of_the_previous_world_are_left_out() -> None:
    """The host of a rank that survived begins some of them after its group was aborted; they count from 1 too."""
    before = [entry(number, pg_id=0, time_created_ns=number) for number in (42, 43)]
    after = [entry(number, pg_id=1, time_created_ns=number + 42) for number in (1, 2)]
    assert of_present_groups([*before, *after], 43) == after
    assert of_present_groups(before, 0) == before
    assert of_present_groups(before, 50) == []
