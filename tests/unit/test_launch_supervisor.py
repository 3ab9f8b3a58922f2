"""The supervisor over ranks without processes: what it decides when ranks die, hang or fail, and when it is stopped."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.core.atomic import append_line
from distributed.core.errors import RankFailedError
from distributed.core.events import AttemptEnded, RankFailed, RankStalled, Recovered, RunReported, Warned
from distributed.core.protocol.rank_protocol import Broke, Close, Closed, Joined, Leave, Slow, World
from distributed.core.run_dir import RunDir
from distributed.launch.clock import Timings
from distributed.launch.node import log_mirror
from distributed.launch.node.log_mirror import LogMirror
from distributed.launch.node.stop_signals import Stopped
from distributed.launch.rendezvous.nodes import News, RunOver
from distributed.launch.request import LaunchRequest, Role
from distributed.launch.supervise.resize_request import ask_for_ranks
from distributed.launch.supervise.restart_limits import RestartLimits
from distributed.launch.supervise.states import (
    Done,
    Draining,
    GivenUp,
    Leaving,
    Resizing,
    Restarting,
    Running,
    Starting,
    follow,
)
from distributed.launch.supervise.watch import Asked
from distributed.observe.live import RunScreen
from tests.fake_ranks import STEP_S, FakeClock, FakeNodes, FakeRank, FakeRun, on

STEPS = 6


def trains(rank: FakeRank) -> None:
    rank.trains(STEPS)


def disturbed(
    number: int, at_step: int, act: Callable[[FakeRank], None], *, attempts: int = 1, **joins: Any
) -> Callable[[FakeRank], None]:
    """All train; one rank of the first worlds does something else right after a step."""

    def behave(rank: FakeRank) -> None:
        rank.trains(STEPS, **joins)
        if rank.rank == number and rank.attempt < attempts:
            rank.after((at_step - rank.step + 0.5) * STEP_S, act, rank)

    return behave


# States


def one_of_each(watch: Any = None, fault: Any = None) -> list[Any]:
    between = (fault, None, 0.0)
    going = [Starting(watch), Running(watch), Draining(watch, Asked("")), Leaving(watch)]
    return [*going, Restarting(*between), Resizing(*between), Done(), GivenUp(ValueError())]


FOLLOWING = {
    "Starting": "Running Draining Leaving Restarting GivenUp",
    "Running": "Draining Leaving Restarting GivenUp",
    "Draining": "Leaving Restarting Resizing GivenUp",
    "Leaving": "Restarting Done GivenUp",
    "Restarting": "Starting GivenUp",
    "Resizing": "Starting GivenUp",
    "Done": "",
    "GivenUp": "",
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(one_of_each(), repeat=2)))
def test_only_listed_state_transitions_are_allowed(before: Any, after: Any) -> None:
    names = type(before).__name__, type(after).__name__
    if names[1] in FOLLOWING[names[0]].split():
        assert follow(before, after) is after
    else:
        with pytest.raises(AssertionError, match="{} is not followed by {}".format(*names)):
            follow(before, after)


# Runs that end well


def test_undisturbed_run_ends_as_done(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, trains)
    run.run()
    assert isinstance(run.supervisor.state, Done)
    assert run.states[:2] == ["Starting", "Running"]
    assert len(run.ranks) == 2
    assert run.events == []


def test_script_without_trainer_is_done_when_all_ranks_exit(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, lambda rank: rank.after(1.0 + rank.rank, rank.exits, 0))
    run.run()
    assert isinstance(run.supervisor.state, Done)


def test_serving_rank_is_ended_when_the_others_finish(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        if rank.rank:
            trains(rank)

    run = FakeRun(tmp_path, behave, roles=lambda place, device: [Role(serves=True), Role()])
    run.run()
    assert isinstance(run.supervisor.state, Done)
    assert [rank.code for rank in run.ranks] == [-signal.SIGTERM, 0]


# Ranks that die


def test_killed_rank_is_replaced_and_survivor_keeps_its_process(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, disturbed(1, 3, FakeRank.dies))
    run.run()
    assert [rank.born_as for rank in run.ranks] == [0, 1, 1]
    assert [type(message) for message in run.ranks[0].heard] == [Leave, World]
    (ended,) = run.of_kind(AttemptEnded)
    assert (ended.attempt, ended.cause, ended.rank, ended.step) == (0, "machine", 1, 3)
    (back,) = run.of_kind(Recovered)
    assert (back.attempt, back.step, back.lost_steps, back.world_size) == (1, 3, 0, 2)
    (report,) = run.of_kind(RunReported)
    assert (report.attempts, report.faults) == (2, {"machine": 1})
    assert back.seconds == pytest.approx(report.seconds_lost)
    assert run.states == ["Starting", "Running", "Starting", "Running"]


def test_ranks_that_cannot_regroup_are_all_restarted(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, disturbed(1, 3, FakeRank.dies, regroups=False))
    run.run()
    assert [rank.born_in for rank in run.ranks] == [0, 0, 1, 1]
    assert run.ranks[0].code == -signal.SIGKILL
    (back,) = run.of_kind(Recovered)
    assert (back.step, back.lost_steps, back.source) == (0, 3, "the beginning")


# Ranks whose steps stand behind a gate (NCCL)


def told_at(rank: FakeRank, kind: type[Any]) -> float:
    return next(when for when, message in zip(rank.heard_at, rank.heard, strict=True) if isinstance(message, kind))


def test_no_rank_aborts_before_all_gates_are_closed(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.closes_after_s = rank.rank * 0.5
        disturbed(1, 3, FakeRank.dies, has_gate=True)(rank)

    run = FakeRun(tmp_path, behave, ranks=3)
    run.run()
    assert [rank.born_in for rank in run.ranks] == [0, 0, 0, 1]
    for rank in (run.ranks[0], run.ranks[2]):
        assert [type(message) for message in rank.heard] == [Close, Leave, World]
        assert told_at(rank, Leave) >= told_at(run.ranks[2], Close) + run.ranks[2].closes_after_s


def test_rank_that_does_not_close_its_gate_is_replaced(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.closes_after_s = None if on(rank, 2) else 0.0
        disturbed(1, 3, FakeRank.dies, has_gate=True)(rank)

    run = FakeRun(tmp_path, behave, ranks=3)
    run.run()
    assert [(rank.born_as, rank.born_in) for rank in run.ranks] == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1)]
    assert run.ranks[2].code == -signal.SIGKILL
    assert [type(message) for message in run.ranks[2].heard] == [Close]
    waited_s = told_at(run.ranks[0], Leave) - told_at(run.ranks[0], Close)
    assert waited_s == pytest.approx(run.timings.close_s, abs=0.2)
    (back,) = run.of_kind(Recovered)
    assert (back.lost_steps, back.world_size) == (0, 3)


def test_gate_of_a_rank_that_dies_is_not_waited_for(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.closes_after_s = None if on(rank, 2) else 0.0
        if on(rank, 2):
            rank.after(3.6 * STEP_S, rank.dies)
        disturbed(1, 3, FakeRank.dies, has_gate=True)(rank)

    run = FakeRun(tmp_path, behave, ranks=3)
    run.run()
    assert told_at(run.ranks[0], Leave) - told_at(run.ranks[0], Close) < run.timings.close_s / 2


def test_rank_that_cannot_go_on_ends_before_others_abort(tmp_path: Path) -> None:
    """It could take the garbage that they send for gradients, and save it."""

    def behave(rank: FakeRank) -> None:
        disturbed(1, 3, FakeRank.dies, regroups=rank.rank != 2, has_gate=rank.rank != 2)(rank)

    run = FakeRun(tmp_path, behave, ranks=3)
    run.run()
    assert run.ranks[2].code == -signal.SIGKILL
    assert run.ranks[2].heard == []
    assert [type(message) for message in run.ranks[0].heard] == [Close, Leave, World]


def test_world_that_only_its_ranks_saw_break_is_left(tmp_path: Path) -> None:
    def breaks(rank: FakeRank) -> None:
        rank.is_waiting = True
        rank.say(Broke(rank.attempt, "NCCL error: unhandled system error"))

    def behave(rank: FakeRank) -> None:
        disturbed(rank.rank, 3, breaks, has_gate=True)(rank)

    run = FakeRun(tmp_path, behave)
    run.run()
    assert len(run.ranks) == 2
    assert [type(message) for message in run.ranks[1].heard] == [Close, Leave, World]
    (ended,) = run.of_kind(AttemptEnded)
    assert ended.cause == "machine"
    assert "unhandled system error" in ended.message


def test_rank_that_does_not_come_to_rest_is_replaced(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.leaves_after_s = None if on(rank, 2) else 0.0
        if rank.attempt == 1:  # the others wait for the rank that is still in the world before
            rank.regroups = True
            rank.say(Joined(True, in_run=True, has_gate=True))
        else:
            disturbed(1, 3, FakeRank.dies, has_gate=True)(rank)

    run = FakeRun(tmp_path, behave, ranks=3)
    run.run()
    assert [(rank.born_as, rank.born_in) for rank in run.ranks] == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 2)]
    assert run.ranks[2].code == -signal.SIGKILL
    machine, hang = run.of_kind(AttemptEnded)
    assert (machine.cause, hang.cause, hang.rank) == ("machine", "hang", 2)
    assert hang.time - machine.time == pytest.approx(run.timings.rest_s, abs=1.0)


def test_rank_without_a_gate_may_take_long_to_leave(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.leaves_after_s = 0.25
        disturbed(1, 3, FakeRank.dies)(rank)

    run = FakeRun(tmp_path, behave, timings=Timings(unwatched_poll_s=0.1, rest_s=0.1))
    run.run()
    assert [rank.code for rank in run.ranks] == [0, -signal.SIGKILL, 0]


def test_rank_that_finds_no_gate_is_restarted_with_all(tmp_path: Path) -> None:
    """It knows only when its optimizer is made."""

    def behave(rank: FakeRank) -> None:
        disturbed(1, 3, FakeRank.dies, has_gate=True)(rank)
        rank.after(0.5 * STEP_S, rank.say, Joined(False, in_run=True))

    run = FakeRun(tmp_path, behave)
    run.run()
    assert [rank.born_in for rank in run.ranks] == [0, 0, 1, 1]
    assert not any(isinstance(message, Close) for rank in run.ranks for message in rank.heard)


def test_drain_ends_when_a_rank_finds_no_gate(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.leaves_in_order = False
        rank.trains(30, has_gate=True)
        rank.after(1.05, rank.say, Joined(False, in_run=True))

    run = resized(FakeRun(tmp_path, behave), 3)
    run.run()
    assert isinstance(run.supervisor.state, Done)
    assert "Draining" in run.states
    assert len(run.of_kind(Warned)) == 1
    assert len(run.ranks) == 2


@pytest.mark.parametrize("has_gate", [True, False])
def test_ranks_with_a_gate_do_not_leave_for_a_new_node(tmp_path: Path, has_gate: bool) -> None:
    run = FakeRun(
        tmp_path,
        lambda rank: rank.trains(30, has_gate=has_gate),
        nodes=lambda clock, request: FakeNodes(clock, request, num_nodes=1),
        max_nodes=2,
    )

    def come() -> None:
        run.nodes.waits = True

    run.clock.after(0.5, come)
    run.run()
    assert ("Draining" in run.states) is not has_gate


@pytest.mark.parametrize("has_gate", [True, False])
def test_ranks_with_a_gate_restart_among_several_nodes(tmp_path: Path, has_gate: bool) -> None:
    def behave(rank: FakeRank) -> None:
        disturbed(1, 3, dies_as_node_comes, has_gate=has_gate)(rank)

    def dies_as_node_comes(rank: FakeRank) -> None:
        run.nodes.num_nodes = 2
        rank.dies()

    run = FakeRun(tmp_path, behave, nodes=lambda clock, request: FakeNodes(clock, request, num_nodes=1), max_nodes=2)
    run.run()
    assert [rank.born_in for rank in run.ranks] == ([0, 0, 1, 1] if has_gate else [0, 0, 1])


def test_answer_about_an_earlier_world_closes_no_gate(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        if rank.attempt == 1 and rank.rank == 0:
            rank.closes_after_s = None
            rank.say(Closed(0))
        disturbed(1, 3, FakeRank.dies, attempts=2, has_gate=True)(rank)

    run = FakeRun(tmp_path, behave)
    run.run()
    assert run.ranks[0].code == -signal.SIGKILL


def test_rank_killed_before_it_joins_is_replaced(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        if on(rank, 1):
            rank.after(0.05, rank.dies)
        else:
            trains(rank)

    run = FakeRun(tmp_path, behave)
    run.run()
    (ended,) = run.of_kind(AttemptEnded)
    assert (ended.cause, ended.step) == ("machine", -1)
    assert isinstance(run.supervisor.state, Done)


def test_death_of_a_vital_rank_restarts_all_ranks(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, disturbed(0, 3, FakeRank.dies), roles=lambda place, device: [Role(is_vital=True), Role()])
    run.run()
    assert [rank.born_in for rank in run.ranks] == [0, 0, 1, 1]


def test_restarts_without_a_new_step_are_used_up(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, disturbed(1, 3, FakeRank.dies, attempts=9), limits=RestartLimits(max_restarts=2))
    with pytest.raises(RankFailedError, match="rank 1") as failed:
        run.run()
    assert "max_restarts=2" in str(failed.value)
    assert isinstance(run.supervisor.state, GivenUp)
    assert [event.attempt for event in run.of_kind(AttemptEnded)] == [0, 1]
    (told,) = run.of_kind(RankFailed)
    assert told.rank == 1
    assert all(rank.code is not None for rank in run.ranks)


def test_new_step_resets_the_restart_count(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.trains(STEPS, first=rank.attempt * 2)
        if rank.rank == 1 and rank.attempt < 2:
            rank.after(2.5 * STEP_S, rank.dies)

    run = FakeRun(tmp_path, behave, limits=RestartLimits(max_restarts=1))
    run.run()
    assert [event.step for event in run.of_kind(AttemptEnded)] == [2, 4]


def test_no_restart_is_the_default_of_a_script_without_trainer(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.after(1.0, rank.dies if on(rank, 1) else rank.exits, *([] if on(rank, 1) else [0]))

    with pytest.raises(RankFailedError, match="SIGKILL"):
        FakeRun(tmp_path / "a", behave).run()
    run = FakeRun(tmp_path / "b", behave, limits=RestartLimits(max_restarts=1))
    run.run()
    assert len(run.ranks) == 4


def test_slot_that_fails_thrice_is_excluded(tmp_path: Path) -> None:
    limits = RestartLimits(max_restarts=None, min_gpus=1)
    run = FakeRun(tmp_path, disturbed(1, 3, FakeRank.dies, attempts=3), limits=limits)
    run.run()
    assert [event.attempt for event in run.of_kind(AttemptEnded)] == [0, 1, 2]
    assert run.of_kind(Recovered)[-1].world_size == 1
    assert run.ranks[0].env.world_size == 1
    assert [rank.born_as for rank in run.ranks] == [0, 1, 1, 1]


def test_rank_lost_by_survivors_is_blamed_for_their_errors(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.trains(STEPS, first=0, regroups=False)
        if on(rank, 0):
            rank.after(2.5 * STEP_S, rank.fails, "CollectiveError", "connection closed", collateral=True)
        if on(rank, 1):
            rank.after(2.5 * STEP_S + 2.0, rank.dies)

    run = FakeRun(tmp_path, behave)
    run.run()
    (ended,) = run.of_kind(AttemptEnded)
    assert (ended.cause, ended.rank) == ("machine", 1)


def test_broken_connection_alone_is_a_machine_fault(tmp_path: Path) -> None:
    begun: list[float] = []

    def behave(rank: FakeRank) -> None:
        begun.append(run.clock.now)
        rank.trains(STEPS, regroups=False)
        if on(rank, 0):
            rank.after(2.5 * STEP_S, rank.fails, "CollectiveError", "connection closed", collateral=True)

    run = FakeRun(tmp_path, behave)
    run.run()
    (ended,) = run.of_kind(AttemptEnded)
    assert (ended.cause, ended.rank) == ("machine", 0)
    waited = begun[2] - begun[0] - 2.5 * STEP_S
    assert run.timings.collateral_s < waited < run.timings.collateral_s + 1.0, "others may still tell who broke it"


# Ranks that hang


def test_hung_rank_is_named_killed_and_replaced(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, disturbed(1, 3, FakeRank.hangs), limits=RestartLimits(None, hang_timeout_s=5.0))
    run.run()
    (stalled,) = run.of_kind(RankStalled)
    assert (stalled.rank, stalled.step, stalled.where) == (1, 3, "train.py:7 in forward")
    assert stalled.late_seconds > stalled.deadline_seconds == 5.0
    (ended,) = run.of_kind(AttemptEnded)
    assert (ended.cause, ended.rank) == ("hang", 1)
    assert signal.SIGKILL in run.ranks[1].signals
    assert [rank.born_as for rank in run.ranks] == [0, 1, 1]
    (back,) = run.of_kind(Recovered)
    assert back.seconds > 5.0, "the time in which it hung was lost too"


def test_rank_under_sigstop_is_reported_as_stopped(tmp_path: Path) -> None:
    def stop(rank: FakeRank) -> None:
        rank.state = "T"

    run = FakeRun(tmp_path, disturbed(1, 3, stop), limits=RestartLimits(None, hang_timeout_s=5.0))
    run.run()
    (stalled,) = run.of_kind(RankStalled)
    assert (stalled.rank, stalled.where) == (1, "stopped (SIGSTOP)")
    assert isinstance(run.supervisor.state, Done)


def test_failed_rank_that_hangs_in_clean_up_is_killed(tmp_path: Path) -> None:
    def fail(rank: FakeRank) -> None:
        rank.writes_failure()
        rank.hangs()

    run = FakeRun(tmp_path, disturbed(1, 3, fail))
    run.run()
    (ended,) = run.of_kind(AttemptEnded)
    assert (ended.cause, ended.rank, ended.message) == ("code", 1, "ValueError: boom")
    assert run.ranks[1].code == -signal.SIGKILL


def test_rank_that_waits_for_another_node_is_not_blamed(tmp_path: Path) -> None:
    """All of this node stand in the same collective; the other node names its own rank, and tells."""

    def behave(rank: FakeRank) -> None:
        long(rank)
        if rank.attempt == 0:
            rank.after(3.5 * STEP_S, rank.waits_for_others)

    run = two_nodes(tmp_path, behave, limits=RestartLimits(None, hang_timeout_s=5.0))
    run.nodes.say(News(kind="regroup", message="rank 3: made no step", rank=3, cause="hang", **OTHER), after_s=20.0)
    run.run()
    assert run.of_kind(RankStalled) == []
    assert [(event.cause, event.rank) for event in run.of_kind(AttemptEnded)] == [("hang", 3)]
    assert len(run.ranks) == 2


# Programs that fail


def test_same_error_at_the_same_step_twice_ends_the_run(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, disturbed(1, 3, FakeRank.fails, attempts=9))
    with pytest.raises(RankFailedError, match="ValueError: boom") as failed:
        run.run()
    assert "the same error at the same step twice (step 3)" in str(failed.value)
    assert [event.cause for event in run.of_kind(AttemptEnded)] == ["code"]


def test_out_of_memory_error_lists_memory_of_sharing_ranks(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, disturbed(1, 0, FakeRank.runs_out_of_memory))
    with pytest.raises(RankFailedError, match="CUDA out of memory") as failed:
        run.run()
    assert "which ranks 0, 1 share" in str(failed.value)
    assert f"rank 0 (pid {run.ranks[0].pid}): 10.0 GiB" in str(failed.value)


def test_transient_error_is_restarted(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, disturbed(1, 3, FakeRank.fails))
    run.run()
    assert [event.cause for event in run.of_kind(AttemptEnded)] == ["code"]


@pytest.mark.parametrize(("at_step", "exit_code"), [(0, 1), (3, 2), (3, 6)])
def test_permanent_errors_are_not_restarted(tmp_path: Path, at_step: int, exit_code: int) -> None:
    run = FakeRun(tmp_path, disturbed(1, at_step, lambda rank: rank.fails(exit_code=exit_code)))
    with pytest.raises(RankFailedError) as failed:
        run.run()
    assert failed.value.exit_code == exit_code
    assert len(run.ranks) == 2
    assert run.ranks[0].code == -signal.SIGTERM


def test_root_error_is_reported_before_collateral_ones(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.trains(STEPS)
        late = 2.5 * STEP_S + 0.1 * rank.rank
        rank.after(late, rank.fails, "ValueError" if rank.rank else "CollectiveError", collateral=not rank.rank)

    with pytest.raises(RankFailedError, match=r"rank 1 .*ValueError"):
        FakeRun(tmp_path, behave, limits=RestartLimits(max_restarts=0)).run()


def test_rank_that_exits_0_in_mid_run_is_named(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, disturbed(1, 3, lambda rank: rank.exits(0), attempts=9))
    with pytest.raises(RankFailedError, match=r"rank 1 .*exit code 0 after step 3"):
        run.run()


def test_rank_of_a_script_that_exits_before_the_others_is_named(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        if rank.rank:
            rank.after(0.5, rank.exits, 0)
        else:
            rank.after(1.0, rank.fails, "CollectiveError", "connection closed", collateral=True)

    with pytest.raises(RankFailedError, match=r"rank 1 .*exit code 0 while others still worked"):
        FakeRun(tmp_path, behave).run()


@pytest.mark.parametrize("fails", [True, False])
def test_failure_after_training_is_not_restarted(tmp_path: Path, fails: bool) -> None:
    def behave(rank: FakeRank) -> None:
        rank.trains(STEPS, then=lambda: after(rank))

    def after(rank: FakeRank) -> None:
        rank.trained()
        rank.after(0.1, rank.fails) if rank.rank == 1 and fails else rank.after(0.2, rank.exits, 0)

    run = FakeRun(tmp_path, behave)
    if fails:
        with pytest.raises(RankFailedError, match="ValueError"):
            run.run()
    else:
        run.run()
    assert len(run.ranks) == 2
    assert run.of_kind(AttemptEnded) == []


@pytest.mark.parametrize("always", [False, True])
def test_rank_killed_after_training_is_restarted_within_limits(tmp_path: Path, always: bool) -> None:
    def behave(rank: FakeRank) -> None:
        rank.trains(STEPS, first=STEPS if rank.attempt else 0, then=lambda: after(rank))

    def after(rank: FakeRank) -> None:
        rank.trained()
        if rank.rank == 1 and (always or rank.attempt == 0):
            rank.after(0.1, rank.dies)
        else:
            rank.after(0.5, rank.exits, 0)

    run = FakeRun(tmp_path, behave, limits=RestartLimits(max_restarts=2))
    if always:
        with pytest.raises(RankFailedError, match="SIGKILL"):
            run.run()
    else:
        run.run()
    assert [event.rank for event in run.of_kind(AttemptEnded)] == [1] * (2 if always else 1)
    assert [rank.born_in for rank in run.ranks[:4]] == [0, 0, 1, 1], "a rank that is done goes to no other world"


# Another number of ranks


def resized(run: FakeRun, ranks: int) -> FakeRun:
    run.clock.after(1.5 * STEP_S, lambda: ask_for_ranks(str(run.folder), ranks))
    return run


def long(rank: FakeRank) -> None:
    rank.trains(30)


@pytest.mark.parametrize("ranks", [1, 3])
def test_resize_drains_then_starts_the_new_world(tmp_path: Path, ranks: int) -> None:
    run = resized(FakeRun(tmp_path, long), ranks)
    run.run()
    assert run.states == ["Starting", "Running", "Draining", "Starting", "Running"]
    (ended,) = run.of_kind(AttemptEnded)
    assert (ended.cause, ended.rank) == ("resize", -1)
    assert run.of_kind(Recovered)[0].world_size == ranks
    assert len(run.ranks) == max(2, ranks)
    assert not RunDir(tmp_path).resize.exists()


def test_resize_request_of_an_earlier_run_is_ignored(tmp_path: Path) -> None:
    ask_for_ranks(str(tmp_path), 3)
    run = FakeRun(tmp_path, long)
    run.run()
    assert run.events == []


def test_resize_is_refused_once_when_ranks_cannot_regroup(tmp_path: Path) -> None:
    run = resized(FakeRun(tmp_path, lambda rank: rank.trains(30, regroups=False)), 3)
    run.run()
    (warned,) = run.of_kind(Warned)
    assert "cannot get another number of ranks" in warned.message
    assert len(run.ranks) == 2


def test_rank_killed_during_a_resize_is_replaced(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        long(rank)
        rank.leaves_in_order = not on(rank, 1)
        if on(rank, 1):
            rank.after(1.0, rank.dies)

    run = resized(FakeRun(tmp_path, behave), 3)
    run.run()
    assert run.states[:4] == ["Starting", "Running", "Draining", "Starting"]
    causes = [event.cause for event in run.of_kind(AttemptEnded)]
    assert causes == ["machine", "resize"], "the resize is still wanted"
    assert run.of_kind(Recovered)[-1].world_size == 3


def test_illegal_world_size_falls_to_the_next_lower(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.trains(30, sizes=[1, 2, 4])

    run = resized(FakeRun(tmp_path, behave, ranks=4), 3)
    run.run()
    assert run.of_kind(Recovered)[0].world_size == 2


# A slow rank that asks to be replaced


def is_slow(rank: FakeRank) -> None:
    rank.say(Slow(rank.attempt, "its compute takes 3.0 times the median"))


def slow(number: int, *, attempts: int = 1, **joins: Any) -> Callable[[FakeRank], None]:
    """One rank is slow in the first worlds, whichever process it is."""

    def behave(rank: FakeRank) -> None:
        rank.trains(30, **joins)
        if rank.rank == number and rank.attempt < attempts:
            rank.after(5.5 * STEP_S, is_slow, rank)

    return behave


@pytest.mark.parametrize("number", [0, 1])
def test_slow_rank_leaves_in_order_and_is_replaced(tmp_path: Path, number: int) -> None:
    run = FakeRun(tmp_path, slow(number))
    run.run()
    assert run.states == ["Starting", "Running", "Draining", "Starting", "Running"]
    assert [rank.born_as for rank in run.ranks] == [0, 1, number]
    assert run.ranks[number].code == -signal.SIGKILL
    assert [type(message) for message in run.ranks[1 - number].heard] == [Leave, Leave, World]
    (ended,) = run.of_kind(AttemptEnded)
    assert (ended.cause, ended.rank) == ("slow", number)
    assert "3.0 times the median" in ended.message
    (back,) = run.of_kind(Recovered)
    assert (back.lost_steps, back.world_size) == (0, 2)
    assert run.of_kind(RunReported)[0].faults == {"slow": 1}


def test_place_of_a_slow_rank_gets_one_new_process(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, slow(1, attempts=2))
    run.run()
    assert len(run.ranks) == 3
    (warned,) = run.of_kind(Warned)
    assert "its device or its machine is slow" in warned.message


def test_slow_rank_stays_when_ranks_cannot_regroup(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, slow(1, regroups=False))
    run.run()
    assert (len(run.ranks), run.states) == (2, ["Starting", "Running"])
    (warned,) = run.of_kind(Warned)
    assert "cannot hand over their state" in warned.message


def test_slow_rank_that_alone_holds_the_state_stays(tmp_path: Path) -> None:
    """As rank 0 does where buffers differ between the ranks."""

    def behave(rank: FakeRank) -> None:
        slow(0)(rank)
        rank.holds = rank.rank == 0

    run = FakeRun(tmp_path, behave)
    run.run()
    assert len(run.ranks) == 2
    assert all(rank.code == 0 for rank in run.ranks)
    (warned,) = run.of_kind(Warned)
    assert "no other rank of this node holds the state" in warned.message


def test_slow_rank_of_an_earlier_world_is_not_replaced(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        disturbed(0, 3, FakeRank.dies)(rank)
        if on(rank, 1, 1):
            rank.say(Slow(0, "in the world before"))

    run = FakeRun(tmp_path, behave)
    run.run()
    assert [rank.born_as for rank in run.ranks] == [0, 1, 0]


# Stopped from outside


def saves_when_asked(rank: FakeRank) -> None:
    """Ctrl-C: the ranks agree on a step, save and end with 130."""
    long(rank)
    rank.on_signal[signal.SIGINT] = lambda: rank.after(1.0, rank.exits, 130)


def interrupt(run: FakeRun, after_s: float, number: int = signal.SIGINT) -> None:
    run.clock.after(after_s, lambda: signal.raise_signal(number))


def test_ctrl_c_lets_ranks_save(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, saves_when_asked)
    interrupt(run, 0.45)
    with pytest.raises(Stopped) as stopped:
        run.run()
    assert stopped.value.exit_code == 130
    assert [rank.signals[0] for rank in run.ranks] == [signal.SIGINT] * 2
    assert [rank.code for rank in run.ranks] == [130, 130]
    assert isinstance(run.supervisor.state, Done)


def test_second_ctrl_c_kills_ranks_that_ignore_signals(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.trains(100)
        rank.ignores = {signal.SIGINT, signal.SIGTERM}

    run = FakeRun(tmp_path, behave)
    interrupt(run, 0.5)
    interrupt(run, 2.0)
    with pytest.raises(Stopped):
        run.run()
    assert all(rank.code == -signal.SIGKILL for rank in run.ranks)
    assert run.clock.now < 1005.0


def test_ranks_that_ignore_sigint_are_killed_after_the_grace(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.trains(100)
        rank.ignores = {signal.SIGINT, signal.SIGTERM}

    run = FakeRun(tmp_path, behave, limits=RestartLimits(interrupt_grace_s=5.0))
    interrupt(run, 0.5)
    with pytest.raises(Stopped):
        run.run()
    assert 1005.0 < run.clock.now < 1008.0
    assert all(rank.code == -signal.SIGKILL for rank in run.ranks)


def test_rank_that_fails_while_stopping_is_reported(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        long(rank)
        act = rank.fails if rank.rank else lambda: rank.exits(130)
        rank.on_signal[signal.SIGINT] = lambda: rank.after(1.0, act)

    run = FakeRun(tmp_path, behave)
    interrupt(run, 0.45)
    with pytest.raises(RankFailedError, match="rank 1"):
        run.run()
    assert len(run.ranks) == 2


def test_rank_killed_during_a_stop_is_replaced_and_saved(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        saves_when_asked(rank)
        if on(rank, 1):
            rank.on_signal[signal.SIGINT] = rank.dies
        if on(rank, 0):
            rank.on_signal[signal.SIGINT] = lambda: None

    run = FakeRun(tmp_path, behave)
    interrupt(run, 0.45)
    with pytest.raises(Stopped):
        run.run()
    assert [rank.code for rank in run.ranks] == [130, -signal.SIGKILL, 130]
    assert [event.cause for event in run.of_kind(AttemptEnded)] == ["machine"]


def test_signal_between_two_worlds_waits_for_the_next_world(tmp_path: Path) -> None:
    """Ranks that have not come to their steps could not save."""

    def behave(rank: FakeRank) -> None:
        rank.on_signal.clear()
        rank.after(5.0 * rank.attempt, saves_when_asked, rank)
        if on(rank, 1):
            rank.after(0.45, rank.dies)
        if rank.rank == 1 and rank.attempt:
            interrupt(run, 1.0)

    run = FakeRun(tmp_path, behave)
    with pytest.raises(Stopped):
        run.run()
    assert [rank.code for rank in run.ranks] == [130, -signal.SIGKILL, 130]


def test_signal_waits_for_the_next_world_only_until_a_timeout(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.on_signal[signal.SIGINT] = lambda: rank.exits(130)
        if rank.attempt == 0:
            long(rank)
        if on(rank, 1):
            rank.after(0.45, rank.dies)
        if rank.rank == 1 and rank.attempt:
            interrupt(run, 1.0)

    run = FakeRun(tmp_path, behave)
    with pytest.raises(Stopped):
        run.run()
    assert run.timings.settle_s < run.clock.now - 1000.0 < run.timings.settle_s + 3.0


# Several nodes

OTHER = {"node_rank": 1, "host": "n1"}


def two_nodes(folder: Path, behave: Callable[[FakeRank], None] = long, **more: Any) -> FakeRun:
    own = {name: more.pop(name) for name in ("node_rank",) if name in more}
    return FakeRun(folder, behave, num_nodes=2, nodes=lambda clock, request: FakeNodes(clock, request, **own), **more)


def test_failure_on_another_node_ends_this_one(tmp_path: Path) -> None:
    run = two_nodes(tmp_path)
    run.nodes.say(News(kind="failed", message="ValueError: boom", rank=3, exit_code=1, **OTHER), after_s=0.5)
    with pytest.raises(RankFailedError, match=r"node 1 \(n1\), rank 3 failed: ValueError: boom"):
        run.run()
    assert all(rank.code == -signal.SIGTERM for rank in run.ranks)
    assert run.nodes.told == []
    assert run.nodes.left == [False]


@pytest.mark.parametrize(("kind", "told"), [("lost", []), ("regroup", []), ("cut off", [])])
def test_world_is_regrouped_when_another_node_breaks_it(tmp_path: Path, kind: str, told: list[str]) -> None:
    run = two_nodes(tmp_path)
    run.nodes.say(News(kind=kind, message="n1 is gone", cause="machine", **OTHER), after_s=0.5)
    run.run()
    assert run.nodes.gathered == [(0, None), (1, 2)]
    assert [news.kind for news in run.nodes.told] == told, "the other nodes know it already"
    assert [event.cause for event in run.of_kind(AttemptEnded)] == ["machine"]
    assert len(run.ranks) == 2, "the ranks of this node go on"


def test_lost_node_counts_as_a_fault_and_a_regroup_does_not(tmp_path: Path) -> None:
    for kind, is_survived in (("lost", False), ("regroup", True)):
        run = two_nodes(tmp_path / kind, limits=RestartLimits(max_restarts=0))
        run.nodes.say(News(kind=kind, message="n1 is gone", cause="machine", **OTHER), after_s=0.5)
        if is_survived:
            run.run()
        else:
            with pytest.raises(RankFailedError, match="n1 is gone"):
                run.run()
            assert [news.kind for news in run.nodes.told] == ["failed"]


@pytest.mark.parametrize("tells", [True, False])
def test_lost_world_is_blamed_on_the_node_that_reports_it(tmp_path: Path, tells: bool) -> None:
    """No rank of this node ended: another node did it, which it tells, or the network, of which nobody does."""

    def behave(rank: FakeRank) -> None:
        long(rank)
        if rank.attempt == 0:
            rank.after(0.5, rank.loses_world, "Connection reset by peer")

    run = two_nodes(tmp_path, behave)
    if tells:
        news = News(kind="regroup", message="rank 3: killed by SIGKILL", rank=3, cause="machine", **OTHER)
        run.nodes.say(news, after_s=0.5 + 0.5 * run.timings.lost_s)
    run.run()
    (ended,) = run.of_kind(AttemptEnded)
    assert (ended.rank, "Connection reset" in ended.message) == ((3, False) if tells else (0, True))
    assert [news.kind for news in run.nodes.told] == ([] if tells else ["regroup"])
    assert len(run.ranks) == 2


def test_own_fault_is_reported_to_the_other_nodes(tmp_path: Path) -> None:
    run = two_nodes(tmp_path, disturbed(1, 3, FakeRank.dies))
    run.run()
    (news,) = run.nodes.told
    assert (news.kind, news.cause, news.rank) == ("regroup", "machine", 1)
    assert run.nodes.left == [True]


def test_only_node_0_reports_the_end_of_an_attempt(tmp_path: Path) -> None:
    run = two_nodes(tmp_path, disturbed(3, 3, FakeRank.dies), node_rank=1)
    run.run()
    assert len(run.ranks) == 3
    assert run.of_kind(AttemptEnded) == []
    assert run.of_kind(RunReported) == []


def loses(folder: Path, *numbers: int, node_rank: int) -> FakeRun:
    """A run of four nodes: the first loss ends the world, the others are known later, and nobody comes meanwhile."""

    def nodes(clock: FakeClock, request: LaunchRequest) -> FakeNodes:
        return FakeNodes(clock, request, node_rank=node_rank, num_nodes=4)

    run = FakeRun(folder, long, num_nodes=4, nodes=nodes)

    def lose(number: int) -> None:
        run.nodes.lost.add(number)
        run.nodes.stays_away = True

    for place, number in enumerate(numbers):
        run.clock.after(0.4 + 10.0 * place, lambda number=number: lose(number))
    run.nodes.say(News(numbers[0], f"n{numbers[0]}", "lost", "no heartbeat for 5 s"), after_s=0.5)
    return run


@pytest.mark.parametrize(("numbers", "node_rank"), [((0,), 1), ((0, 1), 2), ((1, 0), 2)])
def test_first_node_left_reports_the_end_while_it_waits(
    tmp_path: Path, numbers: tuple[int, ...], node_rank: int
) -> None:
    """Also where it learns of the second loss only then."""
    run = loses(tmp_path, *numbers, node_rank=node_rank)
    seen = []
    run.clock.after(20.0, lambda: seen.extend(run.of_kind(AttemptEnded)))
    run.clock.after(30.0, lambda: run.nodes.all_come(node_rank=0))
    run.run()
    assert [(event.attempt, event.host) for event in seen] == [(0, f"n{numbers[0]}")]
    assert run.of_kind(AttemptEnded) == seen


@pytest.mark.parametrize("node_rank", [1, 2])
def test_end_of_an_attempt_is_shown_while_the_node_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], node_rank: int
) -> None:
    """Also on a node that does not write it: the console follows the run's events."""
    monkeypatch.setattr(log_mirror, "_REFRESH_S", 0.0)  # of the machine's clock
    run = loses(tmp_path, 0, node_rank=node_rank)
    run.supervisor.mirror = LogMirror(RunScreen(str(tmp_path)))
    ended = AttemptEnded(time=0.0, attempt=0, cause="machine", message="no heartbeat for 5 s")
    if node_rank == 2:
        run.clock.after(5.0, lambda: append_line(RunDir(tmp_path).events, ended.to_json()))
    shown: list[str] = []
    run.clock.after(20.0, lambda: shown.extend(capsys.readouterr()))
    run.clock.after(30.0, lambda: run.nodes.all_come(node_rank=node_rank - 1))
    run.run()
    assert "attempt 0 ended" in "".join(shown)


