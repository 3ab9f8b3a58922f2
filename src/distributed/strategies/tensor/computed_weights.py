"""Layers whose weight is computed from other parameters, which tensor parallelism cannot cut."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils import parametrize

from distributed.core.errors import PlanError

_ORIGINALS = ("_orig", "_g")  # suffixes of the original weight in nn.utils.spectral_norm, prune and weight_norm


def refuse_computed(module: nn.Module, paths: Iterable[str]) -> None:
    """Raise if a layer that has a style, or one within it, is parametrized."""
    for path in paths:
        for name, layer in module.get_submodule(path).named_modules(prefix=path):
            if _is_computed(layer):
                raise PlanError(
                    f"the weight of {name} is computed from other parameters (a parametrization or a weight norm)",
                    why="tensor parallelism cuts weights, and a shard of this one cannot be computed from theirs",
                    do=f"leave {name} out of tensor_parallel_plan, or train with tensor_parallel=1",
                )


def _is_computed(layer: nn.Module) -> bool:
    if parametrize.is_parametrized(layer):
        return True
    plain = [name for name, value in vars(layer).items() if isinstance(value, torch.Tensor)]
    return any(f"{name}{original}" in layer._parameters for name in plain for original in _ORIGINALS)
