"""An optimizer's state by parameter names, so that it loads into any model with the same names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from distributed.core.errors import CheckpointError, first_of
from distributed.strategies.joint_optimizer import JointOptimizer

# Options that choose torch's kernel, not the result: they belong to the device, and not to a checkpoint.
PLAIN: dict[str, bool | None] = {"foreach": None, "fused": None, "capturable": False}
_NOT_OPTIONS = ("params", "param_names", *PLAIN)


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
        group.update({key: value for key, value in PLAIN.items() if key in group})
    return {"state": {names[index]: held for index, held in plain["state"].items()}, "param_groups": groups}


def load_named_state(optimizer: torch.optim.Optimizer, module: nn.Module, tree: dict[str, Any]) -> None:
    """Load a named state, into the positions and groups of this optimizer."""
    names = _names(optimizer, module)
    positions = {name: index for index, name in enumerate(names)}
    own = optimizer.state_dict()["param_groups"]
    matched = match_groups(tree["param_groups"], [[names[index] for index in group["params"]] for group in own])
    groups = [options_of(tree["param_groups"][index], mine) for mine, index in zip(own, matched, strict=True)]
    state = {positions[name]: held for name, held in tree["state"].items()}
    load_state(optimizer, {"state": state, "param_groups": groups})


def load_state(optimizer: torch.optim.Optimizer, tree: dict[str, Any]) -> None:
    """`optimizer.load_state_dict`, with scalar state in its own type.

    Torch casts it to the parameter's type: NAdam and ASGD would continue with other digits, in bf16 with few.
    """
    optimizer.load_state_dict(tree)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, held in tree["state"].items():
        loaded = optimizer.state[parameters[index]]
        for name, value in held.items():
            is_number = isinstance(value, torch.Tensor) and value.dim() == 0
            if is_number and value.dtype != loaded[name].dtype:
                loaded[name] = value.to(loaded[name].device, copy=True)


def options_of(stored: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """A group with the options of the checkpoint, and this optimizer's own parameters and kernels."""
    return {**stored, **{key: mine[key] for key in ("params", "param_names", *PLAIN) if key in mine}}


def match_groups(saved: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]]) -> list[int]:
    """For each group of this run, by its parameters' names, the checkpoint's group with its options.

    >>> match_groups([{"params": ["w"], "lr": 1}, {"params": ["b"], "lr": 2}], [["b"], ["w"]])
    [1, 0]
    """
    check_parameters(saved, own)
    left = list(range(len(saved)))
    found: list[int] = []
    for position, members in enumerate(own):
        same = [index for index in left if set(saved[index]["params"]) == set(members)]
        index = same[0] if same else _common_options(saved, members, position)
        found.append(index)
        left = [other for other in left if other != index]
    return found


def check_names(saved: Iterable[str], own: Iterable[str]) -> None:
    """Raise where the tensors of a checkpoint's model have other names than this one's."""
    differing = sorted(set(saved) ^ set(own))
    if differing:
        raise CheckpointError(
            "the checkpoint is of another model",
            why=f"only one of the two has {first_of(differing, 5)}",
            do="pass the model of the checkpoint",
        )


def check_parameters(saved: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]]) -> None:
    missing = sorted({name for group in saved for name in group["params"]} ^ {name for names in own for name in names})
    if missing:
        raise CheckpointError(
            "the optimizer of the checkpoint is over other parameters than this one",
            why=f"only one of them has {first_of(missing, 5)}",
            do="pass the optimizer of the checkpoint; or set allow_change=optimizer: the weights are loaded, and the "
            "optimizer starts without state",
        )


def _common_options(saved: Sequence[Mapping[str, Any]], members: Sequence[str], position: int) -> int:
    """The checkpoint's group for parameters that were grouped otherwise, if all had the same options."""
    of = {name: index for index, group in enumerate(saved) for name in group["params"]}
    indices = sorted({of[name] for name in members}) or [min(position, len(saved) - 1)]
    first, *others = indices
    for other in others:
        differing = differing_options(saved[first], saved[other])
        if differing:
            one = next(name for name in members if of[name] == first)
            another = next(name for name in members if of[name] == other)
            key = differing[0]
            raise CheckpointError(
                f"{one} and {another} are in one group of this optimizer, and were in two in the checkpoint",
                why=f"their {key} was {saved[first].get(key)} and {saved[other].get(key)}, and a group has one",
                do="group the parameters as before; or set allow_change=groups, to continue with this run's options",
            )
    return first


def differing_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of options that differ; options in only one group are ignored, since versions of torch add some.

    >>> differing_options({"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "betas": [0.9, 0.99], "amsgrad": False})
    ['lr']
    """
    names = [name for name in one if name in other and name not in _NOT_OPTIONS]
    return [name for name in names if _plain(one[name]) != _plain(other[name])]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer's update rule, for any implementation of it.

    >>> optimizer_kind(torch.optim.AdamW(nn.Linear(1, 1).parameters(), fused=True))
    'AdamW'
    """
    if isinstance(optimizer, JointOptimizer):
        return optimizer.describe({name: optimizer_kind(member) for name, member in optimizer.members.items()})
    name = type(optimizer).__name__
    groups = optimizer.param_groups
    if name in ("FusedAdam", "DeepSpeedCPUAdam"):  # DeepSpeed's: one class for both rules
        return "AdamW" if getattr(optimizer, "adam_w_mode", True) else "Adam"
    if name == "Adam" and groups and groups[0].get("decoupled_weight_decay"):
        return "AdamW"
    return {"DeepSpeedCPUAdagrad": "Adagrad", "DeepSpeedCPULion": "Lion", "FusedLion": "Lion"}.get(name, name)


def _names(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[str]:
    """The names of the optimizer's parameters, in the order of its positions."""
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    return [known[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
