"""Batches: which part of a batch is the model's input and which the target, and the call of the model with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from distributed.runtime.torch_module_compat import without_compile_wrapper

_TARGET_KEYS = ("labels", "label", "targets", "target", "y")


def apply(model: Callable[..., Any], batch: Any, *, takes_target: bool, target_name: str = "") -> tuple[Any, Any, Any]:
    """Call the model with the inputs of a batch: these, the outputs and the target.

    Inputs are as the batch has them: one, a tuple of several, or a mapping. `takes_target`: a loss function does, so a
    mapping's is no input. `target_name`: the argument by which the model gets that of a pair.

    >>> apply(lambda x, y: x + y, (1, 2, 3), takes_target=True)
    ((1, 2), 3, 3)
    """
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        inputs, target = batch
        named = {target_name: target} if target_name else {}
        outputs = model(**inputs, **named) if isinstance(inputs, dict) else model(inputs, **named)
    elif isinstance(batch, (list, tuple)) and len(batch) > 2:
        inputs, target = tuple(batch[:-1]), batch[-1]
        outputs = model(*inputs)
    elif isinstance(batch, Mapping):
        inputs, target = _split_mapping(batch, takes_target)
        outputs = model(**inputs)
    else:
        inputs = target = batch[0] if isinstance(batch, (list, tuple)) else batch
        outputs = model(inputs)
    return inputs, outputs, target


def _split_mapping(batch: Mapping[str, Any], takes_target: bool) -> tuple[Mapping[str, Any], Any]:
    key = next((key for key in _TARGET_KEYS if key in batch), None)
    if key is None:
        return batch, None
    return ({k: v for k, v in batch.items() if k != key} if takes_target else batch), batch[key]


def target_argument(model: nn.Module) -> str:
    """The argument of a model's `forward`, after its first, that is called as a target is; "": none.

    >>> class Gpt(nn.Module):
    ...     def forward(self, ids, targets=None): ...
    >>> target_argument(Gpt()), target_argument(nn.Linear(1, 1))
    ('targets', '')
    """
    try:
        parameters = list(inspect.signature(without_compile_wrapper(model).forward).parameters.values())[1:]
    except (AttributeError, TypeError, ValueError):  # of a builtin
        return ""
    named = {one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
    return next((name for name in _TARGET_KEYS if name in named and name != "y"), "")  # y: a condition, often


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
