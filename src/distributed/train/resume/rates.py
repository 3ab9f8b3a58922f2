"""A resumed run that keeps its own learning rate, weight decay and the like instead of those of the checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from distributed.train.schedule import OF_OPTIMIZERS, Schedule

_BASES = ("peaks", "base_lrs")  # of our schedules, and of torch's


class OwnRates:
    """Made before the state is loaded; `put_back` after that. How far a schedule has come stays the checkpoint's."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        self._groups = [_numbers(group) for group in optimizer.param_groups]
        self._bases = _bases_of(schedule.state())

    def put_back(self, step: int) -> None:
        for group, own in zip(self._optimizer.param_groups, self._groups, strict=True):
            decayed = group["lr"] / _base(group) if _base(group) else 1.0
            group.update(own)
            group["lr"] = _base(own) * decayed
        self._schedule.load_state(_with_bases(self._schedule.state(), self._bases), step)


def _bases_of(state: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in state.items() if name in _BASES}
    of_several = {name: _bases_of(one) for name, one in state.get(OF_OPTIMIZERS, {}).items()}
    return found | ({OF_OPTIMIZERS: of_several} if of_several else {})


def _with_bases(state: dict[str, Any], bases: dict[str, Any]) -> dict[str, Any]:
    own = bases.get(OF_OPTIMIZERS, {})
    of_several = {name: _with_bases(one, own.get(name, {})) for name, one in state.get(OF_OPTIMIZERS, {}).items()}
    return state | bases | ({OF_OPTIMIZERS: of_several} if of_several else {})


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _base(group: dict[str, Any]) -> float:
    return float(group.get("initial_lr", group["lr"]))
