"""Proven: where a run stands on its device, when its world broke while the host was ahead.

What the host counts and schedules for steps that the device has not taken is taken back: to the last step for which
the host has waited, and from there forward, as all of it is a function of the steps.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from distributed.runtime.step_gate import StepGate
from distributed.train.schedule import Schedule


class Proven:
    """`mark` costs a launch, and a copy of the schedule's state where that is the user's; without a gate, nothing."""

    def __init__(self, gate: StepGate | None, schedule: Schedule, optimizer: torch.optim.Optimizer) -> None:
        self._gate, self._schedule, self._optimizer = gate, schedule, optimizer
        self._step = 0
        self._state: dict[str, Any] = {}
        self._options: list[dict[str, Any]] = []

    def mark(self, step: int) -> None:
        """The host has waited for the device, which has taken every step up to this one."""
        if self._gate is None:
            return
        self._gate.restart()
        self._step = step
        if self._schedule.name:
            self._state = copy.deepcopy(self._schedule.state())
            self._options = [
                copy.deepcopy({name: value for name, value in group.items() if name != "params"})
                for group in self._optimizer.param_groups
            ]

    def steps_behind(self, step: int) -> int | None:
        """How many steps fewer than the host the device has taken, which has come to rest. None: it is ahead."""
        if self._gate is None:
            return 0
        behind = self._gate.find_behind(step - self._step)
        return behind if behind >= 0 else None

    def go_back(self, step: int) -> None:
        """Schedule and rates as they were after this step."""
        if self._schedule.name:
            for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
                group.update(options)
            self._schedule.load_state(self._state, self._step)
            for number in range(self._step + 1, step + 1):
                self._schedule.step_ended(number)
        else:
            self._schedule.step_ended(step)
