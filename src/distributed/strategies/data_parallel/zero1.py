"""ZeRO-1: every data-parallel rank holds all parameters and gradients, but a shard of the optimizer's state.

Any optimizer that steps each parameter separately can be sharded: in a step each rank updates the parameters that it
owns, and then broadcasts them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from distributed.core.errors import TaskError
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import foreach_copy_
from distributed.runtime.torch_module_compat import StepHooks, set_step_hooks, step_hooks
from distributed.strategies.checks.elementwise import refuse_closure
from distributed.strategies.placement import Layout

_BUCKET_BYTES = 64 * 2**20


class ShardedOptimizer:
    """Wraps the user's optimizer, whose groups, options and schedule stay unchanged.

    `names` are those of the parameters; the layout knows which of them are on this rank. The ranks of `group` must hold
    the same parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        group: dist.ProcessGroup,
        layout: Layout,
        session: Session,
    ) -> None:
        refuse_closure(optimizer, "zero_stage=1")
        self.optimizer = optimizer
        self._group, self._rank, self._session = group, dist.get_rank(group), session
        here = [p for g in optimizer.param_groups for p in g["params"] if layout.is_here(names[p])]
        # By whole sizes: ranks with other slices of a parameter choose the same owner.
        sizes = {names[p]: math.prod(layout.shape(names[p])) for p in here}
        owners = share_out(sizes, dist.get_world_size(group))
        self._owners = owners
        self._owned = {id(p) for p in here if owners[names[p]] == self._rank}
        for p in here:  # state that was made together with the optimizer
            if id(p) not in self._owned:
                optimizer.state.pop(p, None)
        self._ordered = sorted(here, key=names.__getitem__)
        self._names = names
        self.choose_trained()

    def choose_trained(self) -> None:
        """Exchange the parameters that require a gradient by now."""
        trained = [parameter for parameter in self._ordered if parameter.requires_grad]
        self._buckets = [
            (dist.get_global_rank(self._group, owner), bucket)
            for owner in range(dist.get_world_size(self._group))
            for bucket in _buckets([p for p in trained if self._owners[self._names[p]] == owner])
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def owns(self, name: str) -> bool:
        return self._owners[name] == self._rank

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update the parameters of this rank, and exchange; every rank of the group must call it."""
        assert closure is None, "each rank would run the closure for other parameters"
        for hook in list(step_hooks(self.optimizer).before.values()):
            hook(self.optimizer, (), {})
        with self._only_owned(), self._without_hooks():
            self.optimizer.step()
        self._exchange()
        for hook in list(step_hooks(self.optimizer).after.values()):
            hook(self.optimizer, (), {})

    def state_bytes(self) -> int:
        """The bytes of the optimizer state on this rank."""
        tensors = (t for held in self.optimizer.state.values() for t in held.values() if isinstance(t, torch.Tensor))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @contextmanager
    def _only_owned(self) -> Iterator[None]:
        whole = [group["params"] for group in self.optimizer.param_groups]
        try:
            for group in self.optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in self._owned]
            yield
        finally:
            for group, parameters in zip(self.optimizer.param_groups, whole, strict=True):
                group["params"] = parameters

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """Call the user's hooks with all parameters: before the step, and after the exchange."""
        hooks = step_hooks(self.optimizer)
        set_step_hooks(self.optimizer, StepHooks(OrderedDict(), OrderedDict()))
        try:
            yield
        finally:
            set_step_hooks(self.optimizer, hooks)

    @torch.no_grad()
    def _exchange(self) -> None:
        for source, bucket in self._buckets:
            flat = torch.cat([p.reshape(-1) for p in bucket])
            self._session.send_from("stepped parameters", source, flat, self._group)
            if source != self._session.rank:
                parts = flat.split([p.numel() for p in bucket])
                foreach_copy_([*bucket], [part.view_as(p) for part, p in zip(parts, bucket, strict=True)])


def share_out(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """A rank for each name, balanced by size: the largest first, each to the rank with the least.

    >>> share_out({"a": 4, "b": 3, "c": 2}, 2)
    {'a': 0, 'b': 1, 'c': 1}
    """
    loads = [0] * ranks
    found = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        found[name] = rank
        loads[rank] += sizes[name]
    return found


def rebind(optimizer: torch.optim.Optimizer, before: Mapping[int, str], module: nn.Module, layout: Layout) -> None:
    """Replace the parameters that an optimizer was made with by those that the model has now.

    `before` gives the name of each old parameter by its `id`. Groups, order and options stay; parameters of other ranks
    are removed.
    """
    is_new = _is_new(optimizer)
    if optimizer.state and not is_new:
        raise TaskError(
            f"the optimizer {type(optimizer).__name__} has state of an earlier training",
            why="its state belongs to whole parameters, and each rank now holds shards of them",
            do="pass a new optimizer, and resume from a checkpoint: resume_from_checkpoint=true",
        )
    now = dict(module.named_parameters(remove_duplicate=False))
    strangers = sum(id(p) not in before for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise TaskError(
            f"the optimizer {type(optimizer).__name__} has {strangers} parameters that are not the model's",
            why="only the model's parameters are sharded over the ranks",
            do="make the optimizer from model.parameters()",
        )
    for group in optimizer.param_groups:
        names = [before[id(p)] for p in group["params"]]
        group["params"] = list(dict.fromkeys(now[name] for name in names if name in now and layout.is_here(name)))
    if optimizer.state and is_new:
        _make_state_again(optimizer)
    _leave_fused(optimizer)


def _is_new(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has not stepped yet: Adagrad makes its state at construction."""
    held = optimizer.state.values()
    return type(optimizer) is torch.optim.Adagrad and all(float(state["step"]) == 0 for state in held)


def _leave_fused(optimizer: torch.optim.Optimizer) -> None:
    """Turn off fused kernels that torch does not have for sharded parameters; others compute the same."""
    if isinstance(optimizer, torch.optim.Adagrad | torch.optim.SGD):
        for group in optimizer.param_groups:
            if any(isinstance(p, DTensor) for p in group["params"]):
                group["fused"] = None


def _make_state_again(optimizer: torch.optim.Optimizer) -> None:
    """Make Adagrad's first state for its current parameters."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        first = group["initial_accumulator_value"]
        for p in group["params"]:
            begins = complex(first, first) if p.is_complex() else first
            optimizer.state[p] = {"step": torch.tensor(0.0), "sum": torch.full_like(p.detach(), begins)}


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Buckets of parameters of one type and device, in order, up to the size of one efficient message."""
    found: list[list[nn.Parameter]] = []
    open_ones: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        nbytes = parameter.numel() * parameter.element_size()
        bucket, held = open_ones.get(kind, ([], 0))
        if not bucket or held + nbytes > _BUCKET_BYTES:
            bucket, held = [], 0
            found.append(bucket)
        bucket.append(parameter)
        open_ones[kind] = (bucket, held + nbytes)
    return found
