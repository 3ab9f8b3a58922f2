"""RunDir: every name in the directory of a run, for writers and readers.

runs/<id>/ config.json plan.json history.json launch.json resize.json compression.json owner.lock join-token
           mlflow.json payload-….pt events.jsonl metrics.csv checkpoints/ ledger/ workers/ tensorboard/ <engine>/ fit-2/
           attempts/<n>/ parent.log rank-3.log heartbeat-3 failure-3.json error-3.json stack-3.txt lost-3.txt
                         collectives-3.json memory-3.{json,txt,pickle} place-3.json resumed.json ended.json
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

LOCK = "owner.lock"  # of the run that has a folder, a run directory or a checkpoint_dir
CHECKPOINTS = "checkpoints"  # also below a URL
_FIT, _HEARTBEAT, _FAILURE = "fit-", "heartbeat-", "failure-"


@dataclass(frozen=True, init=False)
class _Folder:
    """Made of a path, and taken for one by `os` and `pathlib`."""

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", Path(path))

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)


class RunDir(_Folder):
    """The directory of one run.

    >>> RunDir("runs/x").attempt(0).log(3).as_posix()
    'runs/x/attempts/0/rank-3.log'
    """

    @property
    def config(self) -> Path:
        """The settings."""
        return self.path / "config.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def history(self) -> Path:
        """What fit returns."""
        return self.path / "history.json"

    @property
    def evaluation(self) -> Path:
        """What an evaluation without training came to."""
        return self.path / "evaluation.json"

    @property
    def predictions(self) -> Path:
        """Predictions on their way to the process that has asked for them."""
        return self.path / "predictions"

    @property
    def metrics(self) -> Path:
        """A table of the run's numbers."""
        return self.path / "metrics.csv"

    @property
    def launch(self) -> Path:
        """The identity of this launch, which distinguishes it from earlier ones in the same directory."""
        return self.path / "launch.json"

    @property
    def compression(self) -> Path:
        """What compression='auto' has chosen, after which steps."""
        return self.path / "compression.json"

    @property
    def resize(self) -> Path:
        """The number of ranks that `distributed resize` requests, until the run has it."""
        return self.path / "resize.json"

    @property
    def lock(self) -> Path:
        """Which process has this directory, while it runs."""
        return self.path / LOCK

    @property
    def join_token(self) -> Path:
        """The secret of a run over several nodes, while it runs."""
        return self.path / "join-token"

    @property
    def mlflow(self) -> Path:
        """Which run of MLflow this is, so that a restart continues it."""
        return self.path / "mlflow.json"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoint_dir does not name another place."""
        return self.path / CHECKPOINTS

    @property
    def lengths(self) -> Path:
        """Of all samples, where they were measured for bucket_by_length."""
        return self.path / "lengths.npz"

    @property
    def dev_runs(self) -> Path:
        """Of runs that only try the run of this directory, each with a directory of its own (fast_dev_run)."""
        return self.path / "dev-runs"

    @property
    def passing(self) -> Path:
        """What such a run saves, until the model is back."""
        return self.path / "passing"

    @property
    def tensorboard(self) -> Path:
        """Where tensorboard_dir does not name another place."""
        return self.path / "tensorboard"

    @property
    def ledger(self) -> LedgerDir:
        return LedgerDir(self.path / "ledger")

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def engine_folder(self, name: str) -> Path:
        """What an engine's own library writes."""
        return self.path / name

    def payload(self, token: str, suffix: str) -> Path:
        """The job of the ranks that fit starts; each launch has a file of its own."""
        return self.path / f"payload-{token}{suffix}"

    def worker_count(self, rank: int) -> Path:
        """How many processes read the data of a rank."""
        return self.path / "workers" / f"rank-{rank}.json"

    def evaluations(self, kind: str) -> RunDir:
        """A directory for the next evaluation of a kind: validate-1, predict-1 …"""
        number = 1
        while (self.path / f"{kind}-{number}").exists():
            number += 1
        return RunDir(self.path / f"{kind}-{number}")

    def probe(self, rank: int) -> Path:
        """What a rank has measured in a trial before a run."""
        return self.path / f"probe-{rank}.json"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.attempts / str(number))

    def attempt_numbers(self) -> list[int]:
        """Of the attempts that have a folder, in their order."""
        entries = self.attempts.iterdir() if self.attempts.is_dir() else ()
        return sorted(int(entry.name) for entry in entries if entry.name.isdigit())

    def fit(self, number: int) -> RunDir:
        """Of the n-th fit of a program; the first has the directory itself.

        >>> RunDir("runs/x").fit(2).path.as_posix(), RunDir("runs/x/fit-2").fit_number, RunDir("runs/x").fit_number
        ('runs/x/fit-2', 2, 1)
        """
        return RunDir(self.path / f"{_FIT}{number}") if number > 1 else self

    @property
    def fit_number(self) -> int:
        """Which fit of its program writes here."""
        number = self.path.name.removeprefix(_FIT)
        return int(number) if self.path.name.startswith(_FIT) and number.isdigit() else 1

    def fits(self) -> list[RunDir]:
        """Of all fits of a program, the first first."""
        later = (RunDir(path) for path in self.path.glob(f"{_FIT}*"))
        return [self, *sorted((fit for fit in later if fit.fit_number > 1), key=lambda fit: fit.fit_number)]


