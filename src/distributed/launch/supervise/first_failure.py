"""The first failure: from the endings of a node's ranks to the one that is reported. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from distributed.core.errors import CannotGoOnError, RankFailedError
from distributed.core.protocol.failure import FailureRecord


@dataclass(frozen=True)
class Ending:
    """How one rank ended; `time` is when it reported that, or else when its launcher noticed."""

    rank: int
    code: int  # as subprocess has it: negative for a signal
    time: float
    log_path: str
    record: FailureRecord | None = None
    ended_by_us: bool = False
    early_at: int | None = None  # the last step of a rank that exited with code 0 before the run was over
    in_loop: bool = True  # False: it never reached the training loop, so its right time to end is unknown

    @property
    def is_early(self) -> bool:
        """Whether the rank exited with code 0 before the run was over."""
        return self.code == 0 and self.early_at is not None

    @property
    def is_collateral(self) -> bool:
        return self.record is not None and self.record.collateral

    @property
    def cannot_go_on(self) -> bool:
        """Whether the rank exited after its world broke, so that its replacement starts without its state."""
        return self.record is not None and self.record.exit_code == CannotGoOnError.exit_code

    def is_benign(self, stopping_with: int | None) -> bool:
        """Whether a rank ended well, or by the signal that stops the run."""
        if stopping_with is None:
            return self.code == 0 and not self.is_early
        if self.code == 0:
            return True
        asked = {130, 128 + stopping_with, -stopping_with, -signal.SIGINT}
        return self.code in asked or self.ended_by_us or self.is_collateral


def first_failure(endings: Iterable[Ending]) -> Ending | None:
    """The earliest rank that failed by its own fault; one with a broken connection only if there is no other.

    If only connections broke, a rank that had exited with code 0 before broke them.
    """
    known = [ending for ending in endings if not ending.ended_by_us]
    failed = [ending for ending in known if ending.code != 0 or ending.is_early]
    first = min(failed, key=lambda ending: (ending.is_collateral, ending.time, ending.rank), default=None)
    if first is None or not first.is_collateral:
        return first
    left = [ending for ending in known if ending.code == 0 and not ending.in_loop and ending.time <= first.time]
    return min(left, key=lambda ending: (ending.time, ending.rank), default=first)


_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "; the kernel does that when memory runs out",
    signal.SIGBUS: "; a full /dev/shm can do that",
    signal.SIGILL: "; on a virtual machine that shows AMX without tiles, ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 helps",
}


def describe(ending: Ending) -> str:
    """The failure in one line.

    >>> describe(Ending(rank=1, code=-9, time=0.0, log_path=""))
    'killed by SIGKILL; the kernel does that when memory runs out'
    """
    if ending.record is not None:
        return f"{ending.record.type}: {ending.record.message}"
    if ending.early_at is not None and ending.code == 0:
        after = f"after step {ending.early_at}" if ending.early_at > 0 else "before its first step was done"
        return f"the program ended this rank with exit code 0 {after}, before training was over"
    if ending.code == 0:
        return "the program ended this rank with exit code 0 while others still worked with it"
    if ending.code < 0:
        try:
            name = signal.Signals(-ending.code).name
        except ValueError:
            name = f"signal {-ending.code}"
        return f"killed by {name}{_SIGNAL_HINTS.get(-ending.code, '')}"
    return f"ended with exit code {ending.code} and left no error"


def failure_error(ending: Ending, host: str, crash: str = "", *, message: str = "", why: str = "") -> RankFailedError:
    """The one error of a failed run that the user sees."""
    record = ending.record
    return RankFailedError(
        f"rank {ending.rank} (on {host}) failed: {message or describe(ending)}",
        why=why,
        rank=ending.rank,
        traceback=record.traceback if record else crash,
        log_path=ending.log_path,
        exit_code=record.exit_code if record else 1,
    )
