"""What `configure_optimizers` returns, and the Schedule that steps its schedulers as Lightning does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from distributed.core.errors import TaskError
from distributed.core.history import validation_name

Step = Callable[[Any, Any], None]  # (scheduler, metric or None)


@dataclass(frozen=True)
class ScheduledRate:
    """A scheduler, and when it is stepped."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    reduce_on_plateau: bool = False
    name: str | None = None  # of no effect: Lightning's LearningRateMonitor reads it


@dataclass(frozen=True)
class Configured:
    """One optimizer, and its schedulers."""

    optimizer: Optimizer
    rates: tuple[ScheduledRate, ...] = ()


def read_optimizers(found: Any, whose: str) -> Configured:
    """The forms that Lightning takes, of one optimizer.

    >>> sgd = torch.optim.SGD([torch.zeros(1)])
    >>> read_optimizers({"optimizer": sgd}, "Net").optimizer is sgd
    True
    """
    optimizers, schedulers, monitor = _split(found, whose)
    if len(optimizers) != 1:
        raise TaskError(
            f"{whose}.configure_optimizers returned {len(optimizers)} optimizers",
            why="a step of the run has one; several need automatic_optimization=False in Lightning, too",
            do="return one, with a parameter group for each part; or distributed.start for a loop of your own",
        )
    rates = tuple(_read_scheduler(one, monitor, whose) for one in schedulers)
    if any(getattr(rate.scheduler, "optimizer", optimizers[0]) is not optimizers[0] for rate in rates):
        raise TaskError(
            f"{whose}.configure_optimizers returned a scheduler of another optimizer",
            why="it would change the rates of an optimizer that does not train",
            do="make the scheduler of the optimizer that is returned",
        )
    return Configured(optimizers[0], rates)


def _split(found: Any, whose: str) -> tuple[list[Optimizer], list[Any], str | None]:
    if isinstance(found, Optimizer):
        return [found], [], None
    if isinstance(found, Mapping) and isinstance(found.get("optimizer"), Optimizer):
        extra = set(found) - {"optimizer", "lr_scheduler", "monitor"}
        if extra:
            raise TaskError(f"{whose}.configure_optimizers: unknown {sorted(extra)}", do="leave them out")
        schedulers = [found["lr_scheduler"]] if found.get("lr_scheduler") is not None else []
        return [found["optimizer"]], schedulers, found.get("monitor")
    if isinstance(found, list | tuple) and len(found) == 2 and isinstance(found[0], list):
        return list(found[0]), list(found[1]) if isinstance(found[1], list | tuple) else [found[1]], None
    if isinstance(found, list | tuple) and found and all(isinstance(one, Optimizer) for one in found):
        return list(found), [], None
    if isinstance(found, list | tuple) and found and all(isinstance(one, Mapping) for one in found):
        parts = [_split(one, whose) for one in found]
        return [o for part in parts for o in part[0]], [s for part in parts for s in part[1]], parts[0][2]
    raise TaskError(
        f"{whose}.configure_optimizers returned {'nothing' if found is None else f'a {type(found).__name__}'}",
        why="a run steps an optimizer",
        do='return the optimizer, or {"optimizer": …, "lr_scheduler": …}',
    )


def _read_scheduler(found: Any, monitor: str | None, whose: str) -> ScheduledRate:
    given = dict(found) if isinstance(found, Mapping) else {"scheduler": found}
    unknown = set(given) - {field.name for field in fields(ScheduledRate)}
    if unknown or "scheduler" not in given:
        what = f"unknown {sorted(unknown)}" if unknown else "no 'scheduler'"
        raise TaskError(f"{whose}.configure_optimizers: {what} in lr_scheduler", do="use Lightning's names")
    given.setdefault("reduce_on_plateau", isinstance(given["scheduler"], ReduceLROnPlateau))
    given["monitor"] = given.get("monitor") or monitor
    rate = ScheduledRate(**given)
    if rate.interval not in ("step", "epoch"):
        raise TaskError(f"{whose}.configure_optimizers: interval={rate.interval!r}", do="'step' or 'epoch'")
    if rate.reduce_on_plateau and not rate.monitor:
        raise TaskError(
            f"{whose}.configure_optimizers: a {type(rate.scheduler).__name__} without monitor",
            why="this scheduler follows a metric",
            do='{"scheduler": …, "monitor": "val_loss"}',
        )
    if rate.reduce_on_plateau and rate.interval == "step":
        raise TaskError(
            f"{whose}.configure_optimizers: a {type(rate.scheduler).__name__} with interval='step'",
            why="means over all ranks are known at the end of an epoch",
            do="interval='epoch'",
        )
    return rate


class ConfiguredSchedule:
    """Implements Schedule: it steps each scheduler by its interval and frequency."""

    def __init__(
        self, rates: tuple[ScheduledRate, ...], step: Step, batches: Callable[[], int], epoch: Callable[[], int]
    ) -> None:
        """`batches`: those of this epoch that are done; `epoch`: how many epochs are done, without this one."""
        self._rates, self._step, self._batches, self._epoch = rates, step, batches, epoch
        self.name = "+".join(type(rate.scheduler).__name__ for rate in rates)

    def step_ended(self, step: int) -> None:
        for rate in self._rates:
            if rate.interval == "step" and self._batches() % rate.frequency == 0:
                self._take(rate, None)

    def epoch_ended(self, metrics: dict[str, float]) -> None:
        for rate in self._rates:
            if rate.interval != "epoch" or (self._epoch() + 1) % rate.frequency:
                continue
            if not rate.reduce_on_plateau:
                self._take(rate, None)
            elif (value := _monitored(rate, metrics)) is not None:
                self._take(rate, value)

    def _take(self, rate: ScheduledRate, metric: Any) -> None:
        with warnings.catch_warnings():  # it need not know that the optimizer has stepped, as on ranks that share it
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*", category=UserWarning)
            self._step(rate.scheduler, metric)

    def state(self) -> dict[str, Any]:
        states = [dict(rate.scheduler.state_dict()) for rate in self._rates]
        return states[0] if len(states) == 1 else {"_schedulers": states} if states else {}

    def load_state(self, state: dict[str, Any], step: int) -> None:
        states = [state] if len(self._rates) == 1 else state.get("_schedulers", [])
        for rate, one in zip(self._rates, states, strict=True):
            rate.scheduler.load_state_dict(one)


def _monitored(rate: ScheduledRate, metrics: Mapping[str, float]) -> torch.Tensor | None:
    assert rate.monitor is not None
    for name in (rate.monitor, validation_name(rate.monitor), f"{rate.monitor}_epoch"):
        if name in metrics:
            return torch.tensor(metrics[name])
    if not rate.strict:
        return None
    raise TaskError(
        f"the scheduler {type(rate.scheduler).__name__} follows {rate.monitor!r}, which was not measured",
        why=f"this epoch has {', '.join(sorted(metrics)) or 'no metrics'}",
        do="monitor one of them, or log it in training_step or validation_step",
    )
