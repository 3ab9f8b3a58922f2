"""How many elements, and rows, an outcome has: they follow the number of what its loss is a mean over."""

from __future__ import annotations

import torch

from distributed.strategies.base import Outcome


def looked_at(outcome: Outcome) -> torch.Tensor | None:
    """What has a number of elements that follows that of what the loss is a mean over."""
    for value in (outcome.outputs, outcome.target):
        if isinstance(value, torch.Tensor) and value.dim():
            return value
    return None


def elements(outcome: Outcome) -> int | None:
    found = looked_at(outcome)
    return None if found is None else found.numel()


def rows(outcome: Outcome | None) -> int | None:
    found = None if outcome is None else looked_at(outcome)
    return None if found is None else len(found)


def elements_on_device(outcome: Outcome) -> torch.Tensor:
    count = elements(outcome)
    assert count is not None
    return torch.full((), count, device=outcome.loss.device)