def test_node_behind_another_leaves_the_end_to_it(tmp_path: Path) -> None:
    run = loses(tmp_path, 0, node_rank=2)
    run.clock.after(30.0, lambda: run.nodes.all_come(node_rank=1))
    run.run()
    assert run.of_kind(AttemptEnded) == []


@pytest.mark.parametrize("is_written", [True, False])
def test_next_node_0_reports_an_end_that_nobody_did(tmp_path: Path, is_written: bool) -> None:
    """Node 1 was lost as well: right after it had written the end, or before."""
    run = loses(tmp_path, 0, node_rank=2)
    ended = AttemptEnded(time=0.0, attempt=0, cause="machine", message="of node 1")
    if is_written:
        run.clock.after(5.0, lambda: append_line(RunDir(tmp_path).events, ended.to_json()))
    run.clock.after(30.0, lambda: run.nodes.all_come(node_rank=0))
    run.run()
    (found,) = run.of_kind(AttemptEnded)
    assert (found.message == "of node 1") is is_written


def test_end_of_a_later_attempt_is_not_taken_for_written(tmp_path: Path) -> None:
    """A run in the folder of an earlier one: its attempts have the same numbers."""
    before = AttemptEnded(time=0.0, attempt=0, cause="machine", message="of the run before")
    append_line(RunDir(tmp_path).events, before.to_json())
    run = two_nodes(tmp_path, disturbed(1, 3, FakeRank.dies))
    run.run()
    assert [event.message == before.message for event in run.of_kind(AttemptEnded)] == [True, False]


