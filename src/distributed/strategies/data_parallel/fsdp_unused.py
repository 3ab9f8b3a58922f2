"""Parameters that a backward pass leaves out under FSDP: zeros are reduced for them, so that ranks stay in step.

FSDP reduces the gradients of a block as one message, without those that are missing. Where ranks have left out
different ones, messages of different lengths meet, or of the same length and other parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distributed.strategies.used_parameters import changed


class ShardedUse:
    """What this rank's backward passes of a step have used of sharded parameters, by name."""

    def __init__(
        self,
        roots: Iterable[nn.Module],
        parameters: Mapping[str, nn.Parameter],
        settled: Callable[[], frozenset[str] | None],
        rank: int,
    ) -> None:
        """`roots`: what is called in training. `settled`: the parameters that any rank uses; None: all are reduced, as
        that is not known yet."""
        self._parameters, self._settled, self._rank = parameters, settled, rank
        self._used: set[str] = set()
        names = {id(parameter): name for name, parameter in parameters.items()}
        tracked: set[str] = set()
        for group in _groups(roots):
            members = [(names[id(p.sharded_param)], p) for p in group.fsdp_params if id(p.sharded_param) in names]
            group.post_backward = self._before(group, members)
            tracked.update(name for name, _ in members)
        assert tracked == parameters.keys(), f"not sharded: {sorted(parameters.keys() - tracked)}"

    def take(self) -> list[bool]:
        """Of the step that ends, in the order of the parameters."""
        used, self._used = self._used, set()
        return [name in used for name in self._parameters]

    def _before(self, group: Any, members: list[tuple[str, Any]]) -> Callable[..., None]:
        """What the group calls when its gradients are there: torch's own, with what was left out."""
        post_backward = group.post_backward

        def complete(*args: Any) -> None:
            settled = self._settled()
            for name, parameter in members:
                if not hasattr(parameter, "_unsharded_param"):  # its block has never run
                    continue
                if parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None:
                    if settled is not None and name not in settled:  # the other ranks would not reduce it
                        raise changed([], [name], self._rank)
                    self._used.add(name)
                elif group.reduce_grads and (settled is None or name in settled):
                    parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
            post_backward(*args)

        return complete


def _groups(roots: Iterable[nn.Module]) -> Iterator[Any]:
    """torch's groups of parameters that are gathered and reduced together."""
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    for sharded in (module for module in modules if isinstance(module, FSDPModule)):
        state = sharded._get_fsdp_state()
        found = getattr(state, "_fsdp_param_groups", None)
        if found is None:  # before torch 2.13 there was one at most
            found = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        yield from found
