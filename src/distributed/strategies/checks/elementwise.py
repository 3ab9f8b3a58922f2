"""Whether an optimizer's step can be taken on shards, tried with a few numbers before a run begins.

Ranks that hold shards of a parameter step these shards only. The result equals that of one process if the optimizer
steps elementwise. If ranks hold whole parameters and divide these among them, it must step each separately.
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
from distributed.runtime.torch_module_compat import step_hooks

Cut = Literal["parameters", "rows", "columns", "flat"]

# Torch's own optimizers, of exactly these classes: a subclass may do more.
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
OF_STEP_HOOKS = "each rank would call the hook with its shards of the parameters, as if they were whole"
INSTEAD = "let a callback do what the hook does, or use backend='pytorch-ddp'"
_SAYS_SO = "steps_elementwise"  # an attribute by which an optimizer's class declares this
_SUMS = "needs_shard_sums"  # ... that it steps whole parameters, by sums over their shards that a strategy gives it
_LENGTHS = (96, 64, 3, 2)  # of the tensors that are tried: longer than the blocks of quantizing optimizers
_STEPS = 3
_NEAR = 1e-3  # of the largest change: rounding is far below, and errors of shards' norms are far above
_PARTS: dict[Cut, str] = {
    "parameters": "each rank steps some of the parameters, and it looks at several of them together",
    "rows": "each rank has some rows of a parameter, and it looks at more than single elements",
    "columns": "each rank has some columns of a parameter, and it looks at more than single elements",
    "flat": "each rank has a range of the parameters' numbers, and it looks at more than single elements",
}


def needs_closure(optimizer: Any) -> bool:
    """Whether an optimizer, or a class of one, calls the model itself in a step.

    >>> needs_closure(torch.optim.LBFGS), needs_closure(torch.optim.SGD), needs_closure(lambda parameters: ...)
    (True, False, False)
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, torch.optim.Optimizer):
        return False
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def refuse_closure(optimizer: torch.optim.Optimizer, setting: str) -> None:
    """Refuse an optimizer whose step needs a closure, by which it calls the model itself."""
    if needs_closure(optimizer):
        raise TaskError(
            f"the optimizer {type(optimizer).__name__}, with {setting}",
            why="its step needs a closure, by which it calls the model several times in a step",
            do="use an optimizer that steps by gradients, such as AdamW or SGD, or leave the other out",
        )


def refuse_uncuttable(optimizer: torch.optim.Optimizer, cuts: Sequence[Cut], setting: str) -> None:
    """Raise if this optimizer cannot step the shards of `setting`."""
    why = why_not_cut(optimizer, cuts)
    if why:
        raise TaskError(
            f"{type(optimizer).__name__} cannot be trained with {setting}",
            why=why,
            do="use AdamW, SGD or another optimizer that steps elementwise, or backend='pytorch-ddp'; an elementwise "
            f"optimizer of your own declares it in its class: {_SAYS_SO} = True",
        )


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return any(step_hooks(optimizer))


def refuse_step_hooks(optimizer: torch.optim.Optimizer, setting: str) -> None:
    if has_step_hooks(optimizer):
        raise TaskError(f"{type(optimizer).__name__} has step hooks, with {setting}", why=OF_STEP_HOOKS, do=INSTEAD)


def why_not_cut(optimizer: torch.optim.Optimizer, cuts: Sequence[Cut]) -> str:
    """Why an optimizer's step on shards differs from its step on the whole; empty if it does not.

    >>> why_not_cut(torch.optim.AdamW(nn.Linear(2, 2).parameters()), ["rows"])
    ''
    >>> why_not_cut(torch.optim.Adafactor(nn.Linear(2, 2).parameters()), ["rows"])
    'each rank has some rows of a parameter, and it looks at more than single elements'
    """
    if getattr(optimizer, _SUMS, False):  # of a range of numbers of several parameters there are no such sums
        cuts = [cut for cut in cuts if cut == "flat"]
    if type(optimizer) in _ELEMENTWISE or not cuts or getattr(optimizer, _SAYS_SO, False):
        return ""
    shapes = [_shapes_of(group) for group in optimizer.param_groups]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            whole = _stepped(optimizer, [[_numbers(shape) for shape in group] for group in shapes])
            return next((_PARTS[cut] for cut in cuts if not _is_same(optimizer, shapes, whole, cut)), "")
    except Exception as failed:  # noqa: BLE001 - a user's optimizer may raise anything
        return f"whether it steps elementwise could not be tried: {type(failed).__name__}: {failed}"


def moves_on_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer changes a parameter whose gradients are zeros, as weight decay does; True if unknown."""
    shapes = [_shapes_of(group) for group in optimizer.param_groups]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            begun = [[_numbers(shape) for shape in group] for group in shapes]
            ended = _stepped(optimizer, begun, scale=0.0)
    except Exception:  # noqa: BLE001 - a user's optimizer may raise anything
        return True
    pairs = zip(_flat(begun), _flat(ended), strict=True)
    return not all(torch.equal(before, after) for before, after in pairs)


Groups = list[list[torch.Tensor]]


def _is_same(optimizer: torch.optim.Optimizer, shapes: list[list[tuple[int, ...]]], whole: Groups, cut: Cut) -> bool:
    """Whether two ranks with shards and an optimizer each get the same values as one."""
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
    """A rank's shards of the tensors of a group."""

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
    """A new optimizer of the same class, with the options of each group."""
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
    except Exception:  # noqa: BLE001 - a user's optimizer may take other arguments, and raise anything
        return _copied(optimizer, described)


def _copied(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer's attributes, without the user's parameters and without patched methods."""
    stand_in = {id(p): nn.Parameter(torch.zeros(1)) for group in optimizer.param_groups for p in group["params"]}
    separate = {"state": defaultdict(dict), "param_groups": groups}
    kept = {name: v for name, v in vars(optimizer).items() if name not in separate and not callable(v)}
    kept = {name: OrderedDict() if name.endswith("_hooks") else v for name, v in kept.items()}
    made = type(optimizer).__new__(type(optimizer))
    made.__dict__.update(copy.deepcopy(kept, dict(stand_in)) | separate)
    return made


def _shapes_of(group: dict[str, Any]) -> list[tuple[int, ...]]:
    """The shapes of the tensors that represent a group: two of each number of dimensions that it has."""
    dims = sorted({min(parameter.ndim, len(_LENGTHS)) for parameter in group["params"]}) or [1]
    return [_LENGTHS[:ndim] or (1,) for ndim in dims for _ in range(2)]


def _numbers(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """The same numbers at each call, larger at the end, so that the norms of shards differ."""
    generator = torch.Generator().manual_seed(1000 + seed)
    values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return values * torch.linspace(0.2, 3.0, values.numel(), dtype=torch.float64).view(shape)


def _flat(groups: Groups) -> list[torch.Tensor]:
    return [tensor for group in groups for tensor in group]