def test_late_failure_of_another_node_ends_a_finished_node(tmp_path: Path) -> None:
    """A script that fails after `fit` on the other node: this one has ended well already."""
    run = two_nodes(tmp_path, trains, node_rank=1)
    run.nodes.late = [News(0, "n0", "failed", "ValueError: after fit", rank=0)]
    with pytest.raises(RankFailedError, match=r"node 0 .*ValueError: after fit"):
        run.run()
    assert isinstance(run.supervisor.state, GivenUp)
    assert len(run.ranks) == 2, "no rank is started again"
    assert run.nodes.left == [True, False]


def test_own_failure_after_training_is_given_up_on_all_nodes(tmp_path: Path) -> None:
    def behave(rank: FakeRank) -> None:
        rank.trains(STEPS, then=lambda: after(rank))

    def after(rank: FakeRank) -> None:
        rank.trained()
        rank.after(0.1, rank.fails, message="after fit") if rank.rank == 0 else rank.after(0.1, rank.exits, 0)

    run = two_nodes(tmp_path, behave)
    with pytest.raises(RankFailedError, match="after fit"):
        run.run()
    (news,) = run.nodes.told
    assert (news.kind, news.rank, news.message) == ("failed", 0, "ValueError: after fit")
    assert len(run.ranks) == 2


