"""Metrics as sums and weights, so that evaluation over any number of ranks is exact."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from distributed.core.errors import TaskError
from distributed.runtime.session import Session
from distributed.strategies.base import Logged, MetricSum

Metric = Callable[[Any, Any], torch.Tensor]
"""(outputs, target) → a value for each sample, or one mean over them. One value a sample adds up exactly; a mean is
weighted by the number of samples."""


def class_hits(
    outputs: Any, target: Any, ignored: int = -100, *, class_dim: int | None = 1, is_shifted: bool = False
) -> MetricSum | None:
    """How many targets that count are where the largest output is; None: this is no classifier.

    `class_dim` says where the classes are if both shapes would do: 1, as torch's cross entropy takes them, or last.
    `is_shifted`: each position is to foretell the next one. Waits for no device.

    >>> class_hits(torch.eye(3), torch.tensor([0, 2, -100]))
    MetricSum(total=tensor(1), weight=tensor(2))
    """
    if not (isinstance(outputs, torch.Tensor) and isinstance(target, torch.Tensor)):
        return None
    if target.is_floating_point() or outputs.dim() < 2 or target.dim() != outputs.dim() - 1:
        return None
    dims = [1] if (outputs.shape[0], *outputs.shape[2:]) == tuple(target.shape) else []
    if outputs.shape[:-1] == target.shape and outputs.dim() > 2:
        dims.append(-1)
    if not dims or (len(dims) > 1 and class_dim is None):  # which of them holds the classes is not known
        return None
    chosen = outputs.argmax(class_dim if class_dim in dims else dims[0])
    if is_shifted:
        chosen, target = chosen[..., :-1], target[..., 1:]
    counted = target != ignored
    return MetricSum(((chosen == target) & counted).sum(), counted.sum())


def is_sequence(target: Any) -> bool:
    """Whether it has a class for each position of each sample, as the tokens of a language model."""
    return isinstance(target, torch.Tensor) and target.dim() == 2 and not target.is_floating_point()


def binary_accuracy(outputs: Any, target: Any) -> MetricSum:
    hits = (outputs > 0) == (target > 0.5)
    return MetricSum(hits.sum(), float(hits.numel()))


def sum_metrics(metrics: Mapping[str, Metric], outputs: Any, target: Any, size: int) -> dict[str, MetricSum]:
    """Each metric of one batch as a sum and a weight; those that do not apply are left out."""
    sums: dict[str, MetricSum] = {}
    for name, metric in metrics.items():
        value = metric(outputs, target)
        if not isinstance(value, torch.Tensor):
            value = _as_tensor(name, value)
        if value.dim() == 0:
            sums[name] = MetricSum(value.detach().double() * size, float(size))
        elif value.numel():
            total = value.sum() if value.dtype == torch.bool else value.detach().double().sum()
            sums[name] = MetricSum(total, float(value.numel()))
    return sums


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as failed:
        raise TaskError(
            f"metrics[{name!r}] returned a {type(value).__name__}",
            why=f"a metric is a value for each sample or one mean over its batch, and this is neither: {failed}",
            do="return a tensor or a number; distributed.whole_set(f) of a function that returns several by name",
        ) from failed


def sum_logged(logged: Mapping[str, Logged], size: int) -> dict[str, MetricSum]:
    """What a step of the user's own has logged for one batch.

    >>> sum_logged({"kl": Logged(0.5, None)}, size=4)
    {'kl': MetricSum(total=2.0, weight=4)}
    """
    pairs = {
        name: (_wide(value), size if weight is None else _wide(weight)) for name, (value, weight) in logged.items()
    }
    return {name: MetricSum(_weighted(value, weight), weight) for name, (value, weight) in pairs.items()}


def _wide(number: torch.Tensor | float) -> torch.Tensor | float:
    """As it is added up over many batches: in 16 bits, sums soon stay where they are."""
    return number.detach().double().reshape(()) if isinstance(number, torch.Tensor) else number


def _weighted(value: torch.Tensor | float, weight: torch.Tensor | float) -> torch.Tensor | float:
    """Without the mean over nothing, which is NaN and has no weight."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight == 0, 0.0, value * weight)
    return value * weight if weight else 0.0


