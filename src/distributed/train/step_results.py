"""What a training or validation step of the user's own returns, as an Outcome."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from distributed.core.errors import TaskError
from distributed.strategies.base import Logged, Outcome

_PARTS = ("loss", "weight", "outputs", "target")  # of a mapping; every other entry is logged
_RETURN = (
    "return the loss, (loss, weight) or a dict with 'loss' and, if they are to be measured, 'outputs' and 'target'"
)


def read_result(result: Any, step: str, *, needs_loss: bool) -> Outcome:
    """The outcome of a step; `step` names it in errors. Without a loss, it has one of weight 0.

    >>> read_result({"loss": torch.tensor(2.0), "kl": 0.5}, "training_step", needs_loss=True).logged["kl"]
    Logged(value=0.5, weight=None)
    """
    if isinstance(result, Mapping):
        return _read_mapping(result, step, needs_loss)
    if _is_number(result):
        return Outcome(torch.as_tensor(result), None, None, is_own=True)
    if isinstance(result, tuple) and len(result) == 2 and all(map(_is_number, result)):
        return _weighted(result[0], result[1], None, None)
    if result is None and not needs_loss:
        return _without_loss(None, None)
    raise _unreadable(result, step)


def logged_value(name: str, value: Any, weight: Any = None, *, of_own_loop: bool = False) -> Logged:
    """A checked value, without its graph. A loop of the user's own names what it validates itself."""
    if not _is_number(value) or not (weight is None or _is_number(weight)):
        raise TaskError(
            f"log({name!r}, …) got a {_kind(value)}" + ("" if weight is None else f", and the weight {_kind(weight)}"),
            why="what is logged is one number, which is averaged over micro-batches and ranks",
            do=f"log({name!r}, value.mean())",
        )
    if name == "loss" or (name.startswith("val_") and not of_own_loop):
        why = "the trainer reports 'loss' and names that begin with 'val_' itself"
        raise TaskError(f"a logged value cannot be called {name!r}", why=why, do=f"log('my_{name}', …)")
    return Logged(_plain(value), None if weight is None else _plain(weight))


def _read_mapping(result: Mapping[str, Any], step: str, needs_loss: bool) -> Outcome:
    outputs, target = result.get("outputs"), result.get("target")
    logged = {name: logged_value(name, value) for name, value in result.items() if name not in _PARTS}
    if "loss" not in result:
        if needs_loss:
            raise _unreadable(result, step)
        return _without_loss(outputs, target)._replace(logged=logged)
    if not _is_number(result["loss"]):
        raise _unreadable(result, step)
    return _weighted(result["loss"], result.get("weight"), outputs, target)._replace(logged=logged)


def _weighted(loss: Any, weight: Any, outputs: Any, target: Any) -> Outcome:
    loss = torch.as_tensor(loss)
    given = None if weight is None else torch.as_tensor(weight, device=loss.device)
    return Outcome(loss, outputs, target, given, is_own=True, is_given=given is not None)


def _without_loss(outputs: Any, target: Any) -> Outcome:
    return Outcome(torch.zeros(()), outputs, target, torch.zeros(()), is_own=True, is_given=True)


def _unreadable(result: Any, step: str) -> TaskError:
    return TaskError(
        f"{step} returned {_kind(result)}", why="a step's gradients are those of one number, its loss", do=_RETURN
    )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(map(str, value)) or 'nothing'}"
    return f"a {type(value).__name__}"


def _is_number(value: Any) -> bool:
    return (isinstance(value, torch.Tensor) and value.numel() == 1) or isinstance(value, (int, float))


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
