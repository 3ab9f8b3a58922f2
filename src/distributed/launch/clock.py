"""Clock and Timings: the time that a launcher reads, and its timeouts; both are passed in."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Clock:
    """The machine's clock; a test passes one whose time it sets."""

    def monotonic(self) -> float:
        return time.monotonic()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def time(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, lines: Sequence[HasFileno], seconds: float) -> None:
        """Wait until one of these connections is readable, or the timeout is over."""
        poll = select.poll()  # unlike select, for any number of open files: the store has a connection for each rank
        for line in lines:
            poll.register(line.fileno(), select.POLLIN)
        poll.poll(seconds * 1000)


@dataclass(frozen=True, kw_only=True)
class Timings:
    """The timeouts and intervals of a supervisor, in seconds."""

    poll_s: float = 0.1  # between polls if nothing happens; a rank's message or exit wakes the supervisor at once
    unwatched_poll_s: float = 0.02  # between polls where no event reports that a rank has ended
    notice_s: float = 0.2  # a death without a message happened up to this long before it is noticed
    news_every_s: float = 0.1
    resize_every_s: float = 0.5  # between checks for a resize request
    root_cause_s: float = 0.5  # wait for failures at nearly the same time
    collateral_s: float = 4.0  # wait for a root cause if only broken connections were reported
    lost_s: float = 1.0  # wait for another node to report why the world broke
    close_s: float = 2.0  # from `Close` to the answer of a rank, whose listener has nothing else to do
    rest_s: float = 30.0  # from `Leave` to a rank's `Lost`, if it has a gate; else the others would wait for it
    dump_s: float = 0.5  # wait for the flight recorders of ranks if one of them hangs
    memory_s: float = 1.0  # wait for the memory reports of the other ranks on a GPU that is out of memory
    exit_s: float = 5.0  # from a rank's failure file to its exit; after that it hangs in its own clean-up
    terminate_s: float = 2.0  # from SIGTERM to SIGKILL
    settle_s: float = 30.0  # wait for a starting world before it is stopped all the same
