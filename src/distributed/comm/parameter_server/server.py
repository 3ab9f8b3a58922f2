"""ServerSide: the rank that collects the gradients of a step from all others, and sends them what it has made of them.

    worker r:  gradients 0, 1, 2 …      at most `max_staleness` steps after the newest parameters that it has
    server:    gradients k of all ──▶ update k ──▶ parameters k+1, to all

A worker's gradients of steps that the server has not come to wait in the worker's memory. Parameters wait in the
server's until each worker has taken them, which its own gradients bound: there are at most `max_staleness` + 2 of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from distributed.comm.parameter_server.messages import MessageLayout, TensorMessage, Work
from distributed.runtime.session import Session


class ServerSide:
    """Of one world; versions of parameters count its updates, from 0 on."""

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
        """`tag`: of these messages alone, so that others between the same ranks are not taken for them."""
        self._tag = tag
        self._session, self._max_staleness, self._deadline = session, max_staleness, timedelta(seconds=timeout_s)
        self._workers = range(1, session.world_size)
        self._parameters = parameters
        self._received = {rank: gradients.make() for rank in self._workers}
        self._posted: dict[int, Work] = {}
        self._sent: deque[tuple[TensorMessage, list[Work]]] = deque()

    def begin_step(self) -> None:
        """Let the workers' gradients come in while this rank computes its own."""
        with self._session.named("gradients of the workers"):
            for rank in self._workers:
                self._posted[rank] = dist.irecv(self._received[rank].bytes, rank, tag=self._tag)

    def take(self, rank: int, step: int) -> tuple[list[float], list[torch.Tensor | None]]:
        """A worker's gradients of the step, once they are there; the first two numbers are its step and version."""
        with self._session.named(f"gradients of rank {rank}"):
            self._posted.pop(rank).wait(self._deadline)
        numbers, tensors = self._received[rank].read()
        if numbers[0] != step or not 0 <= step - numbers[1] <= self._max_staleness:
            raise RuntimeError(
                f"rank {rank} sent gradients of step {numbers[0]:g} at parameters {numbers[1]:g} in step {step}, with "
                f"max_staleness={self._max_staleness}"
            )
        return numbers, tensors

    def publish(self, version: int, parameters: Sequence[torch.Tensor]) -> None:
        """Send every worker the parameters after an update, which may change again while they are on their way."""
        message = self._free()
        message.fill([version], parameters)
        with self._session.named("parameters to the workers"):
            works = [dist.isend(message.bytes, rank, tag=self._tag) for rank in self._workers]
        self._sent.append((message, works))

    def _free(self) -> TensorMessage:
        """Memory for a message: of the oldest one, which every worker has if it has sent gradients since."""
        if len(self._sent) <= self._max_staleness + 1:
            return self._parameters.make()
        return self._delivered()

    def settle(self) -> None:
        """Until every worker has the newest parameters."""
        while self._sent:
            self._delivered()

    def _delivered(self) -> TensorMessage:
        """The oldest message that was sent, once all have it."""
        message, works = self._sent.popleft()
        for rank, work in zip(self._workers, works, strict=True):
            with self._session.named(f"parameters to rank {rank}"):
                work.wait(self._deadline)
        return message
