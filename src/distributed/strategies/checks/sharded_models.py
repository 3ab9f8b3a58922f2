"""What a model must not have that the ranks hold in parts, and the mark on one that an earlier fit has cut."""

from __future__ import annotations

from torch import nn

from distributed.core.errors import Problem, TaskError

_MARK = "_distributed_in_parts"


def mark_parts(module: nn.Module) -> None:
    module.__dict__[_MARK] = True


def is_in_parts(module: nn.Module) -> bool:
    return bool(module.__dict__.get(_MARK))


def refuse_parts(module: nn.Module) -> None:
    if is_in_parts(module):
        raise TaskError(
            "an earlier fit has cut this model into parts",
            why="each rank holds a part of it only, and a run begins with all of it",
            do="make the model anew, and resume from the checkpoint of that fit",
        )


def refuse_extra_state(module: nn.Module) -> None:
    """Raises where a checkpoint of the parts would not have all of the model."""
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
            why="where ranks hold parts of a model, a checkpoint has its tensors alone, and a resume would lose it",
            do="keep it in a buffer: self.register_buffer(…); or train with ranks that hold the whole model",
        )
    ]
