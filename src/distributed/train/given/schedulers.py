"""A scheduler as users give it: an instance, a function of the optimizer, or a class that needs no more than that."""

from __future__ import annotations

import inspect
from typing import Any

from distributed.core.errors import TaskError

_WAYS = "it must be a scheduler of the optimizer that is passed, or a function that makes one of an optimizer"
_EXAMPLE = "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)"


def is_made(scheduler: Any) -> bool:
    """Whether it is a scheduler already, and not what makes one."""
    return hasattr(scheduler, "step") and not isinstance(scheduler, type)


def check_scheduler(scheduler: Any) -> None:
    """Raises where no scheduler can come of it."""
    if scheduler is None or is_made(scheduler):
        return
    if not callable(scheduler):
        raise TaskError(
            f"scheduler is a {type(scheduler).__name__}",
            why=_WAYS,
            do=f"{_EXAMPLE}; or lr_schedule='cosine'",
        )
    needed = _needed(scheduler)
    if needed:
        name = getattr(scheduler, "__name__", type(scheduler).__name__)
        values = "".join(f", {argument}=…" for argument in needed)
        raise TaskError(
            f"scheduler={name} cannot be called with an optimizer alone: it also needs {', '.join(needed)}",
            why=_WAYS,
            do=f"scheduler=lambda optimizer: {name}(optimizer{values})",
        )


def make(scheduler: Any, optimizer: Any) -> Any:
    """The scheduler of this optimizer."""
    made = scheduler if is_made(scheduler) else scheduler(optimizer)
    if not is_made(made) and not hasattr(made, "step_ended"):  # a Schedule, which steps what it holds
        raise TaskError(
            f"the function passed as scheduler returned a {type(made).__name__}",
            why="the function must return a scheduler of the optimizer that it is given",
            do=_EXAMPLE,
        )
    return made


def _needed(maker: Any) -> list[str]:
    """Arguments beside the first that have no default; none where that cannot be seen."""
    try:
        parameters = list(inspect.signature(maker).parameters.values())
    except (TypeError, ValueError):
        return []
    by_name = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [p.name for p in by_name[1:] if p.default is p.empty]
