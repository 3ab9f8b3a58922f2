"""The kind of a fault and the decision on it: restart, shrink by a slot, or give up. Pure: no clock, no I/O.

A machine that fails can be replaced, so its faults have a budget that every new step renews. A program that fails
in the same way at the same step will always do so, so it is not restarted again.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from distributed.launch.supervise.first_failure import Ending, describe

Kind = Literal["machine", "code", "hang", "resize", "slow", "collateral"]

MAX_RESTARTS = 10  # faults in a row without a new step, if max_restarts is not set
_CODE_RESTARTS = 3  # of them, exceptions of the program that differ
_SLOT_FAULTS = 3  # faults in a row of one slot that are blamed on the slot
_OWN_ERRORS = range(2, 7)  # exit codes of DistributedError's kinds: a restart would not help

# Exceptions by which Python reports a fault of the machine.
_MACHINE_ERROR = re.compile(
    r"DataLoader worker \(pid[^)]*\) is killed by signal"
    r"|uncorrectable (ECC|NVLink) error|fallen off the bus|hardware stack error",
    re.IGNORECASE,
)
_MEMORY_ERROR = re.compile(r"(?:\w+\.)*(MemoryError|OutOfMemoryError)\b|CUDA out of memory")
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "")
_FRAME = re.compile(r"^\s*File \"")
_PASSING = (  # what differs between two occurrences of one error
    (re.compile(r"0x[0-9a-fA-F]+"), "0x…"),
    (re.compile(r"\b(pids?|pid\(s\)|process|worker|thread|port)(\W{1,3})\d+(, \d+)*", re.IGNORECASE), r"\1\2…"),
    (re.compile(r"(?<=[\w\]]):\d{2,5}\b"), ":…"),  # host:port
)


@dataclass(frozen=True)
class Fault:
    """One event that broke the world, or that was noticed when it broke."""

    kind: Kind
    rank: int
    host: str
    step: int  # the last finished step; -1: unknown
    message: str
    traceback: str = ""
    exit_code: int = 1  # as subprocess has it, negative for a signal; of a code fault, that of the error
    slot: int = -1  # the device of its host, by a number that stays when other slots are excluded; -1: unknown
    is_after: bool = False  # training had ended before the fault


@dataclass(frozen=True)
class Restart:
    reason: str


@dataclass(frozen=True)
class Shrink:
    """Continue without this slot of the host that failed last."""

    slot: int
    reason: str


@dataclass(frozen=True)
class GiveUp:
    reason: str


def classify(
    ending: Ending,
    step: int,
    host: str,
    *,
    slot: int = -1,
    hung: bool = False,
    is_alone: bool = False,
    is_after: bool = False,
) -> Fault:
    """The fault behind the ending of a rank.

    `hung`: the rank was ended because it made no step within its deadline. `is_alone`: every rank ended by a broken
    connection, so the cause is the connection itself or a lost node.

    >>> classify(Ending(rank=1, code=-9, time=0.0, log_path=""), step=7, host="n1").kind
    'machine'
    """
    record = ending.record
    kind: Kind
    if hung:
        kind = "hang"
    elif ending.ended_by_us:
        kind = "collateral"
    elif ending.is_collateral:
        kind = "machine" if is_alone else "collateral"
    elif ending.code == 0:  # no machine ends a process well
        kind = "code"
    elif record is None or _MACHINE_ERROR.search(record.message):
        kind = "machine"
    else:
        kind = "code"
    return Fault(
        kind=kind,
        rank=ending.rank,
        host=record.host if record else host,
        step=step,
        message="made no step within its deadline" if hung else describe(ending),
        traceback=record.traceback if record else "",
        exit_code=record.exit_code if record and kind == "code" else ending.code,
        slot=slot,
        is_after=is_after,
    )


def decide(
    faults: Sequence[Fault],
    *,
    reached: int,
    max_restarts: int | None,
    uses_trainer: bool,
    min_gpus: int,
    gpus: int,
) -> Restart | Shrink | GiveUp:
    """The decision after the last of a run's faults, which are in order, one root cause per attempt.

    `reached` is the highest step that the run is known to have finished, 0 for none. `max_restarts=None` is the
    default. `gpus` and `min_gpus` are those of the host that failed last. A fault whose step is -1 never counts as
    progress: if the failing rank's step is unknown, pass the highest step of the ranks.

    >>> lost = Fault("machine", rank=1, host="n1", step=40, message="killed by SIGKILL", exit_code=-9)
    >>> decide([lost], reached=40, max_restarts=None, uses_trainer=True, min_gpus=2, gpus=2)
    Restart(reason='fault 1 of at most 10 without a new step')
    """
    row = _since_progress(faults)
    if not row or row[-1].kind == "resize":
        return Restart("the number of ranks changes" if row else "no fault of these ranks")
    last = row[-1]
    counted = [fault for fault in row if fault.kind != "resize"]
    allowed = max_restarts if max_restarts is not None else MAX_RESTARTS if uses_trainer else 0
    if last.kind == "code":
        hopeless = _hopeless(counted, max(reached, *(fault.step for fault in faults)), uses_trainer)
        if hopeless:
            return GiveUp(hopeless)
    hint = _memory_hint(counted)
    if len(counted) > allowed:
        return GiveUp(_spent(len(counted), allowed, max_restarts is None and not uses_trainer) + hint)
    reason = f"fault {len(counted)} of at most {allowed} without a new step{hint}"
    if _is_the_slots(counted):
        where = f"slot {last.slot} of {last.host} failed {_SLOT_FAULTS} times in a row"
        if gpus - 1 >= min_gpus:
            return Shrink(last.slot, f"{where} without a new step{hint}")
        return Restart(f"{reason}; {where}, but min_gpus={min_gpus} allows no smaller number of slots")
    return Restart(reason)


def _since_progress(faults: Sequence[Fault]) -> list[Fault]:
    """The faults since the last new step of the run, without collateral ones."""
    row: list[Fault] = []
    highest = -1
    for fault in faults:
        if fault.step > highest:
            row, highest = [], fault.step
        if fault.kind != "collateral":
            row.append(fault)
    return row


def _hopeless(counted: Sequence[Fault], reached: int, uses_trainer: bool) -> str:
    """Why another attempt would fail as the last one did; empty if it might not."""
    last = counted[-1]
    if last.exit_code in _OWN_ERRORS:
        return "another attempt would fail with the same error"
    if last.is_after:
        return "the program failed after its training had ended, and would do so again"
    if uses_trainer and reached <= 0:
        return "the program failed before its first step, so nothing shows that it ever worked"
    errors = [fault for fault in counted if fault.kind == "code"]
    earlier = [fault for fault in errors[:-1] if fault.step == last.step]
    if any(signature(fault) == signature(last) for fault in earlier):
        return "the same error twice" if last.step < 0 else f"the same error at the same step twice (step {last.step})"
    if len(errors) > _CODE_RESTARTS:
        return f"{len(errors)} errors of the program without a new step; {_CODE_RESTARTS} are let pass"
    return ""


def signature(fault: Fault) -> str:
    """An error's type, message and frames, without what differs each time: addresses, processes, ports.

    >>> signature(Fault("code", 0, "n1", 5, "OSError: <Socket at 0x7f31> of pid 4242"))
    'OSError: <Socket at 0x…> of pid …'
    """
    text = _without_ours(fault.traceback) or fault.message
    for pattern, stand_in in _PASSING:
        text = pattern.sub(stand_in, text)
    if _MEMORY_ERROR.search(fault.message):  # how much was asked for and free is never twice the same
        lines = (line if _FRAME.match(line) else re.sub(r"\d+(\.\d+)?", "…", line) for line in text.splitlines())
        text = "\n".join(lines)
    return text


def _without_ours(traceback: str) -> str:
    """The traceback without this library's frames, which differ between the first step of a world and later ones."""
    kept: list[str] = []
    is_ours = False
    for line in traceback.splitlines():
        if _FRAME.match(line):
            is_ours = _OURS in line
        elif not line.startswith(" "):
            is_ours = False
        if not is_ours:
            kept.append(line)
    return "\n".join(kept)


