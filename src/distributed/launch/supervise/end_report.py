"""EndReport: how a world ended, written to the run's events once, by the first of its nodes that is left.

Node 0 writes it at once. If that is lost, the next node does, also while it waits for others at the rendezvous; if no
node knew that it was the first one, node 0 of the next world does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from distributed.core.events import AttemptEnded, Event, EventTail
from distributed.launch.rendezvous.nodes import Nodes
from distributed.launch.supervise.policy import Fault


@dataclass(kw_only=True)
class EndReport:
    """How a world ended, until it is written."""

    event: AttemptEnded
    nodes: Nodes
    since: EventTail | None  # the events since that world began, if other nodes write to them too
    emit: Callable[[Event], None]
    _is_written: bool = field(default=False, init=False)

    def write_if_first(self) -> None:
        """Called again and again while the nodes gather: one that was there may be found to be lost."""
        if not self._is_written and self.nodes.is_first():
            self.write()

    def write(self) -> None:
        """Unless a node did that is lost since, or that took this one to be lost."""
        if not self._is_written and not self._was_written_elsewhere():
            self.emit(self.event)
        self._is_written = True

    def _was_written_elsewhere(self) -> bool:
        events = self.since.read(AttemptEnded) if self.since is not None else []
        return any(isinstance(event, AttemptEnded) and event.attempt == self.event.attempt for event in events)


def end_of(attempt: int, fault: Fault, time: float) -> AttemptEnded:
    return AttemptEnded(
        time=time,
        attempt=attempt,
        cause=fault.kind,
        message=fault.message,
        rank=fault.rank,
        host=fault.host,
        step=fault.step,
    )
