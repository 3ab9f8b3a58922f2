"""An orderly end: all ranks agree on a step, finish it and stop, so that nothing trained is lost.

It is asked for by a signal, which ends the run, or by the launcher, which wants the ranks in another world.

After a signal each rank says so in the store and continues to train; once all have, rank 0 names a step two ahead, or
more where ranks may be further apart. No rank waits for another, because one that waits outside a collective would hang
one that waits inside.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from distributed.runtime.signals import STOP_SIGNALS, StopSignals

_AHEAD = 2  # ranks that synchronize after every step are at most one step apart


@contextmanager
def defer_signals_to_launcher() -> Iterator[None]:
    """Between two worlds a rank cannot save: a signal that reaches it there is ignored. Its launcher gets the same one,
    and passes it on when there is a world again."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS} if is_main else {}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopRequest(StopSignals):
    """Whether a stop of this run was requested, and at which step it will end."""

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        store: dist.Store | None = None,
        asked_to_leave: Callable[[], bool] = lambda: False,
        named: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
        *,
        is_supervised: bool = False,
        apart: int = 0,
    ) -> None:
        """`apart`: steps by which ranks may be apart although none waits in a collective for another."""
        super().__init__(is_supervised=is_supervised)
        self._rank, self._world_size, self._store = rank, world_size, store
        self._asked_to_leave, self._named = asked_to_leave, named
        self._stop_at: int | None = None
        self._is_over = False  # the step that all agreed on is done
        self._has_asked, self._ahead = False, _AHEAD + apart
        self.is_leaving = False  # the ranks stop in order to continue in another world

    @property
    def is_agreed(self) -> bool:
        """Whether the run has ended before its time: the same on every rank, though one may know it sooner."""
        return self._is_over and not self.is_leaving

    def hear(self) -> None:
        """A signal may have reached another rank only; asked now and then, since it costs a message."""
        if self._store is not None and self._world_size > 1 and self.received is None:
            with self._named("whether to stop"):
                if self._store.check(["stop/asked"]):
                    self.received = signal.SIGTERM
                elif self._store.check(["stop/leave"]):
                    self.is_leaving = True

    def end_here(self) -> None:
        """All ranks have learnt at this step that one of them got a signal, and end."""
        if self.received is None:
            self.received = signal.SIGTERM
        self._is_over, self.is_leaving = True, False

    def due(self, step: int) -> bool:
        """Whether the run or this world ends here, after `step` steps. Costs a look at two attributes until then."""
        if self.received is None and not self.is_leaving:
            if not self._asked_to_leave():
                return False
            self.is_leaving = True
        if self._store is None or self._world_size == 1:
            self._stop_at, self.is_leaving, self._is_over = step, self.received is None, True
            return True
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # else the hosts may be many steps apart
        if not self._has_asked:
            self._store.set(f"stop/{self._rank}", "asked")
            self._store.set("stop/leave" if self.received is None else "stop/asked", "asked")
            self._has_asked = True
        if (
            self._stop_at is None
            and self._rank == 0
            and self._store.check([f"stop/{r}" for r in range(self._world_size)])
        ):
            kind = "leave" if self.received is None else "stop"
            self._store.set("stop/at", f"{kind} {step + self._ahead}")
        if self._stop_at is None and self._store.check(["stop/at"]):
            kind, _, at = self._store.get("stop/at").decode().partition(" ")
            self._stop_at, self.is_leaving = int(at), kind == "leave"
        self._is_over = self._stop_at is not None and step >= self._stop_at
        return self._is_over
