"""Layers whose hidden width is sharded over ranks: which belong together, and the trial of the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from distributed.core.errors import PlanError
from distributed.strategies.model.blocks import main_stack
from distributed.strategies.model.paths import is_inside, join, parent_of
from distributed.strategies.tensor.names import COLUMNS, Style
from distributed.strategies.tensor.region import Region
from distributed.strategies.tensor.trials import SHAPE_ERRORS, Cuts, CutTrial, agree, trying


def find_holders(module: nn.Module, styles: Mapping[str, Style]) -> dict[str, str]:
    """For each layer of a sharded width, the smallest module whose forward contains the width's first and last layer.

    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> find_holders(nn.ModuleDict({"mlp": mlp}), {"mlp.0": "column", "mlp.2": "row"})
    {'mlp.2': 'mlp', 'mlp.0': 'mlp'}
    """
    columns = [path for path, style in styles.items() if style in COLUMNS]
    found: dict[str, str] = {}
    for row in (path for path, style in styles.items() if style == "row"):
        holder = parent_of(row)
        while holder and not any(is_inside(column, holder) for column in columns):
            holder = parent_of(holder)
        while holder and not _has_forward(module.get_submodule(holder)):
            holder = parent_of(holder)
        if columns:
            found[row] = holder
    holders = set(found.values())
    for column in columns:
        around = [holder for holder in holders if is_inside(column, holder)]
        if around:
            found[column] = max(around, key=len)
    return found


def _has_forward(m: nn.Module) -> bool:
    return type(m).forward is not nn.Module.forward


def can_be_tried(module: nn.Module, holder: str) -> bool:
    """Whether a module has its own forward and is not the whole model, of which a rank may run a stage."""
    stack = main_stack(module)
    return _has_forward(module.get_submodule(holder)) and (stack is None or not is_inside(stack, holder))


class WidthShare:
    """The forward of a module that has a share of the width between two of its layers.

    The result is the same only if nothing between them mixes different parts of the width, which is tried once.
    """

    def __init__(
        self, path: str, m: nn.Module, region: Region, cuts: Cuts, *, has_heads: bool, tried: set[Any]
    ) -> None:
        self._path, self._module, self._region, self._cuts = path, m, region, cuts
        self._has_heads = has_heads
        self._tried = tried  # by earlier modules
        self._forward: Callable[..., Any] = m.forward
        region.await_trial(path or type(m).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._region.untried:
            self._try(args, kwargs)
        return self._forward(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        untried = self._region.untried
        self._region.admit()  # to the trial itself
        types = tuple(type(child) for child in self._module.modules())
        key = (types, tuple((name, shape) for name, (shape, _) in self._cuts.items()))
        if key not in self._tried:
            with trying(self._module), self._region.stream.off():
                reason = self._find_difference(args, kwargs)
            if reason is not None:
                self._region.await_trial(untried)
                raise self._error(reason)
            self._tried.add(key)

    def _find_difference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        region = self._region
        trial = CutTrial(self._module, region, self._cuts, args, kwargs, only_first=self._has_heads)
        whole = trial.random_weights(shifted=not self._has_heads)
        with region.whole():
            expected = trial.outputs(whole, self._run)
        share, reason, results = trial.share_of(whole), "the results differ", []
        try:
            results = trial.outputs(share, self._run)
        except SHAPE_ERRORS as error:
            reason = str(error).splitlines()[0]
        return None if agree(results, expected, region) else reason

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._forward(*args, **kwargs)

    def _error(self, reason: str) -> PlanError:
        layers = ", ".join(dict.fromkeys(join(self._path, parent_of(name)) for name in self._cuts))
        shared = "the heads" if self._has_heads else "the hidden width"
        return PlanError(
            f"{self._path} ({type(self._module).__name__}) does not compute the same with a share of {shared}",
            why=f"something between {layers} mixes {shared} (a norm, a softmax or a mean over it, or halves that are "
            f"interleaved), or has a fixed size: {reason}",
            do="give tensor_parallel_plan without these layers, which then stay whole, or write the code "
            "between them so that each part of the width is computed separately",
        )
