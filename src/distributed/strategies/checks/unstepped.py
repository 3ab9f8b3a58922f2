"""Parameters that are unfrozen during a run, and that no optimizer has: they would get gradients, and never move."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from distributed.core.errors import TaskError, first_of

_SHOWN = 3


def refuse_unstepped(module: nn.Module, known: Collection[int]) -> None:
    """Raise unless every parameter that is trained is among the known ones, by its `id`."""
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad and not p.is_meta]
    names = [name for name, parameter in trained if id(parameter) not in known]
    if names:
        raise TaskError(
            f"{first_of(names, _SHOWN)} would be unfrozen, and the optimizer does not have it",
            why="an optimizer is made over the parameters that require a gradient when the run begins",
            do="leave requires_grad=True when you make the model, and freeze it by callbacks.Freeze",
        )
