"""Which faults are tried again, which are given up, and when a slot is left out."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from distributed.core.protocol.failure import FailureRecord
from distributed.launch.supervise.first_failure import Ending
from distributed.launch.supervise.policy import Fault, GiveUp, Restart, Shrink, classify, decide, signature

KILLED = -int(signal.SIGKILL)


def machine(
    step: int, slot: int = 0, *, rank: int = 0, host: str = "n1", code: int = -11, kind: str = "machine"
) -> Fault:
    return Fault(
        kind, rank=rank, host=host, step=step, message="killed by SIGSEGV", traceback="", exit_code=code, slot=slot
    )  # type: ignore[arg-type]


def hang(step: int, slot: int = 0) -> Fault:
    return machine(step, slot, kind="hang", code=KILLED)


def code(step: int, text: str = "boom", *, line: int = 3, exit_code: int = 1, rank: int = 0) -> Fault:
    trace = f'Traceback (most recent call last):\n  File "train.py", line {line}, in step\nValueError: {text}\n'
    return Fault(
        "code", rank=rank, host="n1", step=step, message=f"ValueError: {text}", traceback=trace, exit_code=exit_code
    )


def collateral(step: int) -> Fault:
    return Fault("collateral", 1, "n1", step, "CollectiveError: connection closed")


def resize(step: int) -> Fault:
    return Fault("resize", -1, "", step, "a node wants to join")


def decided(faults: list[Fault], **more: Any) -> Restart | Shrink | GiveUp:
    reached = max(fault.step for fault in faults)
    given = {"reached": reached, "max_restarts": None, "uses_trainer": True, "min_gpus": 2, "gpus": 2} | more
    return decide(faults, **given)


def apart(step: int, count: int) -> list[Fault]:
    """Machine faults of no one slot."""
    return [machine(step, slot) for slot in range(count)]


def record(
    kind: str = "ValueError", message: str = "boom", exit_code: int = 1, collateral: bool = False
) -> FailureRecord:
    return FailureRecord(2, "n7", 99, 1.0, kind, message, "Traceback …", exit_code, collateral)


@pytest.mark.parametrize(
    ("ending", "options", "kind"),
    [
        (Ending(2, -signal.SIGKILL, 1.0, ""), {}, "machine"),
        (Ending(2, -signal.SIGBUS, 1.0, ""), {}, "machine"),
        (Ending(2, -signal.SIGSEGV, 1.0, ""), {}, "machine"),
        (Ending(2, -signal.SIGTERM, 1.0, ""), {}, "machine"),
        (Ending(2, -signal.SIGTERM, 1.0, "", ended_by_us=True), {}, "collateral"),
        (Ending(2, -signal.SIGKILL, 1.0, "", ended_by_us=True), {"hung": True}, "hang"),
        (Ending(2, 3, 1.0, ""), {}, "machine"),
        (Ending(2, 0, 1.0, "", early_at=12), {}, "code"),
        (Ending(2, 1, 1.0, "", record()), {}, "code"),
        (Ending(2, 6, 1.0, "", record("NonFiniteLossError", "nan", 6)), {}, "code"),
        (Ending(2, 1, 1.0, "", record("MemoryError", "")), {}, "code"),
        (Ending(2, 1, 1.0, "", record("OutOfMemoryError", "CUDA out of memory.")), {}, "code"),
        (Ending(2, -signal.SIGKILL, 1.0, "", record()), {}, "code"),
        (
            Ending(2, 1, 1.0, "", record("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.")),
            {},
            "machine",
        ),
        (Ending(2, 1, 1.0, "", record("RuntimeError", "DataLoader worker (pid(s) 7) exited unexpectedly")), {}, "code"),
        (
            Ending(2, 1, 1.0, "", record("AcceleratorError", "CUDA error: uncorrectable ECC error encountered")),
            {},
            "machine",
        ),
        (Ending(2, 1, 1.0, "", record("AcceleratorError", "CUDA error: device-side assert triggered")), {}, "code"),
        (Ending(2, 1, 1.0, "", record("CollectiveError", collateral=True)), {}, "collateral"),
        (Ending(2, 1, 1.0, "", record("CollectiveError", collateral=True)), {"is_alone": True}, "machine"),
    ],
)
def test_classify_assigns_fault_kind_by_ending(ending: Ending, options: dict[str, bool], kind: str) -> None:
    fault = classify(ending, 12, "n1", slot=1, **options)
    assert (fault.kind, fault.rank, fault.step, fault.slot) == (kind, 2, 12, 1)
    assert fault.host == ("n7" if ending.record else "n1"), "the rank itself knows best where it was"
    assert fault.message


def test_fault_keeps_exit_code_and_traceback() -> None:
    failed = classify(Ending(2, 1, 1.0, "", record("ConfigError", "batch_size is 0", 2)), 0, "n1")
    assert (failed.exit_code, failed.traceback) == (2, "Traceback …")
    assert classify(Ending(2, KILLED, 1.0, ""), 0, "n1").exit_code == KILLED


@pytest.mark.parametrize(
    ("faults", "options", "expected"),
    [
        # machines: ten faults without a new step
        ([machine(0)], {}, Restart),
        (apart(40, 10), {}, Restart),
        (apart(40, 11), {}, GiveUp),
        ([*apart(40, 10), machine(41)], {}, Restart),
        ([*apart(40, 10), machine(41), *apart(30, 9)], {}, Restart),  # lower steps are no progress
        ([*apart(40, 10), machine(41), *apart(30, 10)], {}, GiveUp),
        (apart(40, 3), {"max_restarts": 3}, Restart),
        (apart(40, 4), {"max_restarts": 3}, GiveUp),
        ([machine(40)], {"max_restarts": 0}, GiveUp),
        (apart(-1, 10), {"reached": 0}, Restart),
        (apart(-1, 11), {"reached": 500}, GiveUp),  # a step that nobody knows is no progress
        # scripts without the Trainer
        ([machine(-1)], {"uses_trainer": False, "reached": 0}, GiveUp),
        ([machine(-1)], {"uses_trainer": False, "reached": 0, "max_restarts": 1}, Restart),
        ([code(-1)], {"uses_trainer": False, "reached": 0}, GiveUp),
        ([code(-1)], {"uses_trainer": False, "reached": 0, "max_restarts": 5}, Restart),
        ([code(-1), code(-1)], {"uses_trainer": False, "reached": 0, "max_restarts": 5}, GiveUp),
        # our own errors
        *[([code(40, exit_code=number)], {}, GiveUp) for number in (2, 3, 4, 5, 6)],
        ([code(40, exit_code=7)], {}, Restart),
        # exceptions
        ([code(0)], {}, GiveUp),
        ([code(-1)], {"reached": 0}, GiveUp),
        ([code(-1)], {"reached": 9}, Restart),
        ([machine(3), code(0)], {}, Restart),  # it has worked before
        ([code(40)], {}, Restart),
        ([code(40), code(40)], {}, GiveUp),
        ([code(40), code(40, rank=1)], {}, GiveUp),
        ([code(40), machine(40), code(40)], {}, GiveUp),
        ([code(40), code(39)], {}, Restart),
        ([code(40), code(41)], {}, Restart),
        ([code(40), machine(60), code(40)], {}, Restart),  # it got past it once
        ([code(40), code(40, "bang")], {}, Restart),
        ([code(40), code(40, line=4)], {}, Restart),
        ([code(40, str(n) * 3) for n in range(3)], {}, Restart),
        ([code(40, str(n) * 3) for n in range(4)], {}, GiveUp),
        ([code(40, "a"), code(40, "b"), code(40, "c"), machine(50), code(50, "d")], {}, Restart),
        ([code(40, "a"), code(40, "b")], {"max_restarts": 1}, GiveUp),
        ([code(40, "a")], {"max_restarts": 0}, GiveUp),
        ([code(40), machine(40, 1)], {}, Restart),
        # what is nobody's fault
        ([resize(40)], {"max_restarts": 0}, Restart),
        ([collateral(40)], {"max_restarts": 0}, Restart),
        ([*apart(40, 10), *[resize(40), collateral(40)] * 5], {}, Restart),
        ([*apart(40, 10), *[resize(40), collateral(40)] * 5, machine(40)], {}, GiveUp),
        ([*apart(40, 10), resize(41), machine(41)], {}, Restart),  # but shows how far the run came
        # a slot
        ([machine(40, 1)] * 2, {"min_gpus": 1}, Restart),
        ([machine(40, 1)] * 3, {"min_gpus": 1}, Shrink),
        ([machine(40, 1), hang(40, 1), machine(40, 1)], {"min_gpus": 1}, Shrink),
        ([machine(40, 1), collateral(40), resize(40), machine(40, 1), machine(40, 1)], {"min_gpus": 1}, Shrink),
        ([machine(40, 1)] * 3, {"min_gpus": 2}, Restart),
        ([machine(40, 1)] * 3, {"min_gpus": 7, "gpus": 8}, Shrink),
        ([machine(40, 1), machine(40, 0), machine(40, 1), machine(40, 1)], {"min_gpus": 1}, Restart),
        ([machine(40, 1), machine(40, 1, host="n2"), machine(40, 1)], {"min_gpus": 1}, Restart),
        ([machine(40, 1), code(40), machine(40, 1), machine(40, 1)], {"min_gpus": 1}, Restart),
        ([machine(40, 1), machine(40, 1), machine(41, 1)], {"min_gpus": 1}, Restart),
        ([machine(40, -1)] * 3, {"min_gpus": 1}, Restart),
        ([machine(40, 1)] * 3, {"min_gpus": 1, "max_restarts": 2}, GiveUp),
    ],
)
def test_decide_restarts_shrinks_or_gives_up_by_fault_history(
    faults: list[Fault], options: dict[str, Any], expected: type
) -> None:
    found = decided(faults, **options)
    assert type(found) is expected, found
    assert found.reason


def test_shrink_names_the_excluded_slot_and_host() -> None:
    found = decided([machine(40, 5, rank=13, host="n2")] * 3, min_gpus=1, gpus=8)
    assert isinstance(found, Shrink)
    assert found.slot == 5
    assert "n2" in found.reason


def test_decision_reasons_name_step_and_setting() -> None:
    assert "same error at the same step twice" in decided([code(40)] * 2).reason
    assert "40" in decided([code(40)] * 2).reason
    assert "max_restarts=3" in decided(apart(40, 4), max_restarts=3).reason
    assert "max_restarts" in decided([machine(-1)], uses_trainer=False).reason
    assert "min_gpus=2" in decided([machine(40, 1)] * 3).reason


@pytest.mark.parametrize(
    ("faults", "hints"),
    [
        ([machine(40, code=KILLED)] * 3, True),
        ([machine(40, code=KILLED)] * 2, False),
        ([machine(40)] * 3, False),
        ([machine(40, code=KILLED), machine(39, code=KILLED), machine(40, code=KILLED)], False),
        ([machine(40, code=KILLED, rank=rank) for rank in range(3)], False),
        ([hang(40)] * 3, False),  # that was us
    ],
)
def test_rank_killed_thrice_at_one_step_hints_at_memory(faults: list[Fault], hints: bool) -> None:
    for options in ({}, {"min_gpus": 1}, {"max_restarts": 1}):
        assert ("memory" in decided(faults, **options).reason) == hints


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("at 0x7ffc01 in f", "at 0x55ab in f", True),
        ("worker process 12 died", "worker process 977 died", True),
        ("pid 12", "pid 13", True),
        ("(pid(s) 12, 14)", "(pid(s) 3, 4)", True),
        ("cannot bind port 4242", "cannot bind port 4243", True),
        ("no answer from [127.0.0.1]:4242", "no answer from [127.0.0.1]:977", True),
        ("no answer from n1:4242", "no answer from n1:977", True),
        ("index 12 is out of bounds", "index 13 is out of bounds", False),
        ("shape [2, 3]", "shape [2, 4]", False),
        (
            "CUDA out of memory. Tried to allocate 2.50 GiB; 1.1 GiB is free",
            "CUDA out of memory. Tried to allocate 3 GiB; 0 GiB is free",
            True,
        ),
    ],
)
def test_same_error_is_recognised_despite_varying_numbers(one: str, two: str, same: bool) -> None:
    assert (signature(code(5, one)) == signature(code(5, two))) == same
    assert (type(decided([code(5, one), code(5, two)])) is GiveUp) == same


def test_out_of_memory_at_another_line_is_a_different_error() -> None:
    one = code(5, "CUDA out of memory. Tried to allocate 2 GiB")
    assert signature(one) != signature(code(5, "CUDA out of memory. Tried to allocate 2 GiB", line=4))
    assert signature(replace(one, traceback="")) == signature(replace(one, traceback="", rank=3))
