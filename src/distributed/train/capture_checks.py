"""What tells that a step cannot be captured, before that is tried, and that a captured one comes to the same, after.

A graph repeats kernels. Whatever the host decides between them (a value that it waits for, a random number of its own,
a count that it keeps) would be repeated as it was, silently; so a step that does any of it stays as it is.
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from distributed.strategies.base import Capturable, StepOutput
from distributed.train.captured import NotCapturable

LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2, "fp8": 1e-2}  # of the larger of 1 and the loss
UPDATE_TOLERANCE = 0.05  # of the step's whole change of the parameters
_OWN = ("/distributed/", "/torch/", "warnings.py")
_COPIES = 4  # of the state: before the step, after it each way, and what they are made from
_COUNTS = (bool, int, float)


@contextmanager
def watched(module: nn.Module) -> Iterator[list[str]]:
    """Around an eager step: the reasons that it gave why it cannot be captured."""
    found: list[str] = []
    places: list[str] = []
    before, counts = _host_generators(), _counts(module)
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
    counted = [name for name, value in _counts(module).items() if counts.get(name) != value]
    if counted:
        found.append(f"the model counts in Python: {counted[0]} changes")


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


def _counts(module: nn.Module) -> dict[str, Any]:
    """Numbers that modules hold as plain attributes; `training` is the loop's."""
    return {
        f"{path}.{name}" if path else name: value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if type(value) in _COUNTS and name != "training"
    }


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

    @torch.no_grad()
    def changes(self) -> list[torch.Tensor]:
        """What the step did to each number in floating point."""
        pairs = zip(self._tensors, self._values, strict=True)
        return [(now.detach() - was).float() for now, was in pairs if now.is_floating_point()]


def differs(
    captured: StepOutput, made: Sequence[torch.Tensor], eager: StepOutput, expected: Sequence[torch.Tensor], kind: str
) -> str:
    """What is not the same in two outcomes of one step; "": they agree to the tolerances above."""
    there, here = float(captured.loss), float(eager.loss)
    if not abs(there - here) <= LOSS_TOLERANCE[kind] * max(1.0, abs(here)):
        return f"captured, its loss is {there:.7g} instead of {here:.7g}"
    whole = torch.stack([change.norm() for change in expected]).norm().item()
    apart = torch.stack([(a - b).norm() for a, b in zip(made, expected, strict=True)]).norm().item()
    if not apart <= UPDATE_TOLERANCE * whole:
        return f"captured, it changes the state otherwise: by {apart:.3g} of {whole:.3g}"
    return ""
