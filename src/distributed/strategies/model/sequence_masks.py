"""Dropout masks in blocks that run on a shard of a sequence: masks along the sequence differ between ranks.

A mask with an element for each position (dropout of hidden states) must differ between shards of the sequence. A
decision for a whole sample or block (stochastic depth, a skipped layer) must be equal. The shape shows which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from distributed.core.errors import PlanError
from distributed.runtime.torch_compat import saved_tensor_hooks
from distributed.strategies.model.random_streams import RankStream, own_numbers

_OF_FIRST = (
    *(F.dropout, F.alpha_dropout, F.rrelu, F.gumbel_softmax, torch.dropout, torch.dropout_, torch.alpha_dropout),
    *(torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, torch.normal, torch.poisson),
    *(torch.multinomial, torch.Tensor.bernoulli, torch.Tensor.multinomial),
    *(getattr(torch.Tensor, f"{name}_") for name in ("bernoulli", "uniform", "normal", "random", "exponential")),
    *(getattr(torch.Tensor, f"{name}_") for name in ("cauchy", "log_normal", "geometric")),
)
_OF_FEATURES = (F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, torch.feature_dropout)
_OF_SIZES = (torch.rand, torch.randn, torch.randint, torch.randperm)


class _Block(NamedTuple):
    """Where a block is called."""

    length: int  # of the part of the sequence
    batch: int
    hooks: Any  # those of autograd that are in force
    has_gradient: bool


class SequenceMasks:
    """The masks of one rank with a shard of a sequence."""

    def __init__(self, rank: int, dim: int) -> None:
        """`dim`: the dimension of hidden states that holds the positions."""
        self._rank, self._dim = rank, dim
        self._block: _Block | None = None
        self._stream: RankStream | None = None

    @contextmanager
    def running(self, hidden: torch.Tensor, stream: RankStream | None = None) -> Iterator[None]:
        """A scope for a block on this shard's hidden states. `stream`: of a cut width in it, with all positions."""
        before, self._stream = self._block, stream
        self._block = _Block(
            hidden.shape[self._dim], hidden.shape[1 - self._dim], saved_tensor_hooks(), torch.is_grad_enabled()
        )
        try:
            yield
        finally:
            self._block = before

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function, from this rank's own stream if it draws a mask along the sequence."""
        block = self._block
        shape = None if block is None else _mask_of(func, args, kwargs)
        if block is None or shape is None or not is_along(shape, block.length, block.batch, self._dim):
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        if self._stream is not None and self._stream.has_begun(device):
            return func(*args, **kwargs)
        with self.own(device):
            return func(*args, **kwargs)

    @contextmanager
    def own(self, device: torch.device) -> Iterator[None]:
        """A scope for a draw along the sequence."""
        block = self._block
        if block is not None and (block.hooks != saved_tensor_hooks() or block.has_gradient != torch.is_grad_enabled()):
            raise PlanError(
                "a block draws random numbers in a part of it that is computed again in the backward pass",
                why="on a sharded sequence each rank draws its own numbers, and only a block that is recomputed as a "
                "whole draws the same ones again",
                do="set activation_checkpointing=true, which recomputes whole blocks, in place of "
                "torch.utils.checkpoint within them, or set dropout to 0",
            )
        with own_numbers(self._rank, device):
            yield


class MaskMode(TorchFunctionMode):
    """In which functions are called by `SequenceMasks`."""

    def __init__(self, masks: SequenceMasks) -> None:
        super().__init__()
        self._masks = masks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._masks.call(func, args, kwargs or {})


def is_along(shape: Sequence[int], length: int, batch: int, dim: int = 1) -> bool:
    """Whether a mask has an element for each of `length` positions, which hidden states have in `dim`.

    >>> is_along((2, 8, 32), 8, 2), is_along((2, 4, 8, 8), 8, 2), is_along((16, 32), 8, 2)
    (True, True, True)
    >>> is_along((8, 1, 1), 8, 8), is_along((2, 1, 32), 8, 2), is_along((), 8, 2)
    (False, False, False)
    """
    large = [at for at, size in enumerate(shape) if size > 1]
    if len(shape) == 3:
        return shape[dim] == length and (length > 1 or len(large) > 1)
    if len(shape) > 3:  # with heads; the batch is first, for any layout of the hidden states
        return length in shape[1:] and len(large) > (0 if length > 1 else 1)
    if len(shape) == 2 and tuple(shape) in ((batch, length), (length, batch)):
        return True
    if len(shape) in (1, 2) and shape[0] == length == batch:
        raise PlanError(
            f"a block draws random numbers of shape {tuple(shape)}, for {batch} samples of {length} positions",
            why=f"samples and positions are both {length}, so it is unknown for which of them the numbers are drawn",
            do="use another batch_size, or draw them in a shape with a dimension for each",
        )
    return len(shape) in (1, 2) and length > 1 and shape[0] in (length, batch * length)


def _mask_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """The shape of a function's random numbers; None if it draws none."""
    if kwargs.get("training") is False or kwargs.get("p") == 0:
        return None
    if kwargs.get("generator") is not None:  # a user's own generator
        return None
    if func in _OF_FIRST:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        return None if first is None else tuple(first.shape)
    if func in _OF_FEATURES:
        shape = tuple((args[0] if args else kwargs["input"]).shape)
        return (*shape[:2], *[1] * (len(shape) - 2))
    if func in _OF_SIZES:
        return _sizes(func, args, kwargs)
    return None


def _sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    if "size" in kwargs:
        return tuple(kwargs["size"])
    nested = next((value for value in args if isinstance(value, tuple | list)), None)
    if nested is not None:
        return tuple(nested)
    return (int(args[0]),) if func is torch.randperm else tuple(int(value) for value in args)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    return torch.device(kwargs.get("device") or "cpu") if first is None else first.device
