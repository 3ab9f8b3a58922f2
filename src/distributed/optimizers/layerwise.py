"""LayerwiseOptimizer: the step of a parameter depends on norms of all of it, also where ranks hold shards of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.runtime.tensor_shard import local
from distributed.runtime.torch_compat import foreach_norm


class ShardSums(Protocol):
    """What a strategy whose ranks hold shards of parameters gives an optimizer that declares `needs_shard_sums`."""

    def __call__(self, parameters: Sequence[torch.Tensor], sums: torch.Tensor) -> torch.Tensor:
        """`sums[:, n]` over this rank's elements of parameter n become those over all of its elements, in place.

        Every rank that holds a shard of one of them calls it with the same parameters.
        """


class Stepped(NamedTuple):
    """A parameter with its gradient and its group's options."""

    parameter: nn.Parameter
    gradient: torch.Tensor
    group: dict[str, Any]

    @property
    def is_adapted(self) -> bool:
        """Whether its rate follows its norms; where `skip_vectors` is set, biases and the weights of norms do not."""
        return self.parameter.dim() > 1 or not self.group["skip_vectors"]

    @property
    def decay(self) -> float:
        return float(self.group["weight_decay"]) if self.is_adapted else 0.0


class LayerwiseOptimizer(torch.optim.Optimizer):
    """The base of LARS and LAMB."""

    needs_shard_sums = True  # by which a strategy knows that it must set `sum_shards` before it cuts parameters
    sum_shards: ShardSums | None = None  # None: this process holds whole parameters

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; every rank that holds a shard of the parameters takes it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = self._trained()
        if trained:
            self._take(trained)
        return loss

    def _take(self, trained: list[Stepped]) -> None:
        """The step of these parameters, of which there is one at least."""
        raise NotImplementedError

    def _trained(self) -> list[Stepped]:
        """The parameters that have a gradient, in order."""
        pairs = ((parameter, group) for group in self.param_groups for parameter in group["params"])
        found = [Stepped(p, p.grad, group) for p, group in pairs if p.grad is not None]
        for one in found:
            self._check(one.parameter, one.gradient)
        return found

    def whole_norms(self, trained: Sequence[Stepped], *columns: Sequence[torch.Tensor]) -> torch.Tensor:
        """For each column of local tensors, one a parameter, the norms over all elements: a row each, in fp64."""
        device = columns[0][0].device
        squares = torch.stack(
            [torch.stack([norm.to(device) for norm in _norms(column)]).double().square() for column in columns]
        )
        if self.sum_shards is not None:
            squares = self.sum_shards([one.parameter for one in trained], squares)
        return squares.sqrt()

    def _check(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        name = type(self).__name__
        if gradient.is_sparse:
            why, do = "the norm of a parameter goes over all of its rows", "make the embedding with sparse=False"
            raise TaskError(f"{name} was given a sparse gradient", why=why, do=do)
        if parameter.is_complex():
            raise TaskError(
                f"{name} was given complex parameters",
                why="its step is defined for real ones",
                do="use torch.optim.AdamW",
            )
        if self.sum_shards is None and local(parameter).numel() != parameter.numel():
            raise TaskError(
                f"{name} was given shards of parameters, and nothing that sums over them",
                why="the norm of a shard is not that of its parameter",
                do="let distributed.Trainer or distributed.start shard the model",
            )


def _norms(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return foreach_norm(list(tensors), 2, dtype=torch.float64 if wide else torch.float32)


def ratio_or_one(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Their ratio, and 1 where one of them is 0: a layer of zeros, or one without a gradient.

    >>> ratio_or_one(torch.tensor([2.0, 0.0, 1.0]), torch.tensor([4.0, 1.0, 0.0])).tolist()
    [0.5, 1.0, 1.0]
    """
    is_defined = (numerator > 0) & (denominator > 0)
    return torch.where(is_defined, numerator / torch.where(is_defined, denominator, 1.0), 1.0)


def check_options(kind: str, *, lr: float, weight_decay: float, eps: float) -> None:
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
        if value < 0:
            raise ValueError(f"{kind}: {name}={value} should be 0 or greater")
