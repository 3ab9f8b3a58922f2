"""An optimizer's state by the names of the parameters, so that it loads wherever a model has the same names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distributed.core.errors import CheckpointError

# Which of torch's kernels step, and not what they compute: of the device at hand, and not of a checkpoint.
_PLAIN: dict[str, bool | None] = {"foreach": None, "fused": None, "capturable": False}


def named_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """`optimizer.state_dict()` with names in place of positions.

    >>> layer = nn.Linear(1, 1)
    >>> named_state(torch.optim.SGD(layer.parameters(), lr=0.1), layer)["param_groups"][0]["params"]
    ['weight', 'bias']
    """
    names = _names(optimizer, module)
    plain = optimizer.state_dict()
    groups = [group | {"params": [names[index] for index in group["params"]]} for group in plain["param_groups"]]
    for group in groups:
        group.update({key: value for key, value in _PLAIN.items() if key in group})
    return {"state": {names[index]: held for index, held in plain["state"].items()}, "param_groups": groups}


def load_named_state(optimizer: torch.optim.Optimizer, module: nn.Module, tree: dict[str, Any]) -> None:
    """The same back, into the positions that this optimizer has them at."""
    positions = {name: index for index, name in enumerate(_names(optimizer, module))}
    own = optimizer.state_dict()["param_groups"]
    saved = {name: group for group in tree["param_groups"] for name in group["params"]}
    missing = sorted(set(positions) ^ set(saved))
    if missing or len(own) != len(tree["param_groups"]):
        raise CheckpointError(
            "the optimizer of the checkpoint is over other parameters than this one",
            why=f"differing: {', '.join(missing[:5])}" if missing else "they are grouped otherwise",
            do="pass the optimizer that was trained with, or import the weights alone",
        )
    groups = [
        stored | {key: mine[key] for key in ("params", *_PLAIN) if key in mine}
        for mine, stored in zip(own, tree["param_groups"], strict=True)
    ]
    state = {positions[name]: held for name, held in tree["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _names(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[str]:
    """The names of the optimizer's parameters, in the order of its positions."""
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    return [known[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
