"""WorkerSide: a rank that sends its gradients to the server, and continues with the newest parameters that it has got.

A thread takes the parameters as they come, so that they are there when a step ends, and no step waits for those that
it can do without. It asks for as many as the server owes for the gradients that it was sent, and no more: nothing waits
while the ranks evaluate or save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from distributed.comm.parameter_server.messages import MessageLayout, Work
from distributed.runtime.session import Session

_END_S = 0.5  # for the thread to end; one that still waits ends with its process, or with the group


class WorkerSide:
    """Of one world; `close` ends its thread."""

    version = 0  # of the parameters that were taken last

    def __init__(
        self,
        session: Session,
        gradients: MessageLayout,
        parameters: MessageLayout,
        *,
        max_staleness: int,
        timeout_s: float,
        tag: int,
    ) -> None:
        """`tag`: as the server's."""
        self._tag = tag
        self._session, self._timeout_s, self._deadline = session, timeout_s, timedelta(seconds=timeout_s)
        self._outgoing = [gradients.make() for _ in range(max_staleness + 1)]
        self._works: list[Work | None] = [None] * len(self._outgoing)
        self._newest, self._spare = parameters.make(), parameters.make()
        self._received = 0  # the version of the newest
        self._failed: Exception | None = None
        self._changed = threading.Condition()
        self._owed: SimpleQueue[int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._take_all, name="parameters of rank 0", daemon=True)
        self._thread.start()

    def push(self, step: int, numbers: Sequence[float], gradients: Sequence[torch.Tensor | None]) -> None:
        """Send the gradients of a step, with its number, the version that they were computed at, and more numbers."""
        slot = step % len(self._outgoing)
        before = self._works[slot]
        with self._session.named("gradients to rank 0"):
            if before is not None:  # it has arrived: parameters that were made of it did
                before.wait(self._deadline)
            self._outgoing[slot].fill([step, self.version, *numbers], gradients)
            self._works[slot] = dist.isend(self._outgoing[slot].bytes, 0, tag=self._tag)
        self._owed.put(step + 1)

    def take(self, at_least: int, into: Sequence[torch.Tensor]) -> None:
        """The newest parameters, once they are of this version or a later one."""
        with self._session.named("parameters of rank 0"), self._changed:
            until = time.monotonic() + self._timeout_s
            while self._received < at_least and self._failed is None:
                if not self._changed.wait(until - time.monotonic()):
                    raise RuntimeError(
                        f"rank 0 has not sent the parameters of update {at_least} within {self._timeout_s:g} s; rank "
                        f"{self._session.rank} has those of update {self._received}"
                    )
            if self._failed is not None:
                raise self._failed
            if self._received > self.version:
                with torch.no_grad():
                    for own, tensor in zip(into, self._newest.tensors, strict=True):
                        own.copy_(tensor)
                self.version = self._received

    def close(self) -> None:
        self._owed.put(None)
        self._thread.join(_END_S)

    def _take_all(self) -> None:
        """Receive what the server owes, until the end or the first failure, which whoever waits raises."""
        while (version := self._owed.get()) is not None:
            try:
                work: Work = dist.irecv(self._spare.bytes, 0, tag=self._tag)
                work.wait(self._deadline)
                if self._spare.numbers.item() != version:
                    raise RuntimeError(f"rank 0 sent parameters {self._spare.numbers.item():g} in place of {version}")
            except Exception as failed:  # noqa: BLE001 - the boundary of a thread: raised in the one that waits
                with self._changed:
                    self._failed = failed
                    self._changed.notify_all()
                return
            with self._changed:
                self._newest, self._spare = self._spare, self._newest
                self._received = version
                self._changed.notify_all()
