"""A run inside a trial: its ranks take the devices that the trial has booked, and Ray Tune hears of every epoch.

Ray has placed the trial and holds its devices for it. Ranks that asked for others would wait, where the trials hold
all that there is, for each other.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from distributed.core.env import trial_in_env
from distributed.core.events import EpochEnded, EventTail
from distributed.core.run_dir import RunDir
from distributed.launch.node.log_mirror import MirrorScreen
from distributed.launch.request import LaunchRequest


def is_ray_trial() -> bool:
    """Whether this process is a trial of Ray Tune, which has imported it then."""
    if "ray.tune" not in sys.modules:
        return False
    from ray.tune.trainable.trainable_fn_utils import _in_tune_session

    return bool(_in_tune_session())


def holds_ranks(request: LaunchRequest) -> bool:
    """Whether this process is a trial that has booked what the ranks need, on this machine."""
    if request.num_nodes > 1 or request.most_nodes > 1:
        return False
    if is_ray_trial():
        from ray import tune

        own = tune.get_context().get_trial_resources().bundles[0]  # the trial's own process; others may lie elsewhere
        return float(own.get("GPU" if request.device == "cuda" else "CPU", 0)) >= request.ranks_per_node
    return bool(trial_in_env()) and request.address is None  # a trial of our own search, which places it by devices


@dataclass
class TuneScreen:
    """A screen that also reports to Ray Tune, from the thread of the trial: where Tune ends it, `refresh` does not
    return, and the run ends with it."""

    screen: MirrorScreen | None
    run_dir: str

    def __post_init__(self) -> None:
        self._events = EventTail(RunDir(self.run_dir).events)

    def rank_line(self, rank: int, text: str) -> None:
        if self.screen is not None:
            self.screen.rank_line(rank, text)

    def unfinished_lines(self, lines: Mapping[int, str]) -> None:
        if self.screen is not None:
            self.screen.unfinished_lines(lines)

    def attempt_began(self, attempt: int) -> None:
        if self.screen is not None:
            self.screen.attempt_began(attempt)

    def refresh(self) -> None:
        from ray import tune

        if self.screen is not None:
            self.screen.refresh()
        for event in self._events.read():
            if isinstance(event, EpochEnded):
                tune.report({**event.metrics, "epoch": event.epoch + 1, "step": event.step})
