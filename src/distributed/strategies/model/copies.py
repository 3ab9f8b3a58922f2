"""Copies of a model beside it, such as averages of its weights: on each rank they lie as the model does.

A copy has this rank's part of each tensor that a checkpoint has of the model, under the same name. So it is saved,
loaded into another mesh, handed over and compared as the model is. What no optimizer steps is no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from distributed.comm.compression.feedback import FEEDBACK
from distributed.comm.outer_steps import SYNCHRONIZATION
from distributed.strategies.base import Copies, ModelCopy
from distributed.strategies.checks.replica_tensors import Named
from distributed.strategies.placement import local

COPIES = "copies"  # a component of a checkpoint
_NARROW = (torch.bfloat16, torch.float16)


class ModelTensors:
    """The live tensors of a model, by name, each found in the dictionary of its module: a read costs 30 ns of each."""

    def __init__(self, module: nn.Module, names: Collection[str], *, is_cut: bool = True) -> None:
        """`names`: of those that are wanted. `is_cut`: a rank may have parts of some."""
        self._is_cut = is_cut
        self._places: list[tuple[str, dict[str, Any], str]] = []
        seen: set[int] = set()
        for prefix, owner in module.named_modules(remove_duplicate=False):
            for held in (owner._parameters, owner._buffers):
                for key, tensor in held.items():
                    name = f"{prefix}.{key}" if prefix else key
                    if tensor is not None and name in names:
                        self._places.append((name, held, key))
                        seen.add(id(tensor))

    def read(self) -> ModelCopy:
        """This rank's part of each; a tied tensor under all of its names. Only while there is no gradient."""
        found = {name: held[key] for name, held, key in self._places}
        return {name: local(tensor) for name, tensor in found.items()} if self._is_cut else found


def distinct(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The first name of each tensor.

    >>> tied = torch.zeros(1)
    >>> distinct({"embedding": tied, "head": tied, "norm": torch.ones(1)})
    ['embedding', 'norm']
    """
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return list(first.values())


def copied_names(module: nn.Module, stepped: Iterable[nn.Parameter], saved: Collection[str]) -> set[str]:
    """What a copy of a model has: parameters that an optimizer steps, and buffers, of what a checkpoint has."""
    kept = {id(parameter) for parameter in stepped} | {id(buffer) for buffer in module.buffers()}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name for name, tensor in named if name in saved and id(tensor) in kept}


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of a copy: a mean of numbers with few digits needs more of them."""
    return torch.float32 if dtype in _NARROW else dtype


def begun(copies: Copies) -> dict[str, ModelCopy]:
    """Those that there are."""
    return {label: tensors for label, tensors in copies.items() if tensors is not None}


def is_unwanted(name: str, copies: Copies) -> bool:
    """Whether a checkpoint's tensor is of a copy, of compressed gradients or outer steps, that this run does not keep.

    >>> is_unwanted("copies/EMA/0.weight", {"SWA": None}), is_unwanted("model/0.weight", {})
    (True, False)
    """
    kind, _, path = name.partition("/")
    return kind in (FEEDBACK, SYNCHRONIZATION) or (kind == COPIES and path.partition("/")[0] not in copies)


def copy_tensors(
    copies: Copies, boxed: Callable[[str, str, torch.Tensor], Named], names: Collection[str]
) -> Iterator[tuple[str, torch.Tensor | str]]:
    """What ranks should hold alike of them; `names`: of the model's tensors that are alike on all ranks."""
    for label, tensors in begun(copies).items():
        for name in distinct(tensors):
            if name in names and tensors[name].numel():
                yield from boxed(f"copy {label} of {name}", name, tensors[name])
