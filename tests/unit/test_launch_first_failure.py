"""Of several ranks that ended, the one that is shown is the one that began it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from distributed.core.protocol.failure import FailureRecord, is_collateral
from distributed.launch.supervise.aborts import aborted_record
from distributed.launch.supervise.first_failure import Ending, describe, failure_error, first_failure


def ending(
    rank: int, time: float, *, code: int = 1, collateral: bool = False, silent: bool = False, ours: bool = False
):
    record = FailureRecord(rank, "host", 1, time, "ValueError", "boom", "Traceback …", 7, collateral)
    return Ending(rank, code, time, f"rank-{rank}.log", None if silent else record, ours)


def early(rank: int, time: float) -> Ending:
    """It ended itself in the middle of our loop, as if all were well."""
    return Ending(rank, 0, time, "", early_at=7)


def outside(rank: int, time: float) -> Ending:
    """It ended well, and never came to our loop."""
    return Ending(rank, 0, time, "", in_loop=False)


@pytest.mark.parametrize(
    ("endings", "blamed"),
    [
        ([ending(0, 2.0), ending(1, 1.0)], 1),
        ([ending(0, 1.0, collateral=True), ending(1, 2.0)], 1),
        ([ending(0, 1.0, collateral=True), ending(1, 2.0, code=-9, silent=True)], 1),
        ([ending(0, 2.0, collateral=True), ending(1, 1.0, collateral=True)], 1),
        ([ending(0, 1.0, code=-15, silent=True, ours=True), ending(1, 2.0)], 1),
        ([ending(0, 1.0, code=0, silent=True)], None),
        ([ending(0, 1.0, code=0, silent=True), ending(1, 2.0, collateral=True)], 1),
        ([early(0, 2.0), ending(1, 1.0, collateral=True)], 0),
        ([early(0, 1.0), ending(1, 2.0)], 0),
        ([ending(0, 2.0, collateral=True), outside(1, 1.0)], 1),
        ([ending(0, 1.0, collateral=True), outside(1, 2.0)], 0),
        ([ending(0, 2.0), outside(1, 1.0)], 0),
        ([outside(0, 1.0), outside(1, 2.0)], None),
    ],
)
def test_first_failure_is_the_root_cause_not_collateral(endings, blamed):
    found = first_failure(endings)
    assert (found.rank if found else None) == blamed


def test_a_killed_rank_names_its_signal_and_its_log():
    error = failure_error(ending(2, 0.0, code=-signal.SIGKILL, silent=True), "n1")
    assert "SIGKILL" in str(error)
    assert "memory" in str(error)
    assert (error.rank, error.log_path, error.exit_code) == (2, "rank-2.log", 1)
    assert "SIGSEGV" in describe(ending(0, 0.0, code=-signal.SIGSEGV, silent=True))


def test_exit_code_is_that_of_the_ranks_error():
    assert failure_error(ending(0, 0.0), "n1").exit_code == 7


def test_exits_by_the_stop_signal_are_benign_only_while_stopping():
    for code in (0, 130, -signal.SIGINT):
        assert ending(0, 0.0, code=code, silent=True).is_benign(signal.SIGINT)
    assert ending(0, 0.0, code=-signal.SIGTERM, silent=True).is_benign(signal.SIGTERM)
    assert ending(0, 0.0, collateral=True).is_benign(signal.SIGINT)
    assert not ending(0, 0.0).is_benign(signal.SIGINT)
    assert not ending(0, 0.0, code=130, silent=True).is_benign(None)
    assert early(0, 0.0).is_benign(signal.SIGTERM)
    assert not early(0, 0.0).is_benign(None)


def test_an_error_raised_from_a_broken_connection_is_collateral():
    broken = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection reset by peer")
    wrapped = ValueError("all_reduce failed")
    wrapped.__cause__ = broken
    assert is_collateral(wrapped)
    told = ValueError("peer lost")
    told.collateral = True
    assert is_collateral(told)
    own = ValueError("bad batch")
    own.__context__ = broken  # merely raised later
    assert not is_collateral(own)


LAST_WORDS = """[rank1]:[E ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 1] {watchdog}: {words}
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] {watchdog}: {words}
more that it says
Fatal Python error: Aborted
"""
WATCHDOG = "Process group watchdog thread terminated with exception"


@pytest.mark.parametrize(
    ("words", "follows"),
    [
        ("CUDA error: device-side assert triggered", False),
        ("NCCL error: remote process exited or there was a network error, NCCL version 2.28.9", True),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)", True),
    ],
)
def test_rank_aborted_by_watchdog_is_blamed_only_for_gpu_errors(tmp_path: Path, words: str, follows: bool) -> None:
    (tmp_path / "log").write_text(LAST_WORDS.format(watchdog=WATCHDOG, words=words))
    record = aborted_record(str(tmp_path / "log"), rank=1, host="n1", pid=7, time=2.0)
    assert record is not None
    assert (record.message, record.collateral) == (words, follows)
    assert record.traceback.startswith("Fatal Python error")
    blamed = first_failure([Ending(1, -signal.SIGABRT, 2.0, "", record), ending(0, 3.0)])
    assert blamed is not None
    assert blamed.rank == (0 if follows else 1)


def test_abort_without_watchdog_message_has_no_record(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("step 1\nFatal Python error: Aborted\n")
    assert aborted_record(str(tmp_path / "log"), rank=1, host="n1", pid=7, time=2.0) is None
    assert aborted_record(str(tmp_path / "none"), rank=1, host="n1", pid=7, time=2.0) is None
