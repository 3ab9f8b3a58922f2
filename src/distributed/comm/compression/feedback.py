"""Error feedback: what a compressor has not sent of a gradient joins the gradient of the next step.

Each rank keeps its own, in units of the whole batch's gradient, whatever a loss was scaled by. A step that is not
taken leaves it as it was. Its mean over the ranks is what training still has to see: other numbers of ranks take it
over as that mean, each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from distributed.runtime.tensor_shard import Box, TensorShard, whole_box

StateTree = dict[str, Any]
FEEDBACK = "compression"  # a component of a checkpoint


class ErrorFeedback:
    """What this rank has not sent yet, by the names of parameters, as it was after the last step that was taken."""

    def __init__(self) -> None:
        self.step = 0  # steps taken
        self.left: dict[str, torch.Tensor] = {}  # shaped and laid out as the parameter is
        self.basis: dict[str, torch.Tensor] = {}  # what a compressor keeps besides: all ranks have the same
        self._next_left: dict[str, torch.Tensor] = {}
        self._next_basis: dict[str, torch.Tensor] = {}

    def follow(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Keep what is left of these, too: at first nothing."""
        for name, parameter in parameters.items():
            if name not in self.left:
                self.left[name] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)

    def flat(self, name: str) -> torch.Tensor | None:
        """What is left of one parameter's gradient, in the order in which it lies in memory."""
        kept = self.left.get(name)
        return None if kept is None else flat(kept)

    def keep(self, name: str, left: torch.Tensor, basis: torch.Tensor | None = None) -> None:
        """What is left once the current step is taken; `left` is flat."""
        self._next_left[name] = left
        if basis is not None:
            self._next_basis[name] = basis

    def forget_step(self) -> None:
        """The current step is not taken, or another one begins."""
        self._next_left, self._next_basis = {}, {}

    def take_step(self) -> None:
        """The current step is taken."""
        for name, value in self._next_left.items():
            flat(self.left[name]).copy_(value)
        self.basis |= self._next_basis
        self.step += 1
        self.forget_step()

    def state(self, rank: int, ranks: int) -> StateTree:
        """As checkpoints have it: a row of what is left for each rank."""
        left = {}
        for name, value in self.left.items():
            row = value.contiguous()[None]
            shape = (ranks, *value.shape)
            left[name] = TensorShard(shape, row.dtype, ((row_box(rank, shape), row),))
        return {"step": self.step, "left": left, "basis": dict(self.basis)}

    def load(self, tree: StateTree, like: Mapping[str, torch.Tensor]) -> None:
        """What `state` gave, on any number of ranks; {}: nothing is left. `like`: parameters by name."""
        self.forget_step()
        self.step, self.basis = int(tree.get("step", 0)), {}
        for value in self.left.values():
            value.zero_()
        saved = {name: value for name, value in tree.get("left", {}).items() if name in like}
        self.follow({name: like[name] for name in saved})
        for name, value in saved.items():
            rows = value.pieces[0][1] if isinstance(value, TensorShard) else value
            self.left[name].copy_(rows.mean(0, dtype=torch.float32))  # of one row, that row
        for name, value in tree.get("basis", {}).items():
            if name in like:
                self.basis[name] = value.to(like[name].device)


def row_box(rank: int, shape: tuple[int, ...]) -> Box:
    """
    >>> row_box(1, (3, 4))
    ((1, 2), (0, 4))
    """
    return ((rank, rank + 1), *whole_box(shape[1:]))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's numbers in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
