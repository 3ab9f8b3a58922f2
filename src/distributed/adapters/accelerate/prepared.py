"""What `prepare` returns in place of DataLoaders, optimizers and schedulers: a run stands behind their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from distributed.adapters.accelerate.arguments import ScriptOptions
from distributed.adapters.accelerate.run import ScriptRun
from distributed.core.errors import TaskError

_DROPPED = "its gradients would be dropped, and never be part of a step"


class Steps(Protocol):
    """What stands behind an optimizer and a scheduler of a script."""

    run: ScriptRun
    options: ScriptOptions

    @property
    def num_processes(self) -> int: ...

    @property
    def sync_gradients(self) -> bool:
        """Whether the optimizer steps with this batch."""

    def take_step(self, optimizer: torch.optim.Optimizer) -> None: ...


class PreparedLoader:
    """A DataLoader of the script: its batches are this rank's."""

    def __init__(self, loader: Any, begin: Callable[[], Iterator[Any]], length: Callable[[], int]) -> None:
        self.source, self._begin, self._length = loader, begin, length

    def __iter__(self) -> Iterator[Any]:
        return self._begin()

    def __len__(self) -> int:
        """Batches of this rank."""
        return self._length()

    def set_epoch(self, epoch: int) -> None:
        """Nothing: each epoch of a run has an order of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.source, name)


class PreparedOptimizer(torch.optim.Optimizer):
    """An optimizer of the script, whose step is the run's."""

    step_was_skipped = False

    def __init__(self, optimizer: torch.optim.Optimizer, steps: Steps) -> None:  # not Optimizer's own
        self.optimizer, self._steps = optimizer, steps

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """With the last batch of an accumulation, the step; with others, nothing."""
        if closure is not None:
            raise TaskError(
                "optimizer.step(closure)",
                why="a closure calls the model itself, several times in a step",
                do="use an optimizer that steps by gradients",
            )
        self._steps.take_step(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: a step drops its gradients; before it, they would be lost."""
        if self._steps.run.has_gradients and self._steps.sync_gradients:
            raise TaskError(
                "optimizer.zero_grad() between a backward pass and its step",
                why=_DROPPED,
                do="call it after optimizer.step(), or leave it out",
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise TaskError(
            "add_param_group of a prepared optimizer", why="the run knows its parameters", do="do it before prepare"
        )

    def __repr__(self) -> str:
        return repr(self.optimizer)


class PreparedScheduler:
    """A scheduler of the script, which steps where the optimizer has, as often as there are ranks."""

    def __init__(self, scheduler: Any, steps: Steps) -> None:
        self.scheduler, self._steps = scheduler, steps

    def step(self, *given: Any, **named: Any) -> None:
        """As Accelerate does: the script counts the batches of one process."""
        steps, scheduler, options = self._steps, self.scheduler, self._steps.options
        if not options.steps_scheduler:
            scheduler.step(*given, **named)
            return
        if not steps.sync_gradients:
            return
        for _ in range(1 if options.split_batches else steps.num_processes):
            if not hasattr(scheduler, "total_steps") or scheduler.last_epoch < scheduler.total_steps:
                scheduler.step(*given, **named)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self.scheduler.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)
