"""Call check: what a model and a loss change whenever they are called, in a pipeline that calls them more often.

A pipeline cuts each micro-batch into parts that follow each other through the stages. One process has no such parts: a
counter, a warm-up or a moving average that each call moves on would move on faster, and the result be another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from distributed.core.errors import TaskError
from distributed.runtime.torch_compat import BatchNormBase
from distributed.train.checks.digest import digest
from distributed.train.task import Task

_SETTLED = 2  # looks after which tables that the first call makes are there: before the first step and after it
_LOOKS = 8  # a state that moves on does so from the beginning


class CallCheck:
    """Looks now and then at the buffers of the model and the state of the loss, as this rank has them."""

    def __init__(self, task: Task, parts: int) -> None:
        self._task, self._parts = task, parts
        self._looks = 0
        self._before: dict[str, str] = {}

    def look(self) -> None:
        """Raise if something has moved on since the last look."""
        if self._parts == 1 or self._looks == _LOOKS:
            return
        self._looks += 1
        before, self._before = self._before, {name: digest(value) for name, value in self._state()}
        moved = [name for name, now in self._before.items() if before.get(name, now) != now]
        if not moved or self._looks <= _SETTLED:
            return
        raise TaskError(
            f"each call changes {', '.join(moved[:3])}",
            why=f"the pipeline calls the model and the loss {self._parts} times for each micro-batch of one process",
            do="set pipeline_microbatches=1, or compute it from the number of the step instead",
        )

    def _state(self) -> Iterator[tuple[str, Any]]:
        for path, owner in self._task.model.named_modules():
            if isinstance(owner, BatchNormBase):  # in a pipeline only where the user has asked for a rank's own
                continue
            for name, buffer in owner.named_buffers(recurse=False):
                if isinstance(buffer, torch.Tensor) and not buffer.is_meta:
                    yield f"the buffer {path}.{name}".replace(" .", " "), buffer
        for name, value in self._task.loss_state().items():
            yield f"{name} of the loss", value
