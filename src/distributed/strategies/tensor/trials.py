"""Trials of a cut module: with random weights, whether its share computes what the whole module does.

What a user's forward does with a share of the heads or of a width is not known. So it is run, on the arguments of its
first call, and the outputs are compared: those of the layers whose results are summed, and its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import _CachingTorchDispatchMode

from distributed.strategies.layout import Cut
from distributed.strategies.recompute import without_caches
from distributed.strategies.tensor_region import Region

SHAPE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
Cuts = Mapping[str, tuple[tuple[int, ...], Cut]]  # of parameters by name: the whole shape, and what is here
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")


@contextmanager
def trying(m: nn.Module) -> Iterator[None]:
    """Leaves no trace: neither gradients, nor dropout, nor records of what was computed."""
    modes = [(child, child.training) for child in m.modules()]
    with _unrecorded(), torch.no_grad():
        for child, _ in modes:
            child.training = False
        try:
            yield
        finally:
            for child, mode in modes:
                child.training = mode


def _unrecorded() -> AbstractContextManager[object]:
    """Out of sight of selective recomputation, whose second run of a block has to see what the first one did."""
    records = any(isinstance(mode, _CachingTorchDispatchMode) for mode in _get_current_dispatch_mode_stack())
    return _disable_current_modes() if records else nullcontext()


def arguments_for_trial(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Without caches of keys and values, and with copies of tensors: a forward may write to what it is given."""
    args, kwargs = without_caches(args, {name: None if name in _CACHES else v for name, v in kwargs.items()})
    copies: dict[int, torch.Tensor] = {}

    def copied(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in copies:
            copies[id(x)] = x.detach().clone()
        return copies[id(x)]

    return tree_map_only(torch.Tensor, copied, (args, kwargs))  # type: ignore[no-any-return]


def outputs_of(region: Region, call: Callable[[], Any], *, only_first: bool) -> list[torch.Tensor]:
    """What the layers that end a region give in a call, and what it returns."""
    region.outputs = []
    try:
        found = [x for x in tree_leaves(call()) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        return [*region.outputs, *(found[:1] if only_first else found)]
    finally:
        region.outputs = None


def random_weights(m: nn.Module, cuts: Cuts, degree: int, *, shifted: bool) -> dict[str, torch.Tensor]:
    """The same on every rank, and no matter what the weights are: they may be zero at first.

    Ranks' parts are of different size, so that a mean or a sum over one of them is not that over all; where `shifted`,
    means are not near zero, either.
    """
    found = {}
    for seed, (name, (shape, cut)) in enumerate(cuts.items()):
        holder, _, leaf = name.rpartition(".")
        like = m.get_submodule(holder)._parameters[leaf]
        assert like is not None
        if isinstance(like, FakeTensor) or like.is_meta:
            found[name] = like.new_empty(shape)
            continue
        generator = torch.Generator(like.device if like.device.type == "cuda" else "cpu").manual_seed(seed)
        numbers = torch.randn(shape, generator=generator, device=generator.device) / math.sqrt(shape[-1])
        if shifted:
            numbers += numbers[:1].clone()
        sizes = _sizes(shape[cut.dim], cut, degree).to(numbers.device)
        numbers *= sizes.view([-1 if dim == cut.dim else 1 for dim in range(len(shape))])
        found[name] = numbers.to(like.device, like.dtype)
    return found


def _sizes(length: int, cut: Cut, degree: int) -> torch.Tensor:
    """For each place of the cut dimension: from a half for the first rank's parts to 1 for the last one's."""
    found, start = torch.ones(length), 0
    for first, last in cut.ranges:
        share = last - first
        found[start : start + share * degree] = torch.linspace(0.5, 1, degree).repeat_interleave(share)
        start += share * degree
    return found


@contextmanager
def stand_in_parameters(m: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Parameters with other values for a while."""
    kept: list[tuple[nn.Module, str, nn.Parameter | None]] = []
    patched: list[tuple[nn.Module, Any]] = []
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        owner = m.get_submodule(path)
        if _is_gathered_later(m, path):
            patched.append((owner, owner.__dict__.get("forward")))
            owner.forward = partial(_call_with, owner, owner.forward, leaf, value)  # type: ignore[method-assign]
        else:
            kept.append((owner, leaf, owner._parameters[leaf]))
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    try:
        yield
    finally:
        for owner, leaf, parameter in reversed(kept):
            owner._parameters[leaf] = parameter
        for owner, forward in reversed(patched):
            if forward is None:
                del owner.__dict__["forward"]
            else:
                owner.forward = forward


def _is_gathered_later(m: nn.Module, path: str) -> bool:
    """Whether FSDP puts the parameters of a module within `m` in place only when that, or one around it, is called."""
    parts = path.split(".") if path else []
    return any(isinstance(m.get_submodule(".".join(parts[:n])), FSDPModule) for n in range(1, len(parts) + 1))


def _call_with(
    owner: nn.Module, forward: Callable[..., Any], leaf: str, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    own = owner._parameters[leaf]
    assert own is not None
    owner._parameters[leaf] = nn.Parameter(value.to(own.device, own.dtype), requires_grad=False)
    try:
        return forward(*args, **kwargs)
    finally:
        owner._parameters[leaf] = own


def agree(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], group: dist.ProcessGroup) -> bool:
    """Whether they are the same, on every rank; of tensors that have no data, the shapes."""
    is_alike = len(results) == len(expected) and all(a.shape == b.shape for a, b in zip(results, expected, strict=True))
    if any(isinstance(x, FakeTensor) or x.is_meta for x in expected):
        return is_alike
    is_alike = is_alike and all(_is_close(a, b) for a, b in zip(results, expected, strict=True))
    verdict = torch.tensor(float(is_alike), device=expected[0].device if expected else None)
    dist.all_reduce(verdict, dist.ReduceOp.MIN, group=group)
    return bool(verdict.item())


def _is_close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    is_exact = expected.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(expected.device.type)
    known = expected.isfinite()  # of padding, attention may be nothing
    errors = (result - expected).abs()[known]
    if not errors.numel():
        return True
    scale = expected[known].abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    return bool(errors.max() / scale < (1e-2 if is_exact else 1e-1))  # NaN is not
