"""The mark on a model of which this rank holds a part only, and which nothing can be begun with."""

from __future__ import annotations

from torch import nn

from distributed.core.errors import TaskError

_MARK = "_distributed_in_parts"


def mark_parts(module: nn.Module) -> None:
    module.__dict__[_MARK] = True


def refuse_parts(module: nn.Module) -> None:
    if module.__dict__.get(_MARK):
        raise TaskError(
            "an earlier fit has cut this model into parts",
            why="each rank holds a part of it only, and a run begins with all of it",
            do="make the model anew, and resume from the checkpoint of that fit",
        )
