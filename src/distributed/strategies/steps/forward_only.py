"""ForwardOnly: calls of a training step for its forward passes alone, as BatchNorm's statistics need them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from distributed.strategies.base import StepTask


class ForwardOnly:
    """What a manual step's calls go to where nothing is to be trained. Implements OptimizerCalls."""

    def backward(self, loss: torch.Tensor, weight: Any, *, retain_graph: bool) -> None:
        pass

    def step(self, name: str) -> None:
        pass

    def zero_grad(self, name: str) -> None:
        pass


@contextmanager
def forward_only(task: StepTask, *, is_whole: bool) -> Iterator[None]:
    """A scope in which training steps train nothing, and what the task keeps of its own stays as it is.

    `is_whole`: whether this rank has the whole model. A step of the user's own, which may ask for gradients by itself
    (a penalty on them), then has a graph.
    """
    kept = copy.deepcopy(task.state()) if task.keeps_state else None
    task.steps_by(ForwardOnly())
    try:
        with torch.set_grad_enabled(is_whole and task.has_own_step):
            yield
    finally:
        task.steps_by(None)
        if kept is not None:
            task.load_state(kept)