def _spent(faults: int, allowed: int, is_script: bool) -> str:
    if is_script:
        return "a script that does not use the Trainer is not started again unless max_restarts is set"
    return f"{faults} fault{'s' * (faults > 1)} in a row without a new step [max_restarts={allowed}]"


def _is_the_slots(counted: Sequence[Fault]) -> bool:
    last = counted[-_SLOT_FAULTS:]
    places = {(fault.host, fault.slot) for fault in last}
    of_machine = all(fault.kind in ("machine", "hang") for fault in last)
    return len(last) == _SLOT_FAULTS and of_machine and len(places) == 1 and last[-1].slot >= 0


def _memory_hint(counted: Sequence[Fault]) -> str:
    last = counted[-1]
    killed = [
        fault
        for fault in counted
        if fault.kind == "machine"
        and (fault.rank, fault.step, fault.exit_code) == (last.rank, last.step, -signal.SIGKILL)
    ]
    if last.exit_code != -signal.SIGKILL or len(killed) < _SLOT_FAULTS:
        return ""
    at = f" at step {last.step}" if last.step >= 0 else ""
    return (
        f"; rank {last.rank} was killed{at} {len(killed)} times: its host's memory is the likely reason"
        " (look for 'oom-kill' in dmesg; fewer data loader workers or a smaller batch need less)"
    )
