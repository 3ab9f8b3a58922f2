"""Whether an optimizer's step can be taken in parts, tried with a few numbers before a run begins.

Ranks that hold parts of a parameter let the optimizer see these alone. That comes to the step of one process if it
takes each element by itself. Where ranks hold whole parameters and share them out, it must take each by itself.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from distributed.core.errors import TaskError

Cut = Literal["parameters", "rows", "columns", "flat"]

# Of torch's own, and of exactly these classes: a subclass may do more.
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
_SAYS_SO = "steps_elementwise"  # an attribute by which an optimizer vouches for itself
_LENGTHS = (96, 64, 3, 2)  # of the tensors that are tried: more numbers than a block of those that quantize has
_STEPS = 3
_NEAR = 1e-3  # of the largest change: rounding is far below, and norms of halves are far above
_PARTS: dict[Cut, str] = {
    "parameters": "ranks share out the parameters, and it looks at several of them together",
    "rows": "each rank has some rows of a parameter, and it looks at more than single elements",
    "columns": "each rank has some columns of a parameter, and it looks at more than single elements",
    "flat": "each rank has a range of the parameters' numbers, and it looks at more than single elements",
}


def refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """One that calls the model itself has no gradients of the global batch to step by."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TaskError(
            f"the optimizer {type(optimizer).__name__} cannot be trained with",
            why="its step needs a closure, by which it calls the model itself, several times in a step",
            do="use an optimizer that steps by gradients, such as AdamW or SGD",
        )


def refuse_uncuttable(optimizer: torch.optim.Optimizer, cuts: Sequence[Cut], setting: str) -> None:
    """Raise why this optimizer cannot step in parts as `setting` has them; nothing where it can."""
    why = why_not_cut(optimizer, cuts)
    if why:
        raise TaskError(
            f"{type(optimizer).__name__} cannot be trained with {setting}",
            why=why,
            do="use AdamW, SGD or another optimizer that steps each element by itself, or backend='pytorch-ddp'; one "
            f"of your own that does so can say it: {_SAYS_SO} = True in its class",
        )


def why_not_cut(optimizer: torch.optim.Optimizer, cuts: Sequence[Cut]) -> str:
    """Why its step is another one in parts; empty where it is the same.

    >>> why_not_cut(torch.optim.AdamW(nn.Linear(2, 2).parameters()), ["rows"])
    ''
    >>> why_not_cut(torch.optim.Adafactor(nn.Linear(2, 2).parameters()), ["rows"])
    'each rank has some rows of a parameter, and it looks at more than single elements'
    """
    if type(optimizer) in _ELEMENTWISE or not cuts or getattr(optimizer, _SAYS_SO, False):
        return ""
    shapes = [_shapes_of(group) for group in optimizer.param_groups]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            whole = _stepped(optimizer, [[_numbers(shape) for shape in group] for group in shapes])
            return next((_PARTS[cut] for cut in cuts if not _is_same(optimizer, shapes, whole, cut)), "")
    except Exception as failed:  # a user's own optimizer may raise anything
        return f"whether it takes each element by itself could not be tried: {type(failed).__name__}: {failed}"


