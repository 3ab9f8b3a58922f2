"""ZeRO-1: every data rank has the whole parameters and gradients, but the optimizer's state of its share only.

Any optimizer that steps parameter by parameter can be shared out: at a step each rank lets it see the parameters that
are its own, and then sends them to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from distributed.core.errors import TaskError
from distributed.strategies.elementwise import refuse_closure
from distributed.strategies.layout import Layout

_BUCKET_BYTES = 64 * 2**20


class ShardedOptimizer:
    """Around the user's optimizer, whose groups, options and schedule stay as they are.

    `names` are those of the parameters, of which the layout knows whether they are here. The ranks of `group` must
    hold the same parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        group: dist.ProcessGroup,
        layout: Layout,
    ) -> None:
        refuse_closure(optimizer)
        self.optimizer = optimizer
        self._group, self._rank = group, dist.get_rank(group)
        here = [p for g in optimizer.param_groups for p in g["params"] if layout.is_here(names[p])]
        owners = share_out({names[p]: p.numel() for p in here}, dist.get_world_size(group))
        self._owners = owners
        self._owned = {id(p) for p in here if owners[names[p]] == self._rank}
        for p in here:  # of what was made with the optimizer itself
            if id(p) not in self._owned:
                optimizer.state.pop(p, None)
        ordered = sorted((p for p in here if p.requires_grad), key=names.__getitem__)
        self._buckets = [
            (dist.get_global_rank(group, owner), bucket)
            for owner in range(dist.get_world_size(group))
            for bucket in _buckets([p for p in ordered if owners[names[p]] == owner])
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def owns(self, name: str) -> bool:
        return self._owners[name] == self._rank

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update what is this rank's, and exchange; every rank of the group must call it."""
        assert closure is None, "a closure would be run by each rank for other parameters"
        with self._only_owned():
            self.optimizer.step()
        self._exchange()

    def state_bytes(self) -> int:
        """Of the state on this rank."""
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

    @torch.no_grad()
    def _exchange(self) -> None:
        for source, bucket in self._buckets:
            flat = torch.cat([p.reshape(-1) for p in bucket])
            dist.broadcast(flat, src=source, group=self._group)
            if source != dist.get_rank():
                parts = flat.split([p.numel() for p in bucket])
                torch._foreach_copy_([*bucket], [part.view_as(p) for part, p in zip(parts, bucket, strict=True)])


def share_out(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """A rank for each name, such that the ranks have about the same: the largest first, to whoever has least.

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
    """Put the parameters that a model has now in place of those that the optimizer was made with.

    `before` gives the name of each old parameter by its `id`. Groups, order and options stay; what is not here goes.
    """
    is_new = _is_new(optimizer)
    if optimizer.state and not is_new:
        raise TaskError(
            f"the optimizer {type(optimizer).__name__} has state of an earlier training",
            why="its state belongs to whole parameters, and each rank now has a part of them",
            do="pass a fresh optimizer, and go on from a checkpoint with resume",
        )
    now = dict(module.named_parameters(remove_duplicate=False))
    strangers = sum(id(p) not in before for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise TaskError(
            f"the optimizer {type(optimizer).__name__} has {strangers} parameters that are not the model's",
            why="only the model's parameters are shared out among the ranks",
            do="make the optimizer of model.parameters()",
        )
    for group in optimizer.param_groups:
        names = [before[id(p)] for p in group["params"]]
        group["params"] = list(dict.fromkeys(now[name] for name in names if name in now and layout.is_here(name)))
    if optimizer.state and is_new:
        _make_state_again(optimizer)
    _leave_fused(optimizer)


def _is_new(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has not stepped: Adagrad makes its state together with itself."""
    held = optimizer.state.values()
    return type(optimizer) is torch.optim.Adagrad and all(float(state["step"]) == 0 for state in held)


def _leave_fused(optimizer: torch.optim.Optimizer) -> None:
    """Torch has no fused kernel of some for parameters in parts; the others compute the same."""
    if isinstance(optimizer, torch.optim.Adagrad | torch.optim.SGD):
        for group in optimizer.param_groups:
            if any(isinstance(p, DTensor) for p in group["params"]):
                group["fused"] = None


def _make_state_again(optimizer: torch.optim.Optimizer) -> None:
    """Adagrad's first state, of the parameters that it has now."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        first = group["initial_accumulator_value"]
        for p in group["params"]:
            begins = complex(first, first) if p.is_complex() else first
            optimizer.state[p] = {"step": torch.tensor(0.0), "sum": torch.full_like(p.detach(), begins)}


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one type and device each, in order, up to a size that is worth a message of its own."""
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
