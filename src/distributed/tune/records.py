"""Trial: one trial as its runner knows it while it goes on; a TrialResult is what is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed.observe.trial import TrialNote
from distributed.tune.runner import Exploit, Params, Report, Status, TrialResult, TuneRequest


@dataclass
class Trial:
    index: int
    id: str
    params: Params
    directory: str
    status: Status = "pending"
    history: list[Report] = field(default_factory=list)
    lineage: list[Exploit] = field(default_factory=list)
    returned: dict[str, float] = field(default_factory=dict)
    failures: int = 0
    starts: int = 0
    seconds: float = 0.0  # of its starts before this one
    began_at: float | None = None  # when train_fn began, on the runner's clock
    checkpoint: str = ""  # that it reported
    checkpoint_step: int = 0
    saved: str = ""  # the newest checkpoint of the Trainer in it
    saved_step: int = 0
    error: str = ""
    is_untried: bool = False  # it took over another trial and has not reported since
    goes_on: bool = False  # since it was started it has not reported: a report may be of a step that it knew before

    @staticmethod
    def new(request: TuneRequest, index: int, params: Mapping[str, Any]) -> Trial:
        name = f"{index:04d}"
        return Trial(index, name, dict(params), request.trial_dir(name))

    @staticmethod
    def of(past: TrialResult, index: int) -> Trial:
        """As a search that ended left it; it goes on from the newest checkpoint that is still there."""
        trial = Trial(index, past.id, past.params, past.directory, "pending", list(past.history), list(past.lineage))
        trial.seconds = past.seconds
        folder = Path(past.directory, "checkpoints")
        steps = sorted(path.name for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []
        if steps:
            trial.checkpoint, trial.checkpoint_step = str(folder / steps[-1]), int(steps[-1])
        return trial

    @property
    def run(self) -> str:
        """Where its Trainer writes: another folder each time that it took over another trial."""
        return f"run-{len(self.lineage)}" if self.lineage else "run"

    def note(self, line: str, settings: Mapping[str, Any]) -> TrialNote:
        return TrialNote(
            id=self.id,
            params=dict(self.params),
            directory=self.directory,
            line=line,
            run=self.run,
            step=self.checkpoint_step,
            checkpoint=self.checkpoint,
            attempt=self.starts,
            settings=dict(settings),
        )

    def elapsed(self, now: float) -> float:
        return self.seconds + (now - self.began_at if self.began_at is not None else 0.0)

    def add(self, step: int, metrics: Mapping[str, float], checkpoint: str, now: float) -> Report:
        """A report. After a start, it replaces what was reported of this step and later; a second `fit` counts on."""
        if self.goes_on:
            self.history = [report for report in self.history if report.step < step]
            self.goes_on = False
        self.is_untried = False
        step = max(step, self.history[-1].step + 1 if self.history else 1)
        report = Report(self.id, step, dict(metrics), round(self.elapsed(now), 4), checkpoint)
        self.history.append(report)
        if checkpoint:
            self.checkpoint, self.checkpoint_step = checkpoint, step
        return report

    def forget_takeover(self) -> None:
        """The last one had no effect: what was reported is of the parameters before it."""
        self.params, self.is_untried = dict(self.lineage.pop().before), False
        self.checkpoint, self.saved, self.returned = "", "", {}

    def result(self, now: float) -> TrialResult:
        last = self.history[-1].metrics if self.history else {}
        return TrialResult(
            id=self.id,
            params=dict(self.params),
            status=self.status,
            metrics={**last, **self.returned},
            history=tuple(self.history),
            seconds=round(self.elapsed(now), 4),
            error=self.error,
            lineage=tuple(self.lineage),
            checkpoint=self.checkpoint or self.saved,
            directory=self.directory,
        )