class MetricNames:
    """The names of a run's metrics, in one order on all ranks; one that a step logs is added where the ranks meet."""

    def __init__(self, known: Iterable[str], session: Session) -> None:
        self.known, self._session = list(known), session

    def add(self, found: Iterable[str]) -> list[str]:
        """Add the new names of all ranks, each of which must call it; returns these."""
        mine = json.dumps([name for name in found if name not in self.known])
        texts = [mine] if self._session.world_size == 1 else self._session.gather_texts("names of metrics", mine)
        new = sorted({name for text in texts for name in json.loads(text)})
        self.known += new
        return new


class MetricTotals:
    """Sums of many batches on the device, and one collective for all of them at the end."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[torch.Tensor | float, torch.Tensor | float]] = {}

    @property
    def sums(self) -> dict[str, MetricSum]:
        """Of this rank."""
        return {name: MetricSum(*pair) for name, pair in self._totals.items()}

    def add(self, sums: Mapping[str, MetricSum]) -> None:
        for name, (total, weight) in sums.items():
            if name in self._totals:
                before_total, before_weight = self._totals[name]
                self._totals[name] = (before_total + total, before_weight + weight)
            else:
                self._totals[name] = (total, weight)

    def mean(self, name: str, session: Session, names: MetricNames) -> dict[str, float]:
        """The means over all ranks, also of metrics that only some of them have."""
        found = self.sum_up(name, session, names, [])[0]
        return {metric: total / weight for metric, (total, weight) in found.items()}

    def sum_up(
        self, name: str, session: Session, names: MetricNames, more: list[float]
    ) -> tuple[dict[str, tuple[float, float]], list[float]]:
        """Totals and weights of what has a weight, and in the same collective the sums of more numbers, as many on
        every rank."""
        new = [metric for metric in self._totals if metric not in names.known]
        if session.world_size == 1:
            return self._add_up(name, session, [*names.known, *(names.add(new) if new else ())], more)
        found, sums = self._add_up(name, session, names.known.copy(), [*more, float(bool(new))])
        if sums.pop():  # some rank has a new one
            found |= self._add_up(name, session, names.add(new), [])[0]
        return found, sums

    def _add_up(
        self, name: str, session: Session, names: list[str], more: list[float]
    ) -> tuple[dict[str, tuple[float, float]], list[float]]:
        pairs = [self._totals.get(metric, (0.0, 0.0)) for metric in names]
        is_number = not any(isinstance(part, torch.Tensor) for pair in pairs for part in pair)
        if is_number and session.world_size == 1:
            return self._weighty(names, [float(part) for pair in pairs for part in pair]), more
        if session.device.type == "cpu":  # nothing to wait for, and numbers are quicker put together than tensors
            sums = torch.tensor([float(part) for pair in pairs for part in pair] + more, dtype=torch.float64)
        elif is_number:
            numbers = [float(part) for pair in pairs for part in pair] + more
            sums = torch.tensor(numbers, dtype=torch.float64).to(session.device)
        else:
            columns = [
                torch.as_tensor(part, dtype=torch.float64, device=session.device) for pair in pairs for part in pair
            ]
            sums = torch.cat([column.reshape(1) for column in columns])
            if more:
                sums = torch.cat([sums, torch.tensor(more, dtype=torch.float64, device=session.device)])
        found: list[float] = session.sum(name, sums).tolist()
        session.check()
        return self._weighty(names, found), found[2 * len(names) :]

    def _weighty(self, names: list[str], found: list[float]) -> dict[str, tuple[float, float]]:
        totals, weights = found[: 2 * len(names) : 2], found[1 : 2 * len(names) : 2]
        return {metric: (total, weight) for metric, total, weight in zip(names, totals, weights, strict=True) if weight}


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Names and kinds, before anything starts."""
    for name, metric in metrics.items():
        if not callable(metric):
            raise TaskError(
                f"metric {name!r} is a {type(metric).__name__}, which cannot be called",
                why="a metric takes (outputs, target) and returns a value for each sample, or one mean",
                do=f"metrics={{{name!r}: lambda outputs, target: …}}",
            )
        if name == "loss" or name.startswith("val_"):
            why = "the trainer reports 'loss' and names that begin with 'val_' itself"
            raise TaskError(f"a metric cannot be called {name!r}", why=why, do=f"metrics={{'my_{name}': …}}")
