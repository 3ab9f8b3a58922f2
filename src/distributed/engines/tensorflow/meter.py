"""Losses and metrics of a run. They stay on the device until they are read, by all processes together."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distributed.engines.tensorflow.model.model import array_of
from distributed.engines.tensorflow.model.variables import metric_variables
from distributed.engines.tensorflow.step import StepResult
from distributed.engines.tensorflow.world.strategy import KerasWorld


@dataclass(frozen=True)
class KerasReading:
    """Of the steps since the last one; the metrics are Keras's, of the epoch so far."""

    loss: float
    samples_per_second: float
    gradient_norm: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    bad: tuple[int, float] | None = None  # the first loss that is not finite: how many steps ago, and its value


class KerasMeter:
    """What was measured since the last look and since the epoch began."""

    def __init__(self, model: Any, world: KerasWorld) -> None:
        self._model, self._world = model, world
        self._results: list[tuple[StepResult, int]] = []
        self._loss_sum, self._samples = 0.0, 0
        self._since = time.perf_counter()
        self._names = [name for name in self._read_names() if name != "loss"]

    @property
    def is_empty(self) -> bool:
        return not self._results

    def add(self, result: StepResult, samples: int) -> None:
        self._results.append((result, samples))

    def begin_epoch(self) -> None:
        self._loss_sum, self._samples = 0.0, 0
        self._model.reset_metrics()

    def read(self) -> KerasReading:
        losses = [float(result.loss) for result, _ in self._results]
        counts = [samples for _, samples in self._results]
        norm = float(self._results[-1][0].gradient_norm)
        self._results.clear()
        total, samples = sum(map(float.__mul__, losses, map(float, counts))), sum(counts)
        self._loss_sum, self._samples = self._loss_sum + total, self._samples + samples
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        bad = next(((len(losses) - 1 - at, loss) for at, loss in enumerate(losses) if not math.isfinite(loss)), None)
        return KerasReading(
            total / samples, samples / seconds if seconds else 0.0, norm if norm >= 0 else None, self._trained(), bad
        )

    def epoch_metrics(self) -> dict[str, float]:
        loss = self._loss_sum / self._samples if self._samples else math.nan
        self._since = time.perf_counter()
        return {"loss": loss} | self._trained()

    def evaluate(self, sums: Iterable[tuple[Any, Any]]) -> dict[str, float]:
        """The mean loss and the metrics of an evaluation; those of the epoch so far stay as they were."""
        held = [array_of(variable) for variable in metric_variables(self._model)]
        self._model.reset_metrics()
        loss, samples = 0.0, 0.0
        for part, count in sums:
            loss, samples = loss + float(part), samples + float(count)
        metrics = {"loss": loss / samples if samples else math.nan} | self._metrics()
        for variable, value in zip(metric_variables(self._model), held, strict=True):
            variable.assign(value)
        self._since = time.perf_counter()
        return metrics

    def state(self) -> dict[str, float]:
        """Of the epoch so far, with what was not read yet."""
        assert not self._results, "a save comes after a look"
        return {"loss_sum": self._loss_sum, "samples": self._samples}

    def load_state(self, state: dict[str, float]) -> None:
        self._loss_sum, self._samples = float(state.get("loss_sum", 0.0)), int(state.get("samples", 0))

    def _trained(self) -> dict[str, float]:
        return self._metrics() if self._world.measures_training else {}

    def _metrics(self) -> dict[str, float]:
        if not self._names:
            return {}
        found = self._model.get_metrics_result()
        return {name: float(np.mean(np.asarray(found[name]))) for name in self._names}

    def _read_names(self) -> list[str]:
        return list(self._model.get_metrics_result()) if metric_variables(self._model) else []
