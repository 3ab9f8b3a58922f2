"""BeforeCalls: a run between two steps, before calls of callbacks that are made again where the world breaks there."""

from __future__ import annotations

import copy
from typing import Any

import torch

from distributed.runtime.fingerprint import fingerprints
from distributed.strategies.placement import local
from distributed.train.callbacks.control import Control


class BeforeCalls:
    """The callbacks' state, the optimizer's options, and digests of weights and averages, which nothing waits for."""

    def __init__(self, control: Control, state: dict[str, Any]) -> None:
        self._control, self._state = control, copy.deepcopy(state)
        self._place = control.epoch, control.step
        self._options = [copy.deepcopy(_options(group)) for group in control.optimizer.param_groups]
        self._digests = _digests(control)

    @property
    def is_now(self) -> bool:
        """Whether no step, and no epoch, has ended since."""
        return self._place == (self._control.epoch, self._control.step)

    def take_back(self) -> dict[str, Any] | None:
        """The callbacks' state, with the options as they were; None: weights or averages are not as they were."""
        if not torch.equal(self._digests, _digests(self._control)):
            return None
        for group, options in zip(self._control.optimizer.param_groups, self._options, strict=True):
            group.update(options)
        return self._state


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


@torch.no_grad()
def _digests(control: Control) -> torch.Tensor:
    """Not of buffers: an evaluation may change them, and statistics that are collected again come to the same."""
    named = {name: parameter for name, parameter in control.model.named_parameters() if not parameter.is_meta}
    values = [local(parameter) for parameter in named.values()]
    values += [tensor for name, tensor in control.copies if name in named]
    return fingerprints(values, values[0].device if values else torch.device("cpu"))
