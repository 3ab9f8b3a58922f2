"""Reports: what every rank reports to the owner of its process, at the same points on all of them.

A checkpoint is reported once it is whole, when the next one begins or the run ends, with the metrics of its step.
"""

from __future__ import annotations

from collections.abc import Mapping

from distributed.core.protocol.process_owner import ProcessOwner
from distributed.train.progress import Progress


class Reports:
    def __init__(self, host: ProcessOwner) -> None:
        self._host = host
        self._begun: dict[int, dict[str, float]] = {}  # the metrics of the saves that are not known to be whole
        self._whole: tuple[dict[str, float], str] = ({}, "")

    def measured(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """At the end of an epoch."""
        self._host.report(_of(progress, metrics), "")

    def saves(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """Before a save; the one before it is whole when this one has begun."""
        latest = list(self._begun.items())[-1:]
        self._begun = dict(latest) | {progress.step: _of(progress, metrics)}

    def saved(self, step: int, path: str) -> None:
        self._whole = (self._begun.pop(step, {"step": step}), path)

    def tell(self) -> None:
        """After a save has begun, and at the end."""
        self._host.report(*self._whole)


def _of(progress: Progress, metrics: Mapping[str, float]) -> dict[str, float]:
    return {"step": progress.step, "epoch": progress.epoch, **metrics}
