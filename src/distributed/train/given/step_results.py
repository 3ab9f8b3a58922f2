"""What a training or validation step of the user's own returns, as an Outcome."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from distributed.core.errors import TaskError
from distributed.runtime.torch_compat import tree_map
from distributed.strategies.base import Logged, Outcome

_PARTS = ("loss", "weight", "outputs", "target")  # of a mapping; every other entry is logged
_RETURN = (
    "return the loss, (loss, weight) or a dict with 'loss' and, if they are to be measured, 'outputs' and 'target'"
)


def read_result(result: Any, step: str, *, needs_loss: bool) -> Outcome:
    """The outcome of a step; `step` names it in errors. Without a loss, it has one of weight 0.

    >>> read_result({"loss": torch.tensor(2.0), "kl": 0.5}, "validation_step", needs_loss=False).logged["kl"]
    Logged(value=0.5, weight=None)
    """
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        found = Outcome(result, None, None, is_own=True)
    elif isinstance(result, Mapping):
        found = _read_mapping(result, step, needs_loss)
    elif _is_number(result):
        found = Outcome(torch.as_tensor(result), None, None, is_own=True)
    elif isinstance(result, tuple) and len(result) == 2 and all(map(_is_number, result)):
        found = _weighted(result[0], result[1], None, None)
    elif result is None and not needs_loss:
        found = _without_loss(None, None)
    else:
        raise _unreadable(result, step)
    if needs_loss and not found.loss.requires_grad:
        raise TaskError(
            f"the loss that {step} returned has no gradient",
            why="it was not computed with parameters that are trained in this step, or it was detached",
            do="compute it with the model that the step is given, and return it as it is",
        )
    return found


def check_number(loss: torch.Tensor) -> None:
    if loss.numel() != 1:
        raise TaskError(
            f"the loss has the shape {list(loss.shape)}",
            why="the backward pass of a step begins at one number, the loss of its batch",
            do="return its mean: reduction='mean', or loss.mean()",
        )


def takes_optimizer(step: Callable[..., Any]) -> bool:
    """Whether a training step is called once for each optimizer, with its name as the third argument.

    >>> takes_optimizer(lambda model, batch, optimizer: 0), takes_optimizer(lambda model, batch: 0)
    (True, False)
    """
    try:
        given = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # of a builtin
        return False
    by_place = [one for one in given if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return len(by_place) > 2 and (by_place[2].default is by_place[2].empty or by_place[2].name == "optimizer")


def sum_of_phases(found: Mapping[str, Outcome]) -> Outcome:
    """The phases' outcomes for a batch of an evaluation as one: their losses by name, and the sum of these."""
    weighted = [name for name, outcome in found.items() if outcome.weight is not None or outcome.is_sum]
    if weighted:
        raise TaskError(
            f"the loss of the phase {weighted[0]!r} is no mean over samples, and there is no validation_step",
            why="an evaluation sums the phases' losses, which must be means over the same",
            do="define validation_step, and log each loss there with its weight: self.log(name, loss, weight)",
        )
    logged: dict[str, Logged] = {}
    for name, outcome in found.items():
        logged |= {f"loss_{name}": Logged(outcome.loss.detach(), None), **(outcome.logged or {})}
    total = torch.stack([outcome.loss.detach() for outcome in found.values()]).sum()
    last = [*found.values()][-1]
    return Outcome(total, last.outputs, last.target, is_own=True, logged=logged)


def logged_value(name: str, value: Any, weight: Any = None, *, of_own_loop: bool = False) -> Logged:
    """A checked value, without its graph. A loop of the user's own names what it validates itself."""
    if not _is_number(value) or not (weight is None or _is_number(weight)):
        raise TaskError(
            f"log({name!r}, …) got {_kind(value)}" + ("" if weight is None else f", and the weight {_kind(weight)}"),
            why="what is logged is one number, which is averaged over micro-batches and ranks",
            do=f"log({name!r}, value.mean())",
        )
    if name == "loss" or (name.startswith("val_") and not of_own_loop):
        why = "the trainer reports 'loss' and names that begin with 'val_' itself"
        raise TaskError(f"a logged value cannot be called {name!r}", why=why, do=f"log('my_{name}', …)")
    return Logged(_plain(value), None if weight is None else _plain(weight))


def _read_mapping(result: Mapping[str, Any], step: str, needs_loss: bool) -> Outcome:
    outputs, target = tree_map(_plain, (result.get("outputs"), result.get("target")))  # to be measured only
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
    return Outcome(torch.zeros(()), outputs, target, torch.zeros(()), is_own=True, is_given=True, is_missing=True)


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