class AttemptDir(_Folder):
    """The folder of one attempt, that is of one world of a run. A rank that survives into the next keeps its log."""

    @property
    def parent_log(self) -> Path:
        """Of the process that the ranks are forked from."""
        return self.path / "parent.log"

    @property
    def resumed(self) -> Path:
        """The state that an attempt began with, for a launcher that does not hear it from its ranks."""
        return self.path / "resumed.json"

    @property
    def ended(self) -> Path:
        """The fault that an attempt ended with, where another process decides on it than follows the run."""
        return self.path / "ended.json"

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def heartbeat(self, rank: int) -> Path:
        return self.path / f"{_HEARTBEAT}{rank}"

    def failure(self, rank: int) -> Path:
        return self.path / f"{_FAILURE}{rank}.json"

    def error(self, rank: int) -> Path:
        """What torch's `@record` writes of a function that raised."""
        return self.path / f"error-{rank}.json"

    def stack(self, rank: int) -> Path:
        """The stacks of a rank's threads, written at its launcher's request."""
        return self.path / f"stack-{rank}.txt"

    def lost(self, rank: int) -> Path:
        """The error by which a rank that survived knew that the world was lost."""
        return self.path / f"lost-{rank}.txt"

    def collectives(self, rank: int) -> Path:
        """The last collectives that a rank began."""
        return self.path / f"collectives-{rank}.json"

    def memory(self, rank: int, beside: int | None = None) -> Path:
        """What a rank had of its GPUs' memory when it failed, or when the rank `beside` it did."""
        return self.path / f"memory-{rank}{'' if beside is None else f'-beside-{beside}'}.json"

    def place(self, rank: int) -> Path:
        """On which host a rank runs, where a cluster's scheduler has placed it."""
        return self.path / f"place-{rank}.json"

    def heartbeats(self) -> dict[int, Path]:
        """By rank, of those that have begun."""
        found = self.path.glob(f"{_HEARTBEAT}*")
        return {int(path.name.removeprefix(_HEARTBEAT)): path for path in found}

    def failures(self) -> list[Path]:
        """Of the ranks that have written down how they failed."""
        return sorted(self.path.glob(f"{_FAILURE}*.json"))

    def has_failures(self) -> bool:
        return bool(self.failures())

    def logs(self) -> list[Path]:
        return list(self.path.glob("rank-*.log"))


class LedgerDir(_Folder):
    """The folder of the sample ledgers."""

    def file(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.samples"

    def files(self) -> list[Path]:
        """Also of ranks that the run no longer has."""
        return sorted(self.path.glob("rank-*.samples"))
