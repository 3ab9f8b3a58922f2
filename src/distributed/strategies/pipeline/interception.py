"""Interception: a rank runs the model's own forward, in which only the modules of its stage compute.

Every stage has the batch, so the forward computes masks and positions again on each. Blocks of earlier stages return
their input, the last of them returns the received hidden state; the first block of the next stage ends the forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from distributed.core.errors import PlanError
from distributed.runtime.torch_compat import tree_leaves, tree_map_only
from distributed.runtime.torch_module_compat import call_of, set_compiled_call
from distributed.strategies.model.blocks import main_stack
from distributed.strategies.model.paths import is_inside, join
from distributed.strategies.pipeline.stages import find_sides, side_of
from distributed.strategies.placement import Layout


class StageEnd(BaseException):
    """Ends a forward where the next stage begins; not an Exception, so that no user's code catches it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class _Pass:
    """One forward of one stage."""

    stage: int
    received: torch.Tensor | None
    inside: bool  # whether the blocks of this stage have been reached


class Interception:
    """A model with only the modules of this rank's stages, in place; others have no memory and compute nothing."""

    def __init__(
        self, module: nn.Module, layout: Layout, parts: list[list[str]], mine: Sequence[int], device: torch.device
    ) -> None:
        self.module, self.parts, self.mine, self.device = module, parts, tuple(mine), device
        self.last = len(parts) - 1
        self.form: Any = None  # the structure of a block's output, with meta tensors beside the hidden state
        self._pass: _Pass | None = None
        self._shadows: list[tuple[nn.Module, str, torch.Tensor, frozenset[int]]] = []  # for stages here without it
        self._stage_of = {path: stage for stage, paths in enumerate(parts) for path in paths}
        self._bounds: list[tuple[int, int]] = []
        at = 0
        for paths in parts:
            self._bounds.append((at, at + len(paths)))
            at += len(paths)
        stack = main_stack(module)
        assert stack is not None
        self._stack, self._sides = stack, find_sides(module, stack)
        self._owners: dict[str, frozenset[int]] = {path: self._places(path) for path, _ in module.named_modules()}
        self._calls: dict[str, tuple[nn.Module, Callable[..., Any]]] = {}
        self._is_installed = self._is_shaping = False
        self._learned: dict[Any, Any] = {}
        tensors = self._find_tensors()
        self.shared = [names for names, owners in tensors if len(owners) > 1]
        self._strip(layout, {name: owners for names, owners in tensors for name in names})

    def _places(self, path: str) -> frozenset[int]:
        """The stages that hold this module's own tensors."""
        block = next((b for b in self._stage_of if is_inside(path, b)), None)
        if block is not None:
            return frozenset([self._stage_of[block]])
        side = side_of(path, self._sides)
        if side is None:  # a module around the stack: its own tensors are small, and may be used at both ends
            return frozenset([0, self.last])
        return frozenset([0] * side.before + [self.last] * side.after)

    def _find_tensors(self) -> list[tuple[tuple[str, ...], frozenset[int]]]:
        """The names of each parameter and the stages that have it."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        found = []
        for tied in names.values():
            places = {name: self._owners[name.rpartition(".")[0]] for name in tied}
            owners = frozenset().union(*places.values())
            if len(owners) > 1 and owners != {0, self.last}:
                one, other = min(tied, key=lambda n: min(places[n])), max(tied, key=lambda n: max(places[n]))
                raise PlanError(
                    f"{one} and {other} are one parameter, on stages {min(owners)} and {max(owners)} of a pipeline",
                    why="a parameter can be shared by the first and the last stage only",
                    do="untie them, use fewer stages so that both are on one, or set pipeline_parallel=1",
                )
            found.append((tuple(tied), owners))
        return found

    def _strip(self, layout: Layout, owners: dict[str, frozenset[int]]) -> None:
        """Leave only what this rank's stages have registered; the rest stays visible as attributes without memory."""
        for path, owner in self.module.named_modules():
            is_way = path == self._stack or not path or self._stack.startswith(f"{path}.")
            goes_with_owner = bool(owner._parameters) or path.startswith(tuple(f"{b}." for b in self._stage_of))
            goes_with_owner = (goes_with_owner or path in self._stage_of) and not is_way
            for name, parameter in list(owner._parameters.items()):
                full = join(path, name)
                if parameter is None:
                    continue
                if owners[full].isdisjoint(self.mine):
                    layout.leave_out(full)
                    del owner._parameters[name]
                    empty = torch.empty_like(parameter, device="meta")
                    owner.__dict__[name] = self._zero(parameter, full) if is_way else empty
                    continue
                if len(owners[full]) > 1 and 0 not in self.mine:
                    layout.set_stores(full, False)
                if is_way and len(self.mine) > 1:
                    self._shadows.append((owner, name, self._zero(parameter, full), owners[full]))
            for name, buffer in list(owner._buffers.items()):
                full = join(path, name)
                if buffer is None:
                    continue
                if goes_with_owner and self._owners[path].isdisjoint(self.mine):
                    layout.leave_out(full)
                    del owner._buffers[name]
                    owner.__dict__[name] = torch.empty_like(buffer, device="meta")
                elif min(self._owners[path]) not in self.mine:
                    layout.set_stores(full, False)

    def _zero(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Zeros in place of a parameter that forward uses before the blocks; they must not reach a result."""
        with torch.enable_grad():
            zero = torch.zeros((), dtype=parameter.dtype, device=self.device, requires_grad=parameter.requires_grad)
            if zero.requires_grad:
                zero.register_hook(partial(_refuse, name))
            return zero.expand(parameter.shape)

    def own_modules(self, stage: int) -> dict[str, nn.Module]:
        """The modules with this stage's parameters: its blocks, and modules outside of the blocks."""
        found: dict[str, nn.Module] = {path: self.module.get_submodule(path) for path in self.parts[stage]}
        shared = {name for names in self.shared for name in names}
        for path, owner in self.module.named_modules():
            names = [join(path, name) for name, p in owner._parameters.items() if p is not None]
            is_outside = side_of(path, self._sides) is not None
            is_here = stage in self._owners[path] or (stage in (0, self.last) and not shared.isdisjoint(names))
            if not names or not is_here or path.startswith(tuple(f"{b}." for b in self._stage_of)):
                continue
            if is_outside or path in self._stage_of:
                found[path] = owner
            else:
                found[join(path, "own")] = shell = nn.Module()
                shell._parameters = owner._parameters  # the same dict: a replaced parameter is replaced for both
        return found

    def install(self) -> None:
        """Intercept the calls of the blocks and of other modules with parameters.

        The interception is outside all hooks, so that FSDP's hooks see only calls that compute. It is installed at the
        first forward, after all other wrappers.
        """
        if self._is_installed:
            return
        self._is_installed = True
        for at, path in enumerate(self._stage_of):
            block = self.module.get_submodule(path)
            self._take_call(path, block, partial(self._call_block, at, path))
        for path, owner in self.module.named_modules():
            if side_of(path, self._sides) is None:
                continue
            holds = owner._parameters or any(isinstance(v, torch.Tensor) and v.is_meta for v in owner.__dict__.values())
            if holds:
                self._take_call(path, owner, partial(self._call_outside, path, owner))

    def _take_call(self, path: str, module: nn.Module, call: Callable[..., Any]) -> None:
        self._calls[path] = (module, call_of(module))
        set_compiled_call(module, call)

    @contextmanager
    def at(self, stage: int, received: torch.Tensor | None) -> Iterator[None]:
        """The scope of a forward of the model for one stage."""
        self.install()
        self._pass = _Pass(stage, received, received is None)
        shadows = [(owner, name, zero) for owner, name, zero, owners in self._shadows if stage not in owners]
        for owner, name, zero in shadows:
            owner.__dict__[name] = zero
        try:
            yield
        finally:
            self._pass = None
            for owner, name, _ in shadows:
                del owner.__dict__[name]

    def _call_block(self, at: int, path: str, *args: Any, **kwargs: Any) -> Any:
        now = self._pass
        if now is None:
            return self._call_again(path, args, kwargs)
        first, stop = self._bounds[now.stage]
        if first <= at < stop:
            output = self._calls[path][1](*args, **kwargs)
            self._learn_form(output)
            return output
        block = self._calls[path][0]
        hidden, beside = _split_arguments(block, args, kwargs)
        if at >= stop:
            if not now.inside:
                raise _not_a_chain(path)
            raise StageEnd(hidden)
        if now.inside:
            raise _not_a_chain(path)
        if at < first - 1:
            return self._in_form(hidden)
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in tree_leaves(beside)):
            raise _more_than_hidden(path)
        now.inside = True
        assert now.received is not None
        return self._in_form(now.received)

    def _call_again(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call outside of a stage's forward: the recomputation in the backward pass."""
        assert not self._owners[path].isdisjoint(self.mine), f"{path} was called on a rank that does not have it"
        return self._calls[path][1](*args, **kwargs)

    def _call_outside(self, path: str, owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        now = self._pass
        if self._is_shaping:
            return type(owner).forward(owner, *args, **kwargs)
        if now is None:
            return self._call_again(path, args, kwargs)
        if now.stage in self._owners[path]:
            return self._calls[path][1](*args, **kwargs)
        if now.inside:
            where = "before" if now.stage == 0 else "after"
            raise PlanError(
                f"the model uses {path} {where} its blocks, but a pipeline keeps it at their other end",
                why="the forward does not name this module, so the order of modules in __init__ decided its stage",
                do=f"assign {path} {where} {self._stack!r} in the model's __init__",
            )
        assert now.received is not None
        key = (path, *signature((args, kwargs)))
        if key not in self._learned:
            self._learned[key] = self._shape_of(owner, args, kwargs)
        return tree_map_only(torch.Tensor, partial(self._stand_in, path, now.received.dtype), self._learned[key])

    def _shape_of(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module's output on the meta device, computed without data."""
        if isinstance(owner, nn.Embedding):
            return torch.empty((*args[0].shape, owner.embedding_dim), device="meta")
        tensors = [*owner.named_parameters(), *owner.named_buffers()]  # of another stage of this rank
        held = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors}
        moved = tree_map_only(torch.Tensor, partial(torch.Tensor.to, device="meta"), (args, kwargs))
        self._is_shaping = True
        try:
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                return torch.func.functional_call(owner, held, *moved)
        finally:
            self._is_shaping = False

    def _stand_in(self, path: str, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        """Zeros for the output of a module before the blocks on other stages; they must not get a gradient."""
        if not like.is_floating_point():
            return torch.zeros(like.shape, dtype=like.dtype, device=self.device)
        zero = torch.zeros((), dtype=dtype, device=self.device, requires_grad=torch.is_grad_enabled())
        if zero.requires_grad:
            zero.register_hook(partial(_refuse, path))
        return zero.expand(like.shape).clone()  # a clone may be changed in place

    def take_form(self, form: Any) -> None:
        """Take a block's output structure from another stage, unless a block on this rank has shown it."""
        self.form = self.form or form

    def _learn_form(self, output: Any) -> None:
        if isinstance(output, tuple | list):
            beside = [item for item in output[1:] if isinstance(item, torch.Tensor) and item.requires_grad]
            if any(item.numel() == 1 for item in beside):
                raise PlanError(
                    "a block returns a loss of its own beside the hidden state",
                    why="a pipeline sends only the hidden state on, so the losses of earlier stages would be lost",
                    do="set pipeline_parallel=1 for this model",
                )
        if self.form is None:
            self.form = _form_of(output)

    def _in_form(self, hidden: torch.Tensor) -> Any:
        if not isinstance(self.form, tuple | list):
            return hidden
        beside = tree_map_only(torch.Tensor, partial(torch.zeros_like, device=self.device), self.form[1:])
        return type(self.form)([hidden, *beside])


def _form_of(output: Any) -> Any:
    """The structure of a block's output, in a form that can be sent to another stage."""
    if isinstance(output, torch.Tensor):
        return "tensor"
    if not isinstance(output, tuple | list):
        raise PlanError(
            f"a block returns a {type(output).__name__}",
            why="a pipeline sends a tensor to the next stage, or the first element of a tuple or list",
            do="let the blocks return the hidden state, or set pipeline_parallel=1",
        )
    kept = [torch.empty_like(item, device="meta") if isinstance(item, torch.Tensor) else None for item in output[1:]]
    return ["hidden", *kept] if isinstance(output, list) else ("hidden", *kept)


def _split_arguments(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """The hidden state, which is the first argument, and the other arguments."""
    if args:
        return args[0], (args[1:], kwargs)
    names = inspect.signature(type(block).forward).parameters
    first = next((name for name in names if name in kwargs), next(iter(kwargs)))
    return kwargs[first], {name: value for name, value in kwargs.items() if name != first}


def signature(value: Any) -> tuple[Any, ...]:
    """The shapes and types of a batch's tensors, to compare two batches.

    >>> signature({"x": torch.zeros(2, 3)})
    ('x', (2, 3), torch.float32)
    """
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    if hasattr(value, "items") and callable(value.items):
        return tuple(part for key, item in value.items() for part in (key, *signature(item)))
    if isinstance(value, list | tuple):
        return (len(value), *(part for item in value for part in signature(item)))
    return signature(vars(value)) if hasattr(value, "__dict__") else (type(value),)


def _refuse(path: str, gradient: torch.Tensor) -> None:
    raise _more_than_hidden(path)


def _more_than_hidden(path: str) -> PlanError:
    return PlanError(
        f"the model uses the output of {path} in more places than the first block",
        why="a pipeline sends the hidden state from stage to stage, and no other tensor with gradients",
        do="set pipeline_parallel=1 for this model",
    )


def _not_a_chain(path: str) -> PlanError:
    return PlanError(
        f"the model calls its block {path} out of order, or twice",
        why="a pipeline needs blocks that are each called once, in order",
        do="set pipeline_parallel=1 for this model",
    )
