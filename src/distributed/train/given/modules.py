"""Models as users pass them: one module, or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from distributed.core.errors import TaskError


def as_module(model: Any) -> Any:
    """A dict of modules as one; anything else as it is.

    >>> list(as_module({"generator": nn.Linear(1, 2), "discriminator": nn.Linear(2, 1)}).keys())
    ['generator', 'discriminator']
    """
    if not isinstance(model, Mapping):
        return model
    for name, part in model.items():
        if not isinstance(part, nn.Module):
            raise TaskError(
                f"model[{name!r}] is a {type(part).__name__}",
                why="a model in parts is a dict of names and modules",
                do="Trainer({'generator': Generator(), 'discriminator': Discriminator()}, …)",
            )
    try:
        return nn.ModuleDict(dict(model))
    except (KeyError, TypeError) as failed:
        raise TaskError(
            f"the parts of the model cannot be called {', '.join(map(str, model))}",
            why=f"torch's ModuleDict reports: {failed.args[0]}",
            do="use other names, of letters, digits and underscores",
        ) from failed