def moves_on_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it changes a parameter whose gradient was zeros in every step, as weight decay does; True if unknown."""
    shapes = [_shapes_of(group) for group in optimizer.param_groups]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            begun = [[_numbers(shape) for shape in group] for group in shapes]
            ended = _stepped(optimizer, begun, scale=0.0)
    except Exception:  # as above
        return True
    pairs = zip(_flat(begun), _flat(ended), strict=True)
    return not all(torch.equal(before, after) for before, after in pairs)


Groups = list[list[torch.Tensor]]


def _is_same(optimizer: torch.optim.Optimizer, shapes: list[list[tuple[int, ...]]], whole: Groups, cut: Cut) -> bool:
    """Whether two ranks, each with a part of everything and an optimizer of its own, come to the same."""
    begun = [[_numbers(shape) for shape in group] for group in shapes]
    for part in range(2):
        take = _taker(cut, part)
        mine = _stepped(optimizer, [take(group) for group in begun], take=take, shapes=shapes)
        for found, before, expected in zip(
            _flat(mine), _flat([take(group) for group in begun]), _flat([take(group) for group in whole]), strict=True
        ):
            far = (expected - before).abs().max() if expected.numel() else torch.zeros(())
            if not torch.allclose(found, expected, rtol=0.0, atol=_NEAR * float(far) + 1e-12):
                return False
    return True


def _taker(cut: Cut, part: int) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """What a rank has of the tensors of a group."""

    def take(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if cut == "parameters":
            return list(tensors[part::2])
        if cut == "flat":
            return [tensor.reshape(-1).chunk(2)[part].clone() for tensor in tensors]
        dim = 0 if cut == "rows" else 1
        return [tensor.chunk(2, dim)[part].clone() if tensor.ndim > dim else tensor for tensor in tensors]

    return take


def _stepped(
    optimizer: torch.optim.Optimizer,
    values: Groups,
    *,
    take: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] = list,
    shapes: list[list[tuple[int, ...]]] | None = None,
    scale: float = 1.0,
) -> Groups:
    """The values after some steps of a new optimizer of the same class and options, by gradients of whole tensors."""
    groups = [[nn.Parameter(value.clone()) for value in group] for group in values]
    trial = _like(optimizer, groups)
    sizes = shapes or [[tuple(value.shape) for value in group] for group in values]
    for step in range(_STEPS):
        for parameters, lengths in zip(groups, sizes, strict=True):
            gradients = take([scale * _numbers(shape, step + 1) for shape in lengths])
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
        torch.manual_seed(step)
        trial.step()
    return [[parameter.detach() for parameter in group] for group in groups]


def _like(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
    """Another of its class, with the options of each group of the one that is there."""
    described = []
    for mine, parameters in zip(optimizer.param_groups, groups, strict=True):
        options = {name: copy.deepcopy(value) for name, value in mine.items() if name in optimizer.defaults}
        if parameters:
            described.append(options | {"params": list(parameters)})
    takes = inspect.signature(type(optimizer).__init__).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
    options = {name: value for name, value in optimizer.defaults.items() if takes_any or name in takes}
    try:
        return type(optimizer)(described, **copy.deepcopy(options))  # type: ignore[arg-type]
    except Exception:  # it is made of something else than parameters and options
        return _copied(optimizer, described)


def _copied(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """All that it keeps, but no parameter of the user's, and nothing that was put around its methods."""
    stand_in = {id(p): nn.Parameter(torch.zeros(1)) for group in optimizer.param_groups for p in group["params"]}
    apart = {"state": defaultdict(dict), "param_groups": groups}
    kept = {name: v for name, v in vars(optimizer).items() if name not in apart and not callable(v)}
    kept = {name: OrderedDict() if name.endswith("_hooks") else v for name, v in kept.items()}
    made = type(optimizer).__new__(type(optimizer))
    made.__dict__.update(copy.deepcopy(kept, dict(stand_in)) | apart)
    return made


def _shapes_of(group: dict[str, Any]) -> list[tuple[int, ...]]:
    """Of the tensors that stand for a group's: two of each number of dimensions that it has."""
    dims = sorted({min(parameter.ndim, len(_LENGTHS)) for parameter in group["params"]}) or [1]
    return [_LENGTHS[:ndim] or (1,) for ndim in dims for _ in range(2)]


def _numbers(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """The same each time; those at the end are larger, so that the norms of parts are not alike."""
    generator = torch.Generator().manual_seed(1000 + seed)
    values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return values * torch.linspace(0.2, 3.0, values.numel(), dtype=torch.float64).view(shape)


def _flat(groups: Groups) -> list[torch.Tensor]:
    return [tensor for group in groups for tensor in group]
