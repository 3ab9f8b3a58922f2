"""Attention with a share of the heads, for modules that hold their number of heads in attributes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distributed.core.errors import PlanError
from distributed.strategies.tensor.collectives import copy_to
from distributed.strategies.tensor.modules import HEAD_SIZES, Heads
from distributed.strategies.tensor.region import Region
from distributed.strategies.tensor.trials import SHAPE_ERRORS, Cuts, Trial, agree, trying


@dataclass(frozen=True)
class _Manner:
    """A way to run a module with its share of the heads."""

    narrows: bool  # the module gets an input as narrow as its share, and its layers use the real one
    shares_sizes: bool  # attributes that are widths become those of the share, too


class HeadShare:
    """The forward of a module that has a share of the heads.

    A user's module may take its sizes from attributes or from its input's shape. So at the first call the ways are
    tried with random weights, and the one whose result equals that of the whole module is used.
    """

    def __init__(
        self,
        path: str,
        m: nn.Module,
        *,
        heads: Heads,
        width: int,
        region: Region,
        cuts: Cuts,
        settled: dict[Any, _Manner],
    ) -> None:
        self._path, self._module, self._width, self._region = path, m, width, region
        self._cuts = cuts
        self._settled = settled  # by earlier modules
        self._forward: Callable[..., Any] = m.forward
        self._degree = dist.get_world_size(region.group)
        self._whole = {name: value for name, value in vars(m).items() if type(value) is int}
        self._counts = _shares(self._whole, heads, self._degree)
        self._sizes = _size_shares(self._whole, heads, self._degree, set(self._counts))
        self._key = (type(m), heads, tuple(self._counts.items()), tuple(self._sizes.items()))
        self._manner: _Manner | None = None
        if not cuts:  # its output is a layer of another module, where both are tried
            self._settle_on(_Manner(narrows=False, shares_sizes=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._region.is_whole:  # a trial of the enclosing module
            return self._run_whole(args, kwargs)
        if self._manner is None:
            self._settle(args, kwargs)
            assert self._manner is not None
        return self._run(self._manner.narrows, args, kwargs)

    def _run(self, narrows: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not narrows and self._region.sequence_dim is None:
            return self._forward(*args, **kwargs)
        return self._run_on_gathered(narrows, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_on_gathered(self, narrows: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """With the layers' input gathered before the call, and known by its identity."""
        region = self._region
        found = self._activations(args, kwargs)
        if not found and region.sequence_dim is not None:
            raise PlanError(
                f"{self._path} ({type(self._module).__name__}) cannot run on shards of a sequence",
                why=f"none of its arguments is a tensor of width {self._width}, which could be gathered",
                do="leave sequence_parallel out",
            )
        swaps: list[tuple[torch.Tensor, torch.Tensor]] = []
        stand_ins: list[tuple[torch.Tensor, torch.Tensor]] = []
        for at, x in enumerate(found):
            real = region.take(x) if at == 0 else copy_to(x, region.group)
            if narrows:
                shape = (*real.shape[:-1], real.shape[-1] // self._degree)
                stand_in = real.new_full((), math.nan).expand(shape)  # a read of it shows as NaN in the result
                stand_ins.append((stand_in, real))
                swaps.append((x, stand_in))
            else:
                swaps.append((x, real))
        region.gather_before(stand_ins, is_gathered=not narrows)
        try:
            return self._forward(
                *(_swapped(value, swaps) for value in args),
                **{name: _swapped(value, swaps) for name, value in kwargs.items()},
            )
        finally:
            region.forget_input()

    def _activations(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for value in (*args, *kwargs.values()):
            is_wide = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == self._width
            if is_wide and value.is_floating_point() and not any(value is other for other in found):
                found.append(value)
        return found

    def _settle_on(self, manner: _Manner) -> None:
        self._manner = manner
        self._set(self._counts | (self._sizes if manner.shares_sizes else {}))

    def _set(self, values: Mapping[str, int]) -> None:
        for name, value in values.items():
            setattr(self._module, name, value)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _settle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._key not in self._settled:
            with trying(self._module), self._region.stream.off():
                self._settled[self._key] = self._find_manner(args, kwargs)
        self._settle_on(self._settled[self._key])

    def _find_manner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Manner:
        region = self._region
        trial = Trial(self._module, region, self._cuts, args, kwargs, only_first=True)
        whole = trial.random_weights(shifted=False)
        share = trial.share_of(whole)
        with region.whole():
            expected = trial.outputs(whole, self._run_whole)
        reason = "the results differ"
        is_generic = type(self._module).__module__.startswith("transformers.")  # these read attributes only
        for narrows in (False, True) if is_generic else (True, False):
            for shares_sizes in (True, False) if self._sizes else (True,):
                self._set(self._counts | (self._sizes if shares_sizes else {}))
                results: list[torch.Tensor] = []
                try:
                    results = trial.outputs(share, partial(self._run, narrows))
                except SHAPE_ERRORS as error:
                    reason = str(error).splitlines()[0]
                finally:
                    self._set(self._whole)
                if agree(results, expected, region):
                    return _Manner(narrows, shares_sizes)
        raise PlanError(
            f"{self._path} ({type(self._module).__name__}) does not compute the same with its share of the heads",
            why="the forward has sizes or an order of the heads that are not recognised, or mixes the heads, or the "
            f"hidden width of a feed-forward network in it; the last trial: {reason}",
            do="take sizes from attributes such as self.num_heads and self.head_dim, or give tensor_parallel_plan with "
            "another style ('column' where one layer has query, key and value of each head next to each other)",
        )

    def _run_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        now = {name: getattr(self._module, name) for name in self._whole}
        self._set(self._whole)
        try:
            return self._run(False, args, kwargs)
        finally:
            self._set(now)


def _shares(values: Mapping[str, int], heads: Heads, degree: int) -> dict[str, int]:
    """The attributes with numbers of heads, with the values of a share."""
    named = {name: value for name, value in values.items() if "head" in name or name == "h"}
    counts = (heads.queries, heads.keys)
    return {name: value // degree for name, value in named.items() if value in counts and name not in HEAD_SIZES}


def _size_shares(values: Mapping[str, int], heads: Heads, degree: int, counts: set[str]) -> dict[str, int]:
    sizes = {*heads.parts, sum(heads.parts)}
    others = {name: value for name, value in values.items() if name not in counts and name not in HEAD_SIZES}
    return {name: value // degree for name, value in others.items() if value in sizes}


def _swapped(value: Any, swaps: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    for old, new in swaps:
        if value is old:
            return new
    return value
