"""Changes of parameters in a forward pass: found in the first steps, and refused if replicas would diverge.

One process changes its parameter by the whole batch. Each rank changes its replica by its own share, or, if parameters
are sharded, a gathered copy that is dropped after the forward pass.
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
from distributed.runtime.session import Session

_STEPS = 2  # that are checked: a model that changes its parameters does so at every call


class ForwardChanges:
    """Finds changes by torch's version counters, without synchronizing; writes through `.data` are not seen."""

    def __init__(
        self, module: nn.Module, groups: Sequence[dist.ProcessGroup | None], session: Session, *, is_sharded: bool
    ) -> None:
        """`groups`: of ranks with the same parameters. `is_sharded`: parameters are gathered for a forward pass."""
        self._module, self._groups, self._session, self._is_sharded = module, groups, session, is_sharded
        self._left = _STEPS

    @property
    def is_done(self) -> bool:
        return not self._left

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the passes of a step; every rank must enter it."""
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
        """Allow a change that is the same on all ranks, such as a clamp of the weights."""
        if not parameters or not self._groups:
            return
        flags = torch.tensor(changed, dtype=torch.int32, device=parameters[0].device)
        self._max(flags)
        for name, parameter, flag in zip(names, parameters, flags.tolist(), strict=True):
            if flag:
                digest = fingerprint(parameter)
                found = torch.stack([digest, -digest])
                self._max(found)
                largest, smallest = found.tolist()
                if largest != -smallest:
                    raise _diverged(name)

    def _max(self, values: torch.Tensor) -> None:
        for group in self._groups:
            self._session.max("parameters that a forward pass changes", values, group)


@contextmanager
def _refusing_changes(module: nn.Module) -> Iterator[None]:
    """Watch gathered parameters, through the modules that hold them."""
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


def _diverged(name: str) -> TaskError:
    return TaskError(
        f"the forward pass changes the parameter {name}, and each rank by its own share of the batch",
        why="one process would change it by all samples; the replicas have diverged, and gradients no longer fit",
        do="keep what forward changes in a buffer, or change the parameter between steps, equally on all ranks",
    )


def _was_lost(name: str) -> TaskError:
    return TaskError(
        f"the forward pass changes the parameter {name}, which is gathered for it and dropped after it",
        why="parameters are sharded over ranks, and only the optimizer's step changes the shards",
        do="change it between steps, compute with a changed copy, or use backend='pytorch-ddp'",
    )