def test_finished_node_restarts_when_another_regroups(tmp_path: Path) -> None:
    run = two_nodes(tmp_path, lambda rank: rank.trains(STEPS, first=3 if rank.attempt else None))
    run.nodes.late = [News(kind="regroup", message="rank 3: killed by SIGKILL", rank=3, cause="machine", **OTHER)]
    run.run()
    assert isinstance(run.supervisor.state, Done)
    assert [rank.born_in for rank in run.ranks] == [0, 0, 1, 1]
    assert [event.message for event in run.of_kind(AttemptEnded)] == ["rank 3: killed by SIGKILL"]


def test_waiting_node_is_admitted_by_a_regroup(tmp_path: Path) -> None:
    run = two_nodes(tmp_path, max_nodes=3)

    def come() -> None:
        run.nodes.waits = True

    run.clock.after(0.5, come)
    run.run()
    assert run.states[:4] == ["Starting", "Running", "Draining", "Starting"]
    assert [(news.kind, news.cause) for news in run.nodes.told] == [("regroup", "resize")]


def test_slow_rank_is_replaced_among_several_nodes(tmp_path: Path) -> None:
    """Its node tells the others why they leave; rank 0, on one of them, holds the state."""

    def behave(rank: FakeRank) -> None:
        long(rank)
        rank.holds = False
        if on(rank, 3):
            rank.after(5.5 * STEP_S, is_slow, rank)

    run = two_nodes(tmp_path, behave, node_rank=1)
    run.run()
    (news,) = run.nodes.told
    assert (news.kind, news.cause, news.rank) == ("regroup", "slow", 3)
    assert [rank.born_as for rank in run.ranks] == [2, 3, 3]


