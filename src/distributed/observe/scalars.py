"""The numbers of an event under one set of names, so that every dashboard shows a run alike.

Names are those of History: `loss`, `accuracy` … are means over the steps since the last log line, `val_*` come from an
evaluation, `epoch_*` are means over a whole epoch; beside them are `learning_rate`, `gradient_norm`,
`samples_per_second`, `device_utilization`, `communication_seconds` and `communication_hidden`.
"""

from __future__ import annotations

from distributed.core.events import EpochEnded, EvaluationEnded, Event, StepEnded
from distributed.core.history import is_validation, validation_name

Scalars = dict[str, float]


class ScalarReader:
    """Reads the scalars of a run's events, in order, each value once.

    >>> ScalarReader().read(EvaluationEnded(time=0, step=9, epoch=0, seconds=1, metrics={"accuracy": 0.5}))
    (9, {'val_accuracy': 0.5})
    """

    def __init__(self) -> None:
        self._logged_epoch = -1
        self._evaluated_epoch = -1

    def read(self, event: Event) -> tuple[int, Scalars] | None:
        """The step and its scalars, or None for an event without numbers."""
        match event:
            case StepEnded():
                self._logged_epoch = event.epoch
                return event.step, _of_step(event)
            case EvaluationEnded():
                self._evaluated_epoch = event.epoch
                return event.step, {validation_name(name): value for name, value in event.metrics.items()}
            case EpochEnded():
                return event.step, self._of_epoch(event)
        return None

    def _of_epoch(self, event: EpochEnded) -> Scalars:
        training = {name: value for name, value in event.metrics.items() if not is_validation(name)}
        scalars = {f"epoch_{name}": value for name, value in training.items()}
        scalars |= {"epoch_seconds": event.seconds, "epoch_samples_per_second": event.samples_per_second}
        if self._evaluated_epoch != event.epoch:  # else the evaluation's event had them
            scalars |= {name: value for name, value in event.metrics.items() if is_validation(name)}
        if self._logged_epoch != event.epoch:  # an epoch shorter than log_every_n_steps must show as a loss too
            scalars |= {**training, "samples_per_second": event.samples_per_second}
        return scalars


def _of_step(event: StepEnded) -> Scalars:
    scalars: Scalars = {"loss": event.loss} | event.metrics
    scalars |= {"learning_rate": event.learning_rate, "samples_per_second": event.samples_per_second}
    for name in ("gradient_norm", "device_utilization", "communication_seconds", "communication_hidden"):
        value = getattr(event, name)
        if value is not None:
            scalars[name] = value
    return scalars
