"""The tensors that replicas must hold equally, by name. Copies nothing and uses no collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from distributed.core.plan import ReplicatePlan
from distributed.runtime.torch_compat import BatchNormBase

Named = Iterator[tuple[str, torch.Tensor | str]]


def model_tensors(module: nn.Module, plan: ReplicatePlan) -> Named:
    """The parameters of this rank, and the buffers that must be equal on all ranks."""
    for name, parameter in module.named_parameters():
        if parameter.numel() and not parameter.is_meta:
            yield f"parameter {name}", parameter
    for name, buffer in shared_buffers(module, plan):
        yield f"buffer {name}", buffer


def shared_buffers(module: nn.Module, plan: ReplicatePlan) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers without those of BatchNorm layers that the user lets see one rank's samples only."""
    if plan.check != "all":
        return
    for path, owner in module.named_modules():
        if isinstance(owner, BatchNormBase) and not plan.sync_batchnorm:
            continue
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.numel() and not buffer.is_meta:
                yield f"{path}.{name}".removeprefix("."), buffer


def shared_names(module: nn.Module, plan: ReplicatePlan) -> set[str]:
    """The names of the parameters and buffers that must be equal on all ranks that have them."""
    return {name for name, _ in (*module.named_parameters(), *shared_buffers(module, plan))}


def optimizer_state(
    optimizer: torch.optim.Optimizer, module: nn.Module
) -> Iterator[tuple[str, str, torch.Tensor | str]]:
    """The optimizer state of each parameter: the parameter's name, the key and the value."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if (comparable := _comparable(value)) is not None:
                yield names.get(id(parameter), "a parameter outside the model"), str(key), comparable


def optimizer_options(optimizer: torch.optim.Optimizer) -> Named:
    """The options of each group: learning rate, weight decay and the like."""
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "param_names") and (comparable := _comparable(value)) is not None:
                yield f"optimizer option {key} of group {index}", comparable


def _comparable(value: Any) -> torch.Tensor | str | None:
    """A comparable value; None for objects whose text differs between processes."""
    if isinstance(value, torch.Tensor):
        return value if value.layout is torch.strided else None
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return repr(value) if all(isinstance(part, (bool, int, float, str, type(None))) for part in parts) else None


def more_tensors(kind: str, tensors: Iterable[torch.Tensor]) -> Named:
    for index, tensor in enumerate(tensors):
        yield f"{kind} {index}", tensor