def test_slow_rank_of_another_node_is_reported(tmp_path: Path) -> None:
    run = two_nodes(tmp_path, long)
    news = News(kind="regroup", message="rank 3 is slow", rank=3, cause="slow", **OTHER)
    run.nodes.say(news, after_s=0.5)
    run.run()
    (ended,) = run.of_kind(AttemptEnded)
    assert (ended.cause, ended.rank, ended.host, ended.message) == ("slow", 3, OTHER["host"], "rank 3 is slow")
    assert len(run.ranks) == 2


def test_resize_of_another_node_is_followed_while_starting(tmp_path: Path) -> None:
    """Its ranks run already, and it takes in a node that waits."""

    def behave(rank: FakeRank) -> None:
        if on(rank, 1):
            rank.after(2.0, long, rank)
        else:
            long(rank)

    run = two_nodes(tmp_path, behave)
    run.nodes.say(News(kind="regroup", message="a node waits to join", cause="resize", **OTHER), after_s=0.5)
    run.run()
    assert run.states[:3] == ["Starting", "Draining", "Starting"]
    assert isinstance(run.supervisor.state, Done)


def test_stop_on_another_node_stops_the_ranks_of_this_one(tmp_path: Path) -> None:
    run = two_nodes(tmp_path, saves_when_asked)
    run.nodes.say(News(kind="stopping", signal=signal.SIGINT, **OTHER), after_s=0.45)
    with pytest.raises(Stopped):
        run.run()
    assert [rank.code for rank in run.ranks] == [130, 130]
    assert run.nodes.left == [True]


@pytest.mark.parametrize("stopped", [True, False])
def test_wait_for_other_nodes_ends_on_stop_or_finished_run(tmp_path: Path, stopped: bool) -> None:
    """When the user stops it, or when the others have ended the run meanwhile."""
    run = two_nodes(tmp_path, disturbed(1, 3, FakeRank.dies))

    def away() -> None:
        run.nodes.stays_away = True

    run.clock.after(0.3, away)
    if stopped:
        interrupt(run, 10.0)
    else:
        run.clock.after(10.0, lambda: RunDir(tmp_path).history.write_text("{}"))
    with pytest.raises(Stopped if stopped else RunOver):
        run.run()
    assert isinstance(run.supervisor.state, GivenUp)
    assert all(rank.code is not None for rank in run.ranks)
