"""Trial: the runner's mutable record of one trial; a TrialResult is what is reported of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed.core.run_dir import RunDir
from distributed.observe.trial import TrialDir, TrialNote, newest_checkpoint
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
    has_not_reported: bool = False  # since it was started: a report may be of a step that it knew before
    reporter_pid: int = (
        0  # the process that `tune.report` was last called in; another one after its ranks were restarted
    )

    @staticmethod
    def new(request: TuneRequest, index: int, params: Mapping[str, Any]) -> Trial:
        name = f"{index:04d}"
        return Trial(index, name, dict(params), request.trial_dir(name))

    @staticmethod
    def of(past: TrialResult, index: int) -> Trial:
        """As a search that ended left it; it resumes from the newest checkpoint that is still there."""
        trial = Trial(
            index,
            id=past.id,
            params=past.params,
            directory=past.directory,
            status="pending",
            history=list(past.history),
            lineage=list(past.lineage),
        )
        trial.seconds, trial.failures = past.seconds, past.failures
        trial.checkpoint, trial.checkpoint_step = newest_checkpoint(past.directory)
        trial.saved, trial.saved_step = trial._newest_save()
        return trial

    def _newest_save(self) -> tuple[str, int]:
        """The Trainer's newest checkpoint, of its last `fit`, and the steps that it has behind it."""
        for fit in reversed(RunDir(Path(self.directory, self.run)).fits()):
            for path in sorted(fit.checkpoints.glob("step-*"), reverse=True):
                epoch = _epoch_of(path)
                if epoch is not None:
                    return str(path), self.base(fit.fit_number) + epoch
        return "", 0

    @property
    def stands_at(self) -> int:
        """The step after which it resumes."""
        return max(self.checkpoint_step, self.saved_step)

    @property
    def run(self) -> str:
        """The folder in its own where its Trainer writes."""
        return TrialDir(self.directory).run(len(self.lineage)).path.name

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

    def base(self, fit: int) -> int:
        """The steps before a `fit` of the Trainer: its first epoch is the step after them."""
        before = 0
        for report in self.history:
            if report.fit == fit:
                break
            before = report.step
        return before

    def add(
        self,
        step: int,
        metrics: Mapping[str, float],
        checkpoint: str,
        now: float,
        *,
        fit: int = 0,
        reporter_pid: int = 0,
    ) -> Report:
        """A report. The same epoch of the same `fit` replaces what was reported of it and later, and so does a step
        that a process repeats which took the place of another one; a later `fit` counts on."""
        is_again = self.has_not_reported or (not fit and reporter_pid != self.reporter_pid and self.reporter_pid != 0)
        if fit:
            step += self.base(fit)
        if fit or is_again:
            self.history = [report for report in self.history if report.step < step]
        if not fit:
            self.reporter_pid = reporter_pid
        self.has_not_reported, self.is_untried = False, False
        step = max(step, self.history[-1].step + 1 if self.history else 1)
        report = Report(self.id, step, dict(metrics), round(self.elapsed(now), 4), checkpoint, fit)
        self.history.append(report)
        if checkpoint:
            self.checkpoint, self.checkpoint_step = checkpoint, step
        return report

    def forget_takeover(self) -> None:
        """The last one had no effect: what was reported is of the parameters before it."""
        self.params, self.is_untried = dict(self.lineage.pop().before), False
        self.checkpoint, self.saved, self.returned = "", "", {}
        self.checkpoint_step, self.saved_step = 0, 0

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
            failures=self.failures,
        )


def _epoch_of(checkpoint: Path) -> int | None:
    """The epochs that one of the Trainer's checkpoints has behind it; None where it is not whole."""
    try:
        shared = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["shared"]
        return int(shared["skeleton"]["progress"]["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
