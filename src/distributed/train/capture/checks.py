"""Whether a step can be captured, before that is tried, and whether a captured one comes to the same, after.

A graph repeats kernels on the tensors that it was captured with. What the host does between them (a value that it
waits for, a random number of its own, a count that it keeps, a tensor that it puts in another's place, a hook) would be
repeated as it was or left out, silently; so a step that does any of it stays as it is. `reachable.py` finds the counts.
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from distributed.core.choices import Precision
from distributed.runtime.torch_compat import foreach_copy_, foreach_norm, foreach_sub
from distributed.runtime.torch_module_compat import MODULE_HOOKS, has_gradient_hooks, step_hooks
from distributed.strategies.base import Capturable, StepOutput
from distributed.train.capture.captured import NotCapturable
from distributed.train.checks.reachable import Look, changes

LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3, "fp8": 1e-3}  # of the larger of 1 and the loss
UPDATE_TOLERANCE = 0.05  # of the step's change of each tensor
_ROUNDING = 1e-7  # of the tensor itself, by which any change is rounded
_NOISE = 3.0  # times what two eager steps differ by, where they do not come to the same themselves
_OWN = ("/distributed/", "/torch/", "warnings.py")
_COPIES = 4  # of the state: before the step, after it each way, and what they are made from


@contextmanager
def watched(look: Callable[[], Look]) -> Iterator[list[str]]:
    """Around an eager step: the reasons that it gave why it cannot be captured. `look`: at what Python keeps."""
    found: list[str] = []
    places: list[str] = []
    before, held = _host_generators(), look()
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
    found += changes(held, look())


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


def hooks_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Whose hooks would not be called, once a graph runs in the place of Python; "": none.

    >>> layer = nn.Linear(1, 1)
    >>> handle = layer.register_forward_hook(print)
    >>> hooks_of(nn.Sequential(layer), torch.optim.SGD(layer.parameters(), lr=0.1))
    'a hook of the module 0'
    """
    for path, part in module.named_modules():
        if any(_is_users(hook) for kind in MODULE_HOOKS for hook in getattr(part, kind).values()):
            return f"a hook of the module {path or type(part).__name__}"
    for name, parameter in module.named_parameters():
        if has_gradient_hooks(parameter):
            return f"a hook of the parameter {name}"
    hooks = [hook for kind in step_hooks(optimizer) for hook in kind.values()]
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
        foreach_copy_(self._tensors, self._values)
        torch.cuda.set_rng_state(self._generator, self._device)

    def moved(self, strategy: Capturable) -> bool:
        """Whether the state lies in other tensors by now."""
        now = strategy.changing()
        return len(now) != len(self._tensors) or any(a is not b for a, b in zip(now, self._tensors, strict=True))

    @torch.no_grad()
    def changes(self) -> list[TensorUpdate]:
        """What the step did to each tensor in floating point."""
        pairs = zip(self._tensors, self._values, strict=True)
        now, before = zip(*((tensor, was) for tensor, was in pairs if tensor.is_floating_point()), strict=True)
        return [TensorUpdate(by.float(), was) for by, was in zip(foreach_sub(now, before), before, strict=True)]


class TensorUpdate(NamedTuple):
    by: torch.Tensor
    before: torch.Tensor


def differs(
    captured: StepOutput,
    made: Sequence[TensorUpdate],
    eager: StepOutput,
    expected: Sequence[TensorUpdate],
    kind: Precision,
    *,
    again: Sequence[TensorUpdate] | None = None,
) -> str:
    """What is not the same in two outcomes of one step; "": they agree to the tolerances, each tensor by itself.

    `again`: of a second eager step. Tensors that it does not change as the first did have no single right outcome (the
    order of a kernel's sums, blown up by Adam where a gradient is nearly 0); they may be as far off as both are apart.
    """
    there, here = float(captured.loss), float(eager.loss)
    if not abs(there - here) <= LOSS_TOLERANCE[kind] * max(1.0, abs(here)) and not (there != there and here != here):
        return f"captured, its loss is {there:.7g} instead of {here:.7g}"
    distances, whole = _distances(made, expected), _norms([change.by for change in expected])
    rounding = _norms([change.before.float() for change in expected]) * _ROUNDING
    allowed = UPDATE_TOLERANCE * whole + rounding
    wrong = ~(distances <= allowed) & whole.isfinite()
    if again is not None:
        noise = _distances(again, expected)
        is_noisy = ~(noise <= allowed)
        if bool(distances[is_noisy].norm() <= _NOISE * noise[is_noisy].norm()):
            wrong &= ~is_noisy
    at = wrong.nonzero().flatten().tolist()
    if at:
        first = at[0]
        by = f"the first by {distances[first].item():.3g} of {whole[first].item():.3g}"
        return f"captured, it changes {len(at)} of {len(expected)} tensors of the state otherwise, {by}"
    return ""


def _distances(some: Sequence[TensorUpdate], others: Sequence[TensorUpdate]) -> torch.Tensor:
    return _norms(foreach_sub([change.by for change in some], [change.by for change in others]))


def _norms(tensors: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack(foreach_norm(tensors))
