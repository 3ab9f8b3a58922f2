"""Meter: losses and metrics of the steps since the last look, kept on the device until somebody looks."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from distributed.runtime.session import Session
from distributed.strategies.base import MetricSum, NonFiniteLoss, StepOutput
from distributed.train.metrics import MetricTotals
from distributed.train.pace import Pace, RankPace


@dataclass(frozen=True)
class Reading:
    """Means over all ranks since the last reading."""

    metrics: dict[str, float]
    samples: int
    seconds: float
    gradient_norm: float | None = None
    steps: int = 0
    paces: tuple[RankPace, ...] = ()  # of every rank; empty where there is one, or nobody keeps it

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
        names: list[str],
        *,
        checks_loss: bool,
        pace: Pace | None = None,
        counts: bool = True,
    ) -> None:
        """`counts`: whether this rank's numbers are part of the means; they are the same for all ranks."""
        self._counts = counts
        self._session, self._names, self._checks_loss = session, ["loss", *names], checks_loss
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

    @property
    def is_empty(self) -> bool:
        return not self._losses

    def begin_epoch(self, *, goes_on: bool = False) -> None:
        """`goes_on`: a resumed run has its totals from the checkpoint."""
        self._epoch, self._since = self._epoch if goes_on else {}, time.perf_counter()

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
        """Every rank calls it after the same step. Raises NonFiniteLoss for the first step that was not finite."""
        samples = sum(self._samples)
        assert self._last is not None
        losses, last = _fetch(self._losses, self._last)
        if self._checks_loss:
            _check_finite(losses)
        ranks = self._session.world_size
        totals = MetricTotals()
        if self._counts:
            weighted = math.fsum(loss * count for loss, count in zip(losses, self._samples, strict=True))
            totals.add({"loss": MetricSum(weighted / ranks, samples / ranks)})
            totals.add(last.metrics or {})
        row = self._pace.row() if self._pace is not None else []
        metrics, rows = totals.mean_and_sums("training metrics", self._session, self._names, row)
        paces = self._pace.read(rows) if self._pace is not None else ()
        now = time.perf_counter()
        norm = None if last.gradient_norm is None else float(last.gradient_norm)
        reading = Reading(metrics, samples, now - self._since, norm, len(self._losses), paces)
        self._losses, self._samples, self._since = [], [], now
        for name, value in metrics.items():
            total, weight = self._epoch.get(name, (0.0, 0.0))
            self._epoch[name] = (total + value * samples, weight + samples)
        return reading

    def epoch_metrics(self) -> dict[str, float]:
        """The loss over every sample of the epoch; other metrics over the batches of the steps that were read."""
        return {name: total / weight for name, (total, weight) in self._epoch.items()}


def _fetch(losses: list[torch.Tensor | float], last: StepOutput) -> tuple[list[float], StepOutput]:
    """The same as numbers: what lies on a device comes in one copy, for which the host waits once."""
    if not isinstance(losses[0], torch.Tensor):
        return losses, last  # type: ignore[return-value]  # on a CPU none of them is a tensor
    device = losses[0].device
    sums = [part for pair in (last.metrics or {}).values() for part in pair]
    more = [] if last.gradient_norm is None else [last.gradient_norm.to(device)]  # on the host where that is offloaded
    more += [part for part in sums if isinstance(part, torch.Tensor) and part.device == device]
    stacked = torch.stack(losses).double()  # type: ignore[arg-type]
    if more:
        stacked = torch.cat([stacked, torch.stack([value.detach().double().reshape(()) for value in more])])
    numbers: list[float] = stacked.tolist()
    rest = iter(numbers[len(losses) :])
    norm = None if last.gradient_norm is None else torch.tensor(next(rest))
    parts = [next(rest) if isinstance(p, torch.Tensor) and p.device == device else float(p) for p in sums]
    pairs = zip(last.metrics or {}, parts[::2], parts[1::2], strict=True)
    metrics = {name: MetricSum(total, weight) for name, total, weight in pairs}
    return numbers[: len(losses)], StepOutput(numbers[len(losses) - 1], norm, metrics)


def _check_finite(values: list[float]) -> None:
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise NonFiniteLoss(value, steps_ago=len(values) - 1 - index)
