"""Functions of all outputs and targets of a validation set, as scikit-learn's metrics are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from distributed.train.joining import join, to_host
from distributed.train.resume.sharing import Tree


@dataclass(frozen=True)
class WholeSetFunction:
    """A metric that is called once an evaluation, with the outputs and targets of the whole set.

    >>> spread = WholeSetFunction(lambda outputs, target: float((outputs - target).std()))
    >>> round(spread(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])), 3)
    0.707
    """

    function: Callable[[Any, Any], Any]

    def __call__(self, outputs: Any, target: Any) -> Any:
        return self.function(outputs, target)


def whole_set(function: Callable[[Any, Any], Any]) -> WholeSetFunction:
    """Mark a function (outputs, target) as a metric of the whole validation set; also as a decorator.

    It is called on one rank, with everything in host memory, in the order of the set: tensors are put together along
    their first dimension, lists one after the other. It returns a number, or several as a dict.

    >>> from distributed import whole_set
    >>> @whole_set
    ... def error_rate(outputs, target):
    ...     return float((outputs.argmax(1) != target).float().mean())
    >>> error_rate(torch.eye(2), torch.tensor([0, 0]))
    0.5
    """
    return WholeSetFunction(function)


class GatheredFunction:
    """One of them on one rank: keeps the batches of an evaluation."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function = function
        self._batches: list[tuple[Any, Any]] = []

    def reset(self) -> None:
        self._batches = []

    def update(self, outputs: Any, target: Any) -> None:
        self._batches.append((_in_fp32(to_host(outputs)), to_host(target)))

    def state(self) -> Tree | None:
        return {"batches": self._batches} if self._batches else None

    def compute(self, states: list[Tree]) -> Any:
        outputs, targets = zip(*(batch for state in states for batch in state["batches"]), strict=True)
        return self._function(to_host(join(outputs)), to_host(join(targets)))


def _in_fp32(outputs: Any) -> Any:
    """Numpy has no bf16, and 16 bits hold every number of an fp16 or bf16 tensor in 32."""
    is_low = isinstance(outputs, torch.Tensor) and outputs.dtype in (torch.float16, torch.bfloat16)
    return outputs.float() if is_low else outputs
