"""Parameters and gradients in bf16, while the optimizer steps in fp32 and no small step is lost.

The model computes with bf16 parameters ("low" ones) in place of its own. Its own stay with the optimizer, in fp32:
- compensated: they hold every digit, and after a step the low ones are the nearest numbers of bf16;
- stochastic: they are made from the low ones for the step, and its result is rounded up or down at random, such that
  the mean is right.
One set of parameters whose data changes its type would not do: autograd then loses the hooks by which DDP notices a
gradient, and replicas would diverge without an error. Nothing here reads a value, so a CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from distributed.core.errors import TaskError, first_of
from distributed.runtime.torch_compat import NormBase, foreach_copy_
from distributed.runtime.torch_module_compat import has_gradient_hooks

_NORMS = (NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)  # few parameters with a large effect: they stay in fp32
BUCKET = 2**26  # numbers that are cast or rounded at once
_ALIGNED = 64  # numbers; kernels read whole lines where a tensor begins with one
_CUT = -(2**16)  # keeps the bits of fp32 that bf16 has


class _Pair(NamedTuple):
    own: nn.Parameter  # the user's and the optimizer's
    low: nn.Parameter  # the model's, in bf16
    places: list[tuple[nn.Module, str]]  # several if it is tied


class Bf16Parameters:
    """The bf16 parameters of a model until `close`. Norm layers and parameters other than fp32 are not changed."""

    def __init__(self, module: nn.Module, *, rounds: bool, generator: torch.Generator | None = None) -> None:
        """`rounds`: stochastically, with the generator, or the device's own if that is None."""
        self._module, self._rounds, self.generator = module, rounds, generator
        found = _places(module)
        _refuse_hooks(module, [own for own, _ in found])
        self._pairs = [_pair(own, places) for own, places in found]
        self._trained = [pair for pair in self._pairs if pair.own.requires_grad]
        self._wide: list[torch.Tensor] = []  # stochastic: the memory of the optimizer's parameters during a step
        self._is_whole = True
        self._leave_whole()

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that a step changes beside the optimizer's own."""
        return [pair.low for pair in self._trained]

    def stepped(self) -> dict[nn.Parameter, nn.Parameter]:
        """The optimizer's parameter of each of the model's that is trained."""
        return {low: own for own, low, _ in self._trained}

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give the optimizer's parameters the gradients in fp32, after the last backward pass of a step."""
        if self._rounds:
            self._widen()
        dense = []
        for pair in self._trained:
            own, low, _ = pair
            if own.grad is not None:
                raise _reached_by_another_way(self._module, low)
            if low.grad is not None and low.grad.is_sparse:
                own.grad, low.grad = low.grad.float(), None
            elif low.grad is not None:
                dense.append(pair)
        for bucket in _buckets(dense):
            _, grads = flat_like([pair.low for pair in bucket])
            foreach_copy_(grads, [pair.low.grad for pair in bucket])  # type: ignore[misc]
            for (own, low, _), grad in zip(bucket, grads, strict=True):
                own.grad, low.grad = grad, None

    @torch.no_grad()
    def write(self) -> None:
        """Update the low parameters after the optimizer's step."""
        if self._rounds:
            for flat in self._wide:
                round_at_random(flat, self.generator)
        _copy([pair.low for pair in self._trained], [pair.own for pair in self._trained])
        for pair in self._trained:  # also parameters without an optimizer, which would clear their gradients
            pair.own.grad = None
        if self._rounds:
            self._narrow(self._trained)

    def forget(self) -> None:
        """Drop all gradients of a step that was begun."""
        for own, low, _ in self._trained:
            own.grad = low.grad = None
        if self._rounds:
            self._narrow(self._trained)

    def follow_trained(self) -> None:
        """Train what requires a gradient in the model by now."""
        for pair in self._pairs:
            pair.own.requires_grad_(pair.low.requires_grad)
        self._trained = [pair for pair in self._pairs if pair.own.requires_grad]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A scope in which the model has its own fp32 parameters, to read or write; the low ones are updated after."""
        if self._is_whole:
            yield
            return
        self._enter_whole()
        try:
            yield
        finally:
            self._leave_whole()

    def load_generator(self, state: torch.Tensor) -> None:
        """Load the generator's state from a checkpoint, unless it is of another device, or of one process."""
        if self.generator is not None and state.shape == self.generator.get_state().shape:
            self.generator.set_state(state.cpu())

    def close(self) -> None:
        """Put the user's parameters back into the model."""
        for own, low, _ in self._pairs:
            own.grad = low.grad = None
        if not self._is_whole:
            self._enter_whole()

    @torch.no_grad()
    def _enter_whole(self) -> None:
        for own, low, places in self._pairs:
            if self._rounds:
                own.data = low.data.float()  # each in its own memory, because a reader may keep it
            put(own, places)
        self._is_whole = True

    @torch.no_grad()
    def _leave_whole(self) -> None:
        _copy([pair.low for pair in self._pairs], [pair.own for pair in self._pairs])
        for _, low, places in self._pairs:
            put(low, places)
        if self._rounds:
            self._narrow(self._pairs)
        self._is_whole = False

    def _widen(self) -> None:
        """Stochastic: give the optimizer's parameters memory for a step, with the exact values of the low ones."""
        self._wide = []
        for bucket in _buckets(self._trained):
            flat, values = flat_like([pair.low for pair in bucket])
            foreach_copy_(values, [pair.low for pair in bucket])
            self._wide.append(flat)
            for pair, value in zip(bucket, values, strict=True):
                pair.own.data = value

    def _narrow(self, pairs: Sequence[_Pair]) -> None:
        """Stochastic: free the memory of the optimizer's parameters between steps."""
        self._wide = []
        for own, low, _ in pairs:
            own.grad = None
            own.data = low.data


