"""Checks for a model that is sharded over ranks, and the mark on a model that an earlier fit has sharded."""

from __future__ import annotations

from torch import nn

from distributed.core.errors import Problem, TaskError
from distributed.runtime.torch_compat import forget_composable_state

_MARK = "_distributed_in_parts"


def mark_parts(module: nn.Module) -> None:
    module.__dict__[_MARK] = True


def is_in_parts(module: nn.Module) -> bool:
    return bool(module.__dict__.get(_MARK))


def forget_parts(module: nn.Module) -> None:
    """Let torch shard a module again that was sharded before and is whole now."""
    forget_composable_state(module)


def refuse_parts(module: nn.Module) -> None:
    if is_in_parts(module):
        raise TaskError(
            "an earlier fit has sharded this model",
            why="each rank holds a part of the model only, and a run must begin with all of it",
            do="make a new model, and resume it from the checkpoint of that fit",
        )


def refuse_extra_state(module: nn.Module) -> None:
    """Raise if a checkpoint of the shards would not hold all of the model."""
    problems = extra_state(module)
    if problems:
        raise TaskError(problems)


def extra_state(module: nn.Module) -> list[Problem]:
    plain = nn.Module.get_extra_state
    found = [path or type(m).__name__ for path, m in module.named_modules() if type(m).get_extra_state is not plain]
    if not found:
        return []
    return [
        Problem(
            f"{found[0]} has an extra state (get_extra_state)",
            why="a checkpoint of a sharded model holds tensors only, and a resume would lose the extra state",
            do="keep it in a buffer: self.register_buffer(…); or train with ranks that hold the whole model",
        )
    ]
