"""Unused parameters under FSDP: zeros are reduced for them, so that all ranks make the same reduction.

FSDP reduces the gradients of a block as one message, without missing ones. If ranks left out different parameters,
their messages would differ in length, or mix different parameters. And the order in which ranks add a number depends
on its place in the message: a resumed run must send what the first one sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distributed.runtime.torch_compat import UNSHARDED, fsdp_groups
from distributed.strategies.data_parallel.used_parameters import changed


class ShardedUse:
    """The sharded parameters that this rank's backward passes of a step have used, by name."""

    def __init__(
        self,
        roots: Iterable[nn.Module],
        parameters: Mapping[str, nn.Parameter],
        settled: Callable[[], frozenset[str] | None],
        rank: int,
    ) -> None:
        """`roots`: the modules called in training. `settled`: the parameters that any rank uses; None: unknown."""
        self._parameters, self._settled, self._rank = parameters, settled, rank
        self._used: set[str] = set()
        self._watched: list[Any] = []
        names = {id(parameter): name for name, parameter in parameters.items()}
        tracked: set[str] = set()
        for group in _groups(roots):
            members = [(names[id(p.sharded_param)], p) for p in group.fsdp_params if id(p.sharded_param) in names]
            group.post_backward = self._before(group, members)
            self._watched.append(group)
            tracked.update(name for name, _ in members)
        assert tracked == parameters.keys(), f"not sharded: {sorted(parameters.keys() - tracked)}"

    def close(self) -> None:
        """Leave torch's own callbacks."""
        for group in self._watched:
            del group.post_backward

    def take(self) -> list[bool]:
        """Whether the step used each parameter, in the order of the parameters."""
        used, self._used = self._used, set()
        return [name in used for name in self._parameters]

    def _before(self, group: Any, members: list[tuple[str, Any]]) -> Callable[..., None]:
        """Replace the group's callback for complete gradients by torch's own plus zeros for unused parameters."""
        post_backward = group.post_backward

        def complete(*args: Any) -> None:
            settled = self._settled()
            for name, parameter in members:
                if not hasattr(parameter, UNSHARDED):  # its block has never run
                    continue
                if parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None:
                    if settled is not None and name not in settled:  # the other ranks would not reduce it
                        raise changed([], [name], self._rank)
                    self._used.add(name)
                elif group.reduce_grads and parameter.sharded_param.requires_grad:
                    # Also for parameters that no rank uses: the first step did not know that.
                    parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
            post_backward(*args)

        return complete


def _groups(roots: Iterable[nn.Module]) -> Iterator[Any]:
    """torch's groups of parameters that are gathered and reduced together."""
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    for sharded in (module for module in modules if isinstance(module, FSDPModule)):
        yield from fsdp_groups(sharded)
