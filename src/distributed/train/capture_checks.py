"""What tells that a step cannot be captured, before that is tried, and that a captured one comes to the same, after.

A graph repeats kernels on the tensors that it was captured with. Whatever the host does between them (a value that it
waits for, a random number of its own, a count that it keeps, a tensor that it puts in another's place, a hook) would be
repeated as it was or left out, silently; so a step that does any of it stays as it is.
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from distributed.strategies.base import Capturable, StepOutput
from distributed.train.captured import NotCapturable

LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3, "fp8": 1e-3}  # of the larger of 1 and the loss
UPDATE_TOLERANCE = 0.05  # of the step's change of each tensor
_ROUNDING = 1e-7  # of the tensor itself, by which any change is rounded
_OWN = ("/distributed/", "/torch/", "warnings.py")
_COPIES = 4  # of the state: before the step, after it each way, and what they are made from
_COUNTS = (bool, int, float)
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TORCH = frozenset(vars(nn.Module()))  # `training` among them, which is the loop's
_NO_CODE = SimpleNamespace(co_freevars=())


@contextmanager
def watched(parts: Sequence[Any]) -> Iterator[list[str]]:
    """Around an eager step of a model and its loss: the reasons that it gave why it cannot be captured."""
    found: list[str] = []
    places: list[str] = []
    before, held = _host_generators(), _held(parts)
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest, **more: places.append(_place(str(message)))
        torch.cuda.set_sync_debug_mode("warn")  # which warns that it does not see all: the comparison sees the rest
        places.clear()
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    waits = [place for place in places if place]
    if waits:
        found.append(f"it waits for the device at {waits[0]}, to look at a value or to copy it")
    drawn = [name for name, state in _host_generators().items() if state != before[name]]
    if drawn:
        found.append(f"it draws from the generator of {drawn[0]}, on the host")
    found += changed(held, _held(parts))


def _place(message: str) -> str:
    """Where the host waited: the user's line, if one is on the way; "": it was another warning."""
    if "synchroniz" not in message.lower():
        return ""
    frames = [f for f in traceback.extract_stack()[:-2] if not any(part in f.filename for part in _OWN)]
    inner = frames or traceback.extract_stack()[:-2]
    return f"{inner[-1].filename}:{inner[-1].lineno}"


def _host_generators() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    return {
        "random": random.getstate(),
        "numpy": (kind, np.asarray(keys).tobytes(), *rest),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What Python keeps between steps and the step has set anew.

    >>> changed({"n": 1, "m": 2}, {"n": 2, "m": 2})
    ['it counts in Python: n changes']
    """
    for name, value in after.items():
        was = before.get(name)
        if isinstance(value, torch.Tensor):
            if value is not was:
                return [f"it puts another tensor in the place of {name}"]
        elif value is not was and (isinstance(was, torch.Tensor) or was != value):
            return [f"it counts in Python: {name} changes"]
    return []


def _held(parts: Sequence[Any]) -> dict[str, Any]:
    """Tensors that are no parameters, and plain numbers, that modules and functions hold."""
    found: dict[str, Any] = {}
    for part in parts:
        modules = dict(part.named_modules()) if isinstance(part, nn.Module) else {"": part}
        for path, owner in modules.items():
            for name, value in _attributes(owner):
                plain = _plain(value)
                if plain is not None and name not in _OF_TORCH:
                    found[f"{path}.{name}" if path else name] = plain
    return found


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    yield from vars(owner).items() if hasattr(owner, "__dict__") else ()
    if isinstance(owner, nn.Module):
        yield from owner._buffers.items()
    cells = getattr(owner, "__closure__", None) or ()
    for name, cell in zip(getattr(owner, "__code__", _NO_CODE).co_freevars, cells, strict=False):
        with suppress(ValueError):  # it has no content yet
            yield name, cell.cell_contents


def _plain(value: Any) -> Any:
    """The value as it is now, if it can be compared; of a list or a dict, what of it can."""
    if type(value) in _COUNTS or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list | tuple | deque):
        return tuple(item if type(item) in _COUNTS else id(item) for item in value)
    if type(value) is dict:
        return tuple((key, item if type(item) in _COUNTS else id(item)) for key, item in value.items())
    return None


def hooks_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Whose hooks would not be called, once a graph runs in the place of Python; "": nobody's.

    >>> layer = nn.Linear(1, 1)
    >>> handle = layer.register_forward_hook(print)
    >>> hooks_of(nn.Sequential(layer), torch.optim.SGD(layer.parameters(), lr=0.1))
    'a hook of the module 0'
    """
    for path, part in module.named_modules():
        if any(_is_users(hook) for kind in _MODULE_HOOKS for hook in getattr(part, kind).values()):
            return f"a hook of the module {path or type(part).__name__}"
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"a hook of the parameter {name}"
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    return "a hook of the optimizer" if any(_is_users(hook) for hook in hooks) else ""


def _is_users(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", type(hook).__module__)).startswith(("torch.", "distributed."))


class Before:
    """The state before a step, so that the same step can be taken twice."""

    def __init__(self, strategy: Capturable, device: torch.device) -> None:
        self._tensors, self._device = strategy.changing(), device
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if _COPIES * size > free + cached:
            raise NotCapturable(f"to compare it takes {_COPIES * size / 2**30:.1f} GiB more, which are not free")
        with torch.no_grad():
            self._values = [tensor.detach().clone() for tensor in self._tensors]
        self._generator = torch.cuda.get_rng_state(device)

    @torch.no_grad()
    def come_back(self) -> None:
        for tensor, value in zip(self._tensors, self._values, strict=True):
            tensor.copy_(value)
        torch.cuda.set_rng_state(self._generator, self._device)

    def moved(self, strategy: Capturable) -> bool:
        """Whether the state lies in other tensors by now."""
        now = strategy.changing()
        return len(now) != len(self._tensors) or any(a is not b for a, b in zip(now, self._tensors, strict=True))

    @torch.no_grad()
    def changes(self) -> list[Change]:
        """What the step did to each tensor in floating point."""
        pairs = zip(self._tensors, self._values, strict=True)
        return [Change((now.detach() - was).float(), was) for now, was in pairs if now.is_floating_point()]


class Change(NamedTuple):
    by: torch.Tensor
    before: torch.Tensor


def differs(
    captured: StepOutput, made: Sequence[Change], eager: StepOutput, expected: Sequence[Change], kind: str
) -> str:
    """What is not the same in two outcomes of one step; "": they agree to the tolerances, each tensor by itself."""
    there, here = float(captured.loss), float(eager.loss)
    if not abs(there - here) <= LOSS_TOLERANCE[kind] * max(1.0, abs(here)):
        return f"captured, its loss is {there:.7g} instead of {here:.7g}"
    apart = torch.stack([(a.by - b.by).norm() for a, b in zip(made, expected, strict=True)])
    whole = torch.stack([change.by.norm() for change in expected])
    rounding = torch.stack([change.before.float().norm() for change in expected]) * _ROUNDING
    wrong = (~(apart <= UPDATE_TOLERANCE * whole + rounding)).nonzero().flatten().tolist()
    if wrong:
        first = wrong[0]
        by = f"the first by {apart[first].item():.3g} of {whole[first].item():.3g}"
        return f"captured, it changes {len(wrong)} of {len(expected)} tensors of the state otherwise, {by}"
    return ""
