"""Batches: which part of a batch is the model's input and which the target, and the call of the model with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_TARGET_KEYS = ("labels", "label", "targets", "target", "y")


class Applied(NamedTuple):
    """A batch that has gone through a model."""

    inputs: Any  # as the batch has them: one, a tuple of several, or a mapping
    outputs: Any
    target: Any


def apply(model: Callable[..., Any], batch: Any, *, takes_target: bool) -> Applied:
    """Call the model with the inputs of a batch. `takes_target`: a loss function does, so a mapping's is no input.

    >>> apply(lambda x, y: x + y, (1, 2, 3), takes_target=True)
    Applied(inputs=(1, 2), outputs=3, target=3)
    """
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        inputs, target = batch
        outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    elif isinstance(batch, (list, tuple)) and len(batch) > 2:
        inputs, target = tuple(batch[:-1]), batch[-1]
        outputs = model(*inputs)
    elif isinstance(batch, Mapping):
        inputs, target = _split_mapping(batch, takes_target)
        outputs = model(**inputs)
    else:
        inputs = target = batch[0] if isinstance(batch, (list, tuple)) else batch
        outputs = model(inputs)
    return Applied(inputs, outputs, target)


def _split_mapping(batch: Mapping[str, Any], takes_target: bool) -> tuple[Mapping[str, Any], Any]:
    key = next((key for key in _TARGET_KEYS if key in batch), None)
    if key is None:
        return batch, None
    return ({k: v for k, v in batch.items() if k != key} if takes_target else batch), batch[key]


def takes_inputs(loss_fn: Callable[..., Any] | None) -> bool:
    """Whether a loss function has an argument `inputs`, and gets the batch's by that name.

    >>> takes_inputs(lambda outputs, target, *, inputs: 0), takes_inputs(lambda outputs, target: 0)
    (True, False)
    """
    if loss_fn is None:
        return False
    try:
        found = inspect.signature(loss_fn).parameters.get("inputs")
    except (TypeError, ValueError):  # of a builtin
        return False
    return found is not None and found.kind in (found.KEYWORD_ONLY, found.POSITIONAL_OR_KEYWORD)
