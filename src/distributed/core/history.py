"""History: what `fit` returns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from distributed.core.atomic import write_private
from distributed.core.secrets import mask


@dataclass(frozen=True)
class EpochRecord:
    """What one epoch (or the part of it that was trained) came to."""

    epoch: int
    steps: int
    samples: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0


def is_validation(name: str) -> bool:
    """Whether a metric of an epoch comes from its evaluation, by its name."""
    return name.startswith(("val_", "val/"))


def validation_name(name: str) -> str:
    """The name in an epoch of what an evaluation has measured.

    >>> validation_name("loss"), validation_name("val/loss")
    ('val_loss', 'val/loss')
    """
    return name if is_validation(name) else f"val_{name}"


@dataclass(frozen=True)
class EvaluationRecord:
    """What one evaluation of the validation data came to."""

    step: int  # optimizer steps that were done
    epoch: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class History:
    """The record of one `fit`: per-epoch metrics, time and throughput.

    Metrics of training are named `loss` and as the metric is; those of validation begin with `val_`.

    >>> history = History((EpochRecord(0, 10, 320, 2.0, {"loss": 0.5, "val_accuracy": 0.9}),), total_time=2.0)
    >>> history["val_accuracy"], history.best_accuracy, history.throughput
    ([0.9], 0.9, 160.0)
    >>> "loss" in history, "accuracy" in history, list(history)
    (True, False, ['loss', 'val_accuracy'])
    """

    epochs: tuple[EpochRecord, ...] = ()
    total_time: float = 0.0
    steps: int = 0
    world_size: int = 1
    run_dir: str = ""
    interrupted: bool = False
    stop_signal: int = 0  # that it was interrupted by
    checkpoint: str = ""  # the last one: the trained model
    evaluations: tuple[EvaluationRecord, ...] = ()  # all of the validation, also those within an epoch
    left_in_ranks: tuple[str, ...] = ()  # what training has changed in the ranks that fit started, and in them alone
    stopped: str = ""  # why the run ended before its last epoch, if a callback or a limit asked for it

    def __getitem__(self, metric: str) -> list[float]:
        """The values of one metric, an entry an epoch in which it was measured."""
        return [record.metrics[metric] for record in self.epochs if metric in record.metrics]

    def __contains__(self, metric: object) -> bool:
        return metric in self.metrics

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    @property
    def metrics(self) -> list[str]:
        return sorted({name for record in self.epochs for name in record.metrics})

    @property
    def best_accuracy(self) -> float:
        """The highest validation accuracy, or training accuracy when nothing was validated; NaN without either.

        Of several validation sets none is singled out: `history["val_clean_accuracy"]` has those of one.
        """
        measured = [record.metrics["val_accuracy"] for record in self.evaluations if "val_accuracy" in record.metrics]
        is_validated = any(name.startswith("val_") for name in self.metrics)
        trained = [] if is_validated and "val_accuracy" not in self else self["accuracy"]
        return max([*self["val_accuracy"], *measured] or trained, default=float("nan"))

    @property
    def samples(self) -> int:
        return sum(record.samples for record in self.epochs)

    @property
    def throughput(self) -> float:
        """Training samples a second over all ranks, evaluation and saving not counted."""
        seconds = sum(record.seconds for record in self.epochs)
        return self.samples / seconds if seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        derived = {"best_accuracy": self.best_accuracy, "throughput": self.throughput, "samples": self.samples}
        return asdict(self) | derived

    def save(self, path: Path) -> None:
        write_private(path, json.dumps(mask(self.to_dict()), indent=2) + "\n")

    @staticmethod
    def load(path: Path) -> History:
        raw = json.loads(path.read_text())
        own = {f.name: raw[f.name] for f in fields(History) if f.name in raw}
        epochs = tuple(EpochRecord(**record) for record in raw["epochs"])
        evaluations = tuple(EvaluationRecord(**record) for record in raw.get("evaluations", ()))
        left = tuple(raw.get("left_in_ranks", ()))
        return History(**own | {"epochs": epochs, "evaluations": evaluations, "left_in_ranks": left})
