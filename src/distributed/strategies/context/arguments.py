"""Arguments of blocks along a sequence: the dimension of each argument that holds the positions.

The dimension is found by length at the first call, verified, and then fixed: in a later batch another dimension may
happen to have the length of the sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import torch

from distributed.core.errors import PlanError

_MOST_CHOICES = 16  # choices of dimensions that are tried before a model is refused
_Part = Callable[[torch.Tensor, int], torch.Tensor]


class Arguments(NamedTuple):
    """The arguments of one call of a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
        """The arguments with every tensor mapped, also those in tuples, lists and dicts."""
        return self.map_named([], lambda _, tensor: change(tensor))

    def map_named(self, names: Sequence[str], change: Callable[[str, torch.Tensor], torch.Tensor]) -> Arguments:
        """The arguments by name; `names` are those of positional ones."""
        known = [*names[: len(self.args)], *(f"*{at}" for at in range(len(names), len(self.args)))]
        args = tuple(_map(name, value, change) for name, value in zip(known, self.args, strict=True))
        return Arguments(args, {name: _map(name, value, change) for name, value in self.kwargs.items()})

    @property
    def hidden(self) -> torch.Tensor:
        return first_tensor((*self.args, *self.kwargs.values()))


class SequenceDims:
    """The sequence dimensions of each block's arguments. `hidden_dim` is that of the hidden states."""

    def __init__(self, hidden_dim: int) -> None:
        self._hidden = hidden_dim
        self._choice: dict[str, int] = {}  # by argument, among its candidates
        self._candidates: dict[tuple[int, str], list[int | None]] = {}
        self._known: dict[int, dict[str, _Known]] = {}  # by block and argument

    def choices(self) -> Iterator[None]:
        """Tries the readings of the arguments in sequence, the likeliest first."""
        self._choice, self._known = {}, {}
        yield
        most: dict[str, int] = {}
        for (_, name), candidates in self._candidates.items():
            most[name] = max(most.get(name, 1), len(candidates))
        for picks in islice(product(*map(range, most.values())), 1, _MOST_CHOICES):
            self._choice, self._known = dict(zip(most, picks, strict=True)), {}
            yield

    def shorten(self, block: int, names: Sequence[str], given: Arguments, whole: int, length: int) -> Arguments:
        """A block's arguments for the first positions only, without the hidden states."""
        hidden = given.hidden

        def shorten_one(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor is hidden:
                return tensor
            dim = None if _is_mask(name, tensor) else self._pick(block, name, tensor, whole)
            if dim is not None:
                return tensor.narrow(dim, 0, length)
            if _is_mask(name, tensor) or _is_square(tensor, whole):
                last = range(max(tensor.dim() - 2, 0), tensor.dim())
                return tensor[(..., *(slice(length if tensor.shape[at] == whole else None) for at in last))]
            return tensor

        return given.map_named(names, shorten_one)

    def cut(self, block: int, names: Sequence[str], given: Arguments, whole: int, part: _Part) -> Arguments:
        """A block's arguments, cut by `part` along the positions, without the hidden states. Masks stay whole."""
        hidden, is_first = given.hidden, block not in self._known
        known = self._known.setdefault(block, {})

        def cut_one(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor is hidden or _is_mask(name, tensor):
                return tensor
            if is_first:
                known[name] = _Known(tensor.dim(), self._pick(block, name, tensor, whole))
            elif name not in known:
                raise _unlike(
                    name, tensor, whole, "it was not given in the first batch, on which the model was checked"
                )
            dims, dim = known[name]
            if dim is None:
                return tensor
            if tensor.dim() != dims or tensor.shape[dim] != whole:
                raise _unlike(name, tensor, whole, f"in the first batch its positions were in dimension {dim}")
            return part(tensor, dim)

        return given.map_named(names, cut_one)

    def _pick(self, block: int, name: str, tensor: torch.Tensor, whole: int) -> int | None:
        """The dimension to cut; None: all ranks need the whole, or an earlier block has cut it already."""
        candidates = self._candidates.setdefault((block, name), _find_candidates(tensor, whole, self._hidden))
        at = self._choice.get(name, 0)
        dim = candidates[at] if at < len(candidates) else None
        return None if dim is None or tensor.shape[dim] != whole else dim


class _Known(NamedTuple):
    dims: int  # how many it has
    dim: int | None  # the one with the positions


def argument_names(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def first_tensor(values: Iterable[Any]) -> torch.Tensor:
    """The hidden states among a block's arguments, or in its output."""
    for part in (part for value in values for part in (value if isinstance(value, tuple) else (value,))):
        if isinstance(part, torch.Tensor) and part.is_floating_point() and part.dim() > 1:
            return part
    raise PlanError(
        "context_parallel does not fit this model: a block takes or returns no hidden states",
        why="a block's hidden states must be the first floating-point tensor of its arguments and of its output",
        do="set context_parallel=1",
    )


def change_first(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A block's output, with its hidden states replaced."""
    if isinstance(result, torch.Tensor):
        return change(result)
    hidden = first_tensor((result,))
    return tuple(change(value) if value is hidden else value for value in result)


def _map(name: str, value: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(name, value)
    if type(value) in (tuple, list):
        return type(value)(_map(f"{name}[{at}]", part, change) for at, part in enumerate(value))
    if type(value) is dict:
        return {key: _map(f"{name}[{key!r}]", part, change) for key, part in value.items()}
    return value


def _find_candidates(tensor: torch.Tensor, whole: int, hidden_dim: int) -> list[int | None]:
    """The dimensions that may hold the positions, the likeliest first."""
    shape = tuple(tensor.shape)
    order = [hidden_dim, 0, len(shape) - 2]
    if not (tensor.is_floating_point() or tensor.is_complex()):
        order.append(len(shape) - 1)  # numbers of positions
    dims = [dim for dim in dict.fromkeys(order) if 0 <= dim < len(shape) and shape[dim] == whole]
    if not dims:
        return [None]
    return [None, *dims] if _is_square(tensor, whole) else [*dims, None]


def _is_mask(name: str, tensor: torch.Tensor) -> bool:
    return "mask" in name or tensor.dtype == torch.bool


def _is_square(tensor: torch.Tensor, whole: int) -> bool:
    """Whether a tensor is of positions by positions, like a bias of attention."""
    return tuple(tensor.shape[-2:]) == (whole, whole)


def _unlike(name: str, tensor: torch.Tensor, whole: int, why: str) -> PlanError:
    return PlanError(
        f"the blocks' argument {name!r} has the shape {tuple(tensor.shape)}, for a sequence of {whole} positions, and "
        "context_parallel cannot tell which part of it a rank needs",
        why=why,
        do="give the blocks the same arguments, along the same dimensions, in every batch, or set context_parallel=1",
    )
