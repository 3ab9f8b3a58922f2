"""Fused optimizers: torch's own kernels that read and write each number of an optimizer's state once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from distributed.strategies.checks.sparse_layers import sparse_layers

_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_DEVICES = ("cuda", "cpu")
_KERNEL_OPTIONS = ("foreach", "differentiable", "capturable", "fused")
_SCALES = "_step_supports_amp_scaling"  # tells a GradScaler that the kernel divides by the scale itself


def why_not_fused(optimizer: torch.optim.Optimizer, module: nn.Module | None = None) -> str:
    """Why an optimizer cannot be fused; empty if it can.

    Torch has no such kernel for it or for its parameters, the user has chosen a kernel, or gradients are sparse.

    >>> why_not_fused(torch.optim.AdamW(nn.Linear(1, 1).parameters()))
    ''
    >>> why_not_fused(torch.optim.RMSprop(nn.Linear(1, 1).parameters()))
    'torch has no fused RMSprop'
    """
    groups, kind = optimizer.param_groups, type(optimizer)
    parameters = [p for group in groups for p in group["params"]]
    if kind not in _KINDS:  # a subclass may step differently
        return f"torch has no fused {kind.__name__}"
    if not parameters:
        return "it has no parameters"
    own = [(name, group[name]) for group in groups for name in _KERNEL_OPTIONS if group.get(name) not in (None, False)]
    own += [(name, False) for group in groups for name in ("fused", "foreach") if group.get(name) is False]
    if own:
        return "it was made with {}={}".format(*own[0])
    if has_dampening(optimizer):
        return "torch's first step omits dampening, and a fused first step would not"  # see `_make_momentum`
    device = parameters[0].device
    if not all(p.is_floating_point() and p.device == device for p in parameters):
        return "its parameters are on several devices, or not in floating point"
    if device.type not in _DEVICES or not _has_kernel(kind, device):
        return f"torch has no fused {kind.__name__} for {device.type}"
    if module is not None and sparse_layers(module):
        return "an embedding of the model has sparse gradients"
    return ""


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's fused kernels make all changes of an optimizer's step."""
    return type(optimizer) in _KINDS and all(group.get("fused") for group in optimizer.param_groups)


def fuse(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Fuse an optimizer for which `why_not_fused` is empty, in place; returns the function that undoes it."""
    before = [group.get("fused") for group in optimizer.param_groups]
    scaled = optimizer.__dict__.get(_SCALES)
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizer.__dict__[_SCALES] = True
    for state, parameter in _steps(optimizer):
        state["step"] = state["step"].to(parameter.device, torch.float32)
    forget_momentum = begin_with_momentum(optimizer)

    def undo() -> None:
        forget_momentum()
        for group, value in zip(optimizer.param_groups, before, strict=False):
            group["fused"] = value
        if scaled is None:
            optimizer.__dict__.pop(_SCALES, None)
        for state, _ in _steps(optimizer):
            state["step"] = state["step"].cpu()  # where kernels that are not fused expect it

    return undo


def begin_with_momentum(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Let SGD's momentum begin as zeros, which a step that is skipped leaves; returns the function that undoes it."""
    if not isinstance(optimizer, torch.optim.SGD):
        return lambda: None
    return optimizer.register_step_pre_hook(_make_momentum).remove


def has_dampening(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the first step, which torch makes without dampening, differs from one with momentum of zeros."""
    return any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups)


def _has_kernel(kind: Any, device: torch.device) -> bool:
    """Whether torch has a fused kernel, tried with a step of one number, since versions of torch differ."""
    trial = nn.Parameter(torch.zeros(1, device=device))
    trial.grad = torch.zeros_like(trial)
    try:
        kind([trial], lr=0.0, fused=True).step()
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def _steps(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """The states that count steps in a tensor, with their parameters."""
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            yield state, parameter


def _make_momentum(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Create zero momentum before the first step, which gives the same result.

    torch's fused SGD begins with uninitialised memory, and leaves it so if a scaled loss overflows.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
