"""Meter: losses and metrics of the steps since the last look, kept on the device until they are read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from distributed.runtime.session import Session
from distributed.strategies.base import MetricSum, NonFiniteLoss, StepOutput
from distributed.train.metrics import MetricNames, MetricTotals
from distributed.train.stragglers.communication import CommunicationShare, share_of
from distributed.train.stragglers.pace import Pace, RankPace


@dataclass(frozen=True)
class Reading:
    """Means over all ranks since the last reading."""

    metrics: dict[str, float]
    samples: int
    seconds: float
    gradient_norm: float | None = None
    steps: int = 0
    paces: tuple[RankPace, ...] = ()  # of every rank; empty where there is one, or it is not measured

    @property
    def communication(self) -> CommunicationShare | None:
        """Of the last step; None: it was not measured."""
        return share_of(self.paces)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps if self.steps else 0.0


class Meter:
    """`add` costs two list appends; `read` costs one collective and one wait for the device."""

    def __init__(
        self,
        session: Session,
        names: MetricNames,
        *,
        checks_loss: bool,
        pace: Pace | None = None,
        owns_metrics: bool = True,
        sums_loss: Callable[[], bool] = lambda: False,
    ) -> None:
        """`owns_metrics`: whether this rank's numbers are part of the means; they are the same for all ranks.
        `sums_loss`: whether a loss is the sum of its samples': it is read as their mean, as in an evaluation."""
        self._owns_metrics, self._sums_loss = owns_metrics, sums_loss
        self._session, self._names, self._checks_loss = session, names, checks_loss
        self._pace = pace
        self._losses: list[torch.Tensor | float] = []
        self._samples: list[int] = []
        self._last: StepOutput | None = None
        self._since = time.perf_counter()
        self._epoch: dict[str, tuple[float, float]] = {}

    def add(self, output: StepOutput, samples: int) -> None:
        self._losses.append(output.loss)
        self._samples.append(samples)
        self._last = output

    def samples_of_last(self, steps: int) -> int | None:
        """Of steps that were not read yet; None: there are not as many."""
        return sum(self._samples[-steps:]) if steps <= len(self._samples) else None

    @property
    def is_empty(self) -> bool:
        return not self._losses

    def begin_epoch(self, *, is_resumed: bool = False) -> None:
        """`is_resumed`: a resumed run has its totals from the checkpoint."""
        self._epoch, self._since = self._epoch if is_resumed else {}, time.perf_counter()

    def pause(self, seconds: float) -> None:
        """Time since the last reading in which no step was taken."""
        self._since += seconds

    def state(self) -> dict[str, Any]:
        """The totals of the epoch so far, this rank's losses that were not read yet among them."""
        return {
            "epoch": {name: list(pair) for name, pair in self._epoch.items()},
            "losses": [float(loss) for loss in self._losses],
            "samples": list(self._samples),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._epoch = {name: (total, weight) for name, (total, weight) in state["epoch"].items()}
        device = self._session.device
        numbers = state["losses"]
        self._losses = numbers if device.type == "cpu" else list(torch.tensor(numbers, device=device).unbind())
        self._samples = state["samples"]

    def read(self) -> Reading:
        """Every rank calls it after the same step. Raises NonFiniteLoss for the first step that was not finite.

        All ranks raise the same, with the rank that it began on: a step later it is in the weights of all of them.
        """
        samples = sum(self._samples)
        assert self._last is not None
        with self._session.waiting_for_device():
            losses, last = _fetch(self._losses, self._last)
        self._session.check()
        ranks = self._session.world_size
        totals = MetricTotals()
        if self._owns_metrics:
            weighted = math.fsum(loss * count for loss, count in zip(losses, self._samples, strict=True))
            if self._sums_loss():
                weighted = math.fsum(losses)
            totals.add({"loss": MetricSum(weighted / ranks, samples / ranks)})
            totals.add(last.metrics or {})
        row = self._pace.row() if self._pace is not None else []
        found = _nonfinite(losses, self._session.rank, ranks) if self._checks_loss else []
        measured, rows = totals.sum_up("training metrics", self._session, self._names, row + found)
        metrics = {name: total / weight for name, (total, weight) in measured.items()}
        if self._checks_loss:
            _check_finite(rows[len(row) :])
        paces = self._pace.read(rows[: len(row)]) if self._pace is not None else ()
        now = time.perf_counter()
        norm = None if last.gradient_norm is None else float(last.gradient_norm)
        reading = Reading(metrics, samples, now - self._since, norm, steps=len(self._losses), paces=paces)
        self._add_to_epoch(measured, samples)
        self._losses, self._samples, self._since = [], [], now
        return reading

    def _add_to_epoch(self, measured: Mapping[str, tuple[float, float]], samples: int) -> None:
        """The loss counts by samples; other metrics by their own weights in the last step, which stands for the steps
        before it that were not measured."""
        stands_for = samples / self._samples[-1] if self._samples[-1] else 0.0
        for name, (total, weight) in measured.items():
            counted = float(samples) if name == "loss" else weight * stands_for
            before = self._epoch.get(name, (0.0, 0.0))
            self._epoch[name] = (before[0] + total / weight * counted, before[1] + counted)

    def epoch_metrics(self) -> dict[str, float]:
        """The loss over every sample of the epoch; other metrics over the batches of the steps that were read."""
        return {name: total / weight for name, (total, weight) in self._epoch.items() if weight}


def _fetch(losses: list[torch.Tensor | float], last: StepOutput) -> tuple[list[float], StepOutput]:
    """The same as numbers: what lies on a device comes in one copy, for which the host waits once."""
    if not isinstance(losses[0], torch.Tensor):
        return losses, last  # type: ignore[return-value]  # on a CPU none of them is a tensor
    device = losses[0].device
    sums = [part for pair in (last.metrics or {}).values() for part in pair]
    more = [] if last.gradient_norm is None else [last.gradient_norm.to(device)]  # on the host where that is offloaded
    more += [part for part in sums if isinstance(part, torch.Tensor) and part.device == device]
    stacked = torch.stack(losses).double().reshape(-1)  # type: ignore[arg-type]  # a loss may have the shape [1]
    if more:
        stacked = torch.cat([stacked, torch.stack([value.detach().double().reshape(()) for value in more])])
    numbers: list[float] = stacked.tolist()
    rest = iter(numbers[len(losses) :])
    norm = None if last.gradient_norm is None else torch.tensor(next(rest))
    parts = [next(rest) if isinstance(p, torch.Tensor) and p.device == device else float(p) for p in sums]
    pairs = zip(last.metrics or {}, parts[::2], parts[1::2], strict=True)
    metrics = {name: MetricSum(total, weight) for name, total, weight in pairs}
    return numbers[: len(losses)], StepOutput(numbers[len(losses) - 1], norm, metrics)


def _nonfinite(losses: list[float], rank: int, ranks: int) -> list[float]:
    """Of each rank, how many steps ago its loss was first not finite, counted from 1, and the loss.

    >>> _nonfinite([0.5, math.inf, math.nan], rank=1, ranks=2)
    [0.0, 0.0, 2.0, inf]
    """
    row = [0.0] * (2 * ranks)
    for index, loss in enumerate(losses):
        if not math.isfinite(loss):
            row[2 * rank : 2 * rank + 2] = float(len(losses) - index), loss
            break
    return row


def _check_finite(row: list[float]) -> None:
    """Raise the first loss that was not finite, of all ranks."""
    ages, values = row[::2], row[1::2]
    first = max(ages)
    if first:
        ranks = tuple(rank for rank, age in enumerate(ages) if age == first)
        raise NonFiniteLoss(values[ranks[0]], int(first) - 1, ranks)
