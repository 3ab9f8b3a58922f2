"""Changes of parameters in a forward pass: found in the first steps, and refused where ranks would go apart by them.

One process changes its one parameter by what the whole batch says. Each rank changes its copy by its own share, or, if
parameters are sharded, one that is dropped after the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from distributed.core.errors import TaskError
from distributed.runtime.fingerprint import fingerprint

_STEPS = 2  # that are looked at: a model that changes its parameters does so when it is called


class ForwardChanges:
    """By torch's count of writes to a tensor: a look waits for no device, and writes through `.data` do not show."""

    def __init__(self, module: nn.Module, groups: Sequence[dist.ProcessGroup | None], *, is_sharded: bool) -> None:
        """`groups`: of ranks with the same parameters. `is_sharded`: these are gathered for a forward pass."""
        self._module, self._groups, self._is_sharded = module, groups, is_sharded
        self._left = _STEPS

    @property
    def is_done(self) -> bool:
        return not self._left

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the passes of a step, in which every rank is."""
        self._left -= 1
        if self._is_sharded:
            with _refusing_changes(self._module):
                yield
            return
        before = [p._version for p in self._module.parameters()]
        yield
        named = list(self._module.named_parameters())
        changed = [int(p._version != version) for (_, p), version in zip(named, before, strict=True)]
        self._compare([name for name, _ in named], [p for _, p in named], changed)

    def _compare(self, names: Sequence[str], parameters: Sequence[torch.Tensor], changed: Sequence[int]) -> None:
        """A change that is the same on all ranks is that of one process: a clamp of the weights, for one."""
        if not parameters or not self._groups:
            return
        flags = torch.tensor(changed, dtype=torch.int32, device=parameters[0].device)
        _max(flags, self._groups)
        for name, parameter, flag in zip(names, parameters, flags.tolist(), strict=True):
            if flag:
                digest = fingerprint(parameter)
                found = torch.stack([digest, -digest])
                _max(found, self._groups)
                largest, smallest = found.tolist()
                if largest != -smallest:
                    raise _went_apart(name)


@contextmanager
def _refusing_changes(module: nn.Module) -> Iterator[None]:
    """While parameters are gathered: by the modules that hold them."""
    names = {id(m): path for path, m in module.named_modules()}
    versions: dict[int, list[tuple[str, torch.Tensor, int]]] = {}

    def note(m: nn.Module, args: Any) -> None:
        if id(m) in names and m._parameters:
            versions[id(m)] = [(name, p, p._version) for name, p in m._parameters.items() if p is not None]

    def look(m: nn.Module, args: Any, output: Any) -> None:
        for name, parameter, version in versions.pop(id(m), ()):
            if m._parameters.get(name) is parameter and parameter._version != version:
                raise _was_lost(f"{names[id(m)]}.{name}".lstrip("."))

    hooks = [register_module_forward_pre_hook(note), register_module_forward_hook(look)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _max(values: torch.Tensor, groups: Sequence[dist.ProcessGroup | None]) -> None:
    for group in groups:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)


def _went_apart(name: str) -> TaskError:
    return TaskError(
        f"the forward pass changes the parameter {name}, and each rank by its own share of the batch",
        why="one process would change it by all samples; the ranks have gone apart, and gradients no longer fit",
        do="keep what forward changes in a buffer, or change the parameter between steps, by what all ranks agree on",
    )


def _was_lost(name: str) -> TaskError:
    return TaskError(
        f"the forward pass changes the parameter {name}, which is gathered for it and dropped after it",
        why="parameters are sharded over ranks, and only the optimizer's step changes the shards",
        do="change it between steps, compute with a changed copy, or use backend='pytorch-ddp'",
    )
