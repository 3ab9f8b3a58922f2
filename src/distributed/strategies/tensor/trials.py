"""Trials of a cut module: with random weights, whether its share computes what the whole module does.

How a user's forward uses a share of the heads or of a width is not known. So it is run, on the arguments of its first
call, and outputs are compared: those of the layers whose results are summed, and those of the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distributed.runtime.torch_compat import FakeTensor, is_recorded, tree_leaves, tree_map_only, without_modes
from distributed.strategies.model.recompute import without_caches
from distributed.strategies.placement import Cut
from distributed.strategies.tensor.region import Region

SHAPE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
Cuts = Mapping[str, tuple[tuple[int, ...], Cut]]  # of parameters by name: the whole shape, and what is here
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")


@contextmanager
def trying(m: nn.Module) -> Iterator[None]:
    """A scope without side effects: no gradients, no dropout, no recorded activations."""
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
    """A scope hidden from selective recomputation, whose two runs of a block must see the same operations."""
    return without_modes() if is_recorded() else nullcontext()


@dataclass(frozen=True)
class CutTrial:
    """The first call of a cut module, made again with other weights; nothing of it lasts."""

    module: nn.Module
    region: Region
    cuts: Cuts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    only_first: bool  # of its results: weights of heads, of which there is a share, may come after the first

    def random_weights(self, *, shifted: bool) -> dict[str, torch.Tensor]:
        """Weights of the whole module; see `_random_weights`."""
        return _random_weights(self.module, self.cuts, dist.get_world_size(self.region.group), shifted=shifted)

    def share_of(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's share of such weights."""
        return {name: cut.take(whole[name]) for name, (_, cut) in self.cuts.items()}

    def outputs(
        self, values: Mapping[str, torch.Tensor], run: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    ) -> list[torch.Tensor]:
        """What `run` computes with these weights, given the call's arguments."""
        args, kwargs = _arguments(self.args, self.kwargs)
        with _stand_in_parameters(self.module, values):
            return _outputs_of(self.region, lambda: run(args, kwargs), only_first=self.only_first)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments without key-value caches, with copies of tensors, because a forward may write to them."""
    args, kwargs = without_caches(args, {name: None if name in _CACHES else v for name, v in kwargs.items()})
    copies: dict[int, torch.Tensor] = {}

    def copied(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in copies:
            copies[id(x)] = x.detach().clone()
        return copies[id(x)]

    return tree_map_only(torch.Tensor, copied, (args, kwargs))  # type: ignore[no-any-return]


def _outputs_of(region: Region, call: Callable[[], Any], *, only_first: bool) -> list[torch.Tensor]:
    """The outputs of a region's last layers in a call, and the call's own result."""
    with region.kept_outputs() as outputs:
        found = [x for x in tree_leaves(call()) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        return [*outputs, *(found[:1] if only_first else found)]


def _random_weights(m: nn.Module, cuts: Cuts, degree: int, *, shifted: bool) -> dict[str, torch.Tensor]:
    """Random weights, equal on every rank and independent of the real ones, which may be zero at first.

    Ranks' parts have different magnitudes, so that a mean or a sum over one part differs from that over all; with
    `shifted`, means are not near zero, either.
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
    """The factor of each index of the cut dimension: from a half for the first rank's parts to 1 for the last one's."""
    found, start = torch.ones(length), 0
    for first, last in cut.ranges:
        share = last - first
        found[start : start + share * degree] = torch.linspace(0.5, 1, degree).repeat_interleave(share)
        start += share * degree
    return found


@contextmanager
def _stand_in_parameters(m: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A scope in which parameters have other values."""
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
    """Whether FSDP gathers parameters inside `m` only when their own module, or one around it, is called."""
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


def agree(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], region: Region) -> bool:
    """Whether two lists of tensors are equal on every rank; of meta tensors, the shapes."""
    is_alike = len(results) == len(expected) and all(a.shape == b.shape for a, b in zip(results, expected, strict=True))
    if any(isinstance(x, FakeTensor) or x.is_meta for x in expected):
        return is_alike
    is_alike = is_alike and all(_is_close(a, b) for a, b in zip(results, expected, strict=True))
    differs = torch.tensor(float(not is_alike), device=expected[0].device if expected else None)
    return not region.session.max("trial of a cut module", differs, region.group).item()


def _is_close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    is_exact = expected.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(expected.device.type)
    known = expected.isfinite()  # attention may be NaN for padding
    errors = (result - expected).abs()[known]
    if not errors.numel():
        return True
    scale = expected[known].abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    return bool(errors.max() / scale < (1e-2 if is_exact else 1e-1))  # False for NaN
