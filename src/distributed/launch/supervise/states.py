"""The states of a run on one node: each carries its data, and `follow` is the only transition.

Starting ──▶ Running ──▶ Draining ──▶ Resizing ──▶ Starting …     other ranks, in order
    │           │            │
    ├───────────┼────────────┼──▶ Restarting ──▶ Starting …       something broke, and the run survives it
    │           │            │        ▲
    └───────────┴────────────┴──▶ Leaving ──▶ Done                all ranks of this node have ended
each but Done ──▶ GivenUp
"""

from __future__ import annotations

from dataclasses import dataclass

from distributed.launch.rendezvous.nodes import Round
from distributed.launch.supervise.policy import Fault
from distributed.launch.supervise.watch import Asked, Watch


@dataclass(frozen=True)
class Starting:
    """Ranks are started, or get their new world, and rendezvous."""

    watch: Watch


@dataclass(frozen=True)
class Running:
    """All ranks of this node have reached the training loop."""

    watch: Watch


@dataclass(frozen=True)
class Draining:
    """The ranks leave at a step that all agree on."""

    watch: Watch
    asked: Asked


@dataclass(frozen=True)
class Leaving:
    """All ranks of this node have ended; a rank of another node may still fail."""

    watch: Watch


@dataclass(frozen=True)
class Restarting:
    """A fault broke the world of this round; the remaining nodes rendezvous again."""

    fault: Fault
    round: Round
    broke_at: float  # on the clock of this node: the time after it is lost


@dataclass(frozen=True)
class Resizing:
    """The ranks have left the world of this round in order; the nodes rendezvous again."""

    fault: Fault
    round: Round
    broke_at: float


@dataclass(frozen=True)
class Done:
    """The run has ended well, or by a stop signal."""


@dataclass(frozen=True)
class GivenUp:
    """The run has ended with this error; ranks that still run are ended."""

    error: BaseException
    grace_s: float = 0.0  # from SIGTERM to SIGKILL for the ranks that are left


Unfinished = Starting | Running | Draining | Leaving | Restarting | Resizing
State = Unfinished | Done | GivenUp

_FOLLOWING: dict[type[State], tuple[type[State], ...]] = {
    Starting: (Running, Draining, Restarting, Leaving, GivenUp),  # Draining: requested by another node, whose ranks run
    Running: (Draining, Restarting, Leaving, GivenUp),
    Draining: (Resizing, Restarting, Leaving, GivenUp),
    Leaving: (Done, Restarting, GivenUp),
    Restarting: (Starting, GivenUp),
    Resizing: (Starting, GivenUp),
    Done: (),
    GivenUp: (),
}


def follow(state: State, after: State) -> State:
    """The next state; asserts that it may follow this one."""
    is_next = isinstance(after, _FOLLOWING[type(state)])
    assert is_next, f"{type(state).__name__} is not followed by {type(after).__name__}"
    return after