def round_at_random(values: torch.Tensor, generator: torch.Generator | None = None) -> None:
    """Round fp32 stochastically to bf16 values, in place, keeping the mean; NaN and infinity stay.

    >>> values = torch.tensor([1.0, 1.0 + 2**-9, float("inf")])
    >>> round_at_random(values)
    >>> values[0].item(), values[1].item() in (1.0, 1.0078125), values[2].item()
    (1.0, True, inf)
    """
    bits = values.view(torch.int32)
    noise = torch.randint(0, 2**16, bits.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = noise.add_(bits).bitwise_and_(_CUT).view(torch.float32)
    torch.where(values.isfinite(), rounded, values, out=values)


def _places(module: nn.Module) -> list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """The parameters that get a low one, and all places of each in the model."""
    found: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    kept: set[int] = set()
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            found.setdefault(id(parameter), (parameter, []))[1].append((owner, name))
            if isinstance(owner, _NORMS) or type(parameter) is not nn.Parameter or parameter.dtype != torch.float32:
                kept.add(id(parameter))
    return [pair for key, pair in found.items() if key not in kept]


def _pair(own: nn.Parameter, places: list[tuple[nn.Module, str]]) -> _Pair:
    low = nn.Parameter(torch.empty_like(own, dtype=torch.bfloat16), requires_grad=own.requires_grad)
    low.__dict__.update(own.__dict__)  # attributes that a library has set
    own.grad = None
    return _Pair(own, low, places)


def put(parameter: nn.Parameter, places: Sequence[tuple[nn.Module, str]]) -> None:
    for owner, name in places:
        if isinstance(owner, nn.RNNBase):  # it keeps a list of them beside
            setattr(owner, name, parameter)
        else:
            owner._parameters[name] = parameter


def _buckets(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    """Buckets of parameters in order, each of one device."""
    bucket: list[_Pair] = []
    size = 0
    for pair in pairs:
        if bucket and (size + pair.low.numel() > BUCKET or pair.low.device != bucket[0].low.device):
            yield bucket
            bucket, size = [], 0
        bucket.append(pair)
        size += pair.low.numel()
    if bucket:
        yield bucket


def flat_like(lows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One fp32 buffer for a bucket, and views of it with the strides of each parameter."""
    starts, end = [], 0
    for low in lows:
        starts.append(end)
        end += -(-low.numel() // _ALIGNED) * _ALIGNED
    flat = torch.empty(end, dtype=torch.float32, device=lows[0].device)
    return flat, [flat.as_strided(low.shape, low.stride(), start) for start, low in zip(starts, lows, strict=True)]


def _copy(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    if into:
        foreach_copy_(list(into), list(values))


def _refuse_hooks(module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse hooks on the gradients of replaced parameters, which get no gradient from autograd."""
    hooked = {id(p) for p in parameters if has_gradient_hooks(p)}
    names = [name for name, parameter in module.named_parameters() if id(parameter) in hooked]
    if names:
        raise TaskError(
            f"bf16_parameters with a hook on the gradient of {first_of(names, 1)}",
            why="the model then computes with bf16 parameters in place of these, whose gradients do not reach the hook",
            do="let the model's forward do what the hook does (a mask: on the weight), or leave bf16_parameters out",
        )


def _reached_by_another_way(module: nn.Module, low: Any) -> TaskError:
    name = next((name for name, parameter in module.named_parameters() if parameter is low), "a parameter")
    return TaskError(
        f"a gradient came to {name} past the model",
        why="with bf16_parameters the model computes with other parameters, and the loss used the original ones",
        do="let the loss read model.parameters() when it is computed, or leave bf16_parameters out",
    )
