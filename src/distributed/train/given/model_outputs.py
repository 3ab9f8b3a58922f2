"""What a model or a loss function has returned: which part is the loss, its weight, and which the prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.strategies.base import Outcome
from distributed.train.loss.torch_losses import squared_error

_CROSS_ENTROPY = nn.CrossEntropyLoss()


def own_loss(outputs: Any, target: Any) -> Outcome | None:
    """The loss that the model itself returned, if it did."""
    if isinstance(outputs, Mapping) and "loss" in outputs:
        weight = outputs.get("weight")
        given = None if weight is None else torch.as_tensor(weight)
        return Outcome(outputs["loss"], outputs, target, given, is_own=True, is_given=given is not None)
    if isinstance(getattr(outputs, "loss", None), torch.Tensor):
        return Outcome(outputs.loss, outputs, target, is_own=True)
    if isinstance(outputs, tuple) and (index := _loss_index(outputs, trains=torch.is_grad_enabled())) is not None:
        rest = [part for at, part in enumerate(outputs) if at != index]
        return Outcome(outputs[index], rest[0] if rest else None, target, is_own=True)
    if isinstance(outputs, torch.Tensor) and outputs.dim() == 0:
        return Outcome(outputs, None, target, is_own=True)
    return None


def with_weight(loss: tuple[Any, ...], outputs: Any, target: Any) -> Outcome:
    """What a loss function returned as `(loss, weight)`, if it is that."""
    if len(loss) == 2 and isinstance(loss[0], torch.Tensor) and loss[0].dim() == 0:
        weight = torch.as_tensor(loss[1], device=loss[0].device)
        if weight.dim() == 0 and not hasattr(loss, "_fields"):
            return Outcome(loss[0], outputs, target, weight, is_given=True)
    kinds = ", ".join(f"{tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__ for x in loss)
    raise TaskError(
        f"loss_fn returned a {type(loss).__name__} of {len(loss)} ({kinds})",
        why="loss_fn returns the loss, a number, or (loss, weight), two numbers; the loss is a mean over the weight",
        do="loss_fn=lambda outputs, target: my_loss(outputs, target).loss, or another part of it",
    )


def fitting_loss(outputs: Any, target: Any) -> Callable[[Any, Any], torch.Tensor]:
    """Cross entropy or mean squared error, by the kind of the target."""
    if isinstance(outputs, torch.Tensor) and isinstance(target, torch.Tensor):
        if not target.is_floating_point() and outputs.dim() > target.dim():
            return _CROSS_ENTROPY
        if target.is_floating_point() and outputs.numel() == target.numel():
            return squared_error
    raise TaskError(
        f"no loss: the model returned a {type(outputs).__name__}, and the target is a {type(target).__name__}",
        why="no loss_fn is given, and none can be guessed from these",
        do="pass loss_fn=…, or let the model return its loss",
    )


def of_inputs(loss: Any, outputs: Any, target: Any) -> Outcome:
    """Of a loss function that has seen the inputs as well: like a model's own."""
    outcome = with_weight(loss, outputs, target) if isinstance(loss, tuple) else Outcome(loss, outputs, target)
    return outcome._replace(is_own=True)


def prediction_of(outputs: Any) -> Any:
    """What a model returned, without its loss.

    >>> prediction_of((torch.ones(2, 3), torch.tensor(0.5))).shape, prediction_of((torch.ones(2, 3), None)).shape
    (torch.Size([2, 3]), torch.Size([2, 3]))
    """
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if logits is not None:
        return logits
    if isinstance(outputs, Mapping):
        return {name: value for name, value in outputs.items() if name not in ("loss", "weight")}
    if isinstance(outputs, tuple):
        index = _loss_index(outputs, trains=False)
        rest = [part for at, part in enumerate(outputs) if at != index and part is not None]  # None: no loss
        if len(rest) < len(outputs):
            return rest[0] if len(rest) == 1 else tuple(rest)
    return outputs


def _loss_index(outputs: tuple[Any, ...], *, trains: bool) -> int | None:
    """The place of the loss: the first part, or the only scalar, which has a gradient in training."""
    scalars = [at for at, part in enumerate(outputs) if isinstance(part, torch.Tensor) and part.dim() == 0]
    if scalars[:1] == [0]:
        return 0
    if len(scalars) != 1 or not outputs[scalars[0]].is_floating_point():
        return None
    return scalars[0] if outputs[scalars[0]].requires_grad or not trains else None
