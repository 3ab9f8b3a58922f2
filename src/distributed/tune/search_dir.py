"""SearchDir: every name in the directory of a search; the folder of a trial in it is observe's TrialDir."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SearchDir:
    """The directory of one search.

    >>> SearchDir("runs/tune/x").trial("0003")
    'runs/tune/x/trials/0003'
    """

    path: str

    @property
    def journal(self) -> Path:
        """Each thing that happened, a line each."""
        return Path(self.path, "trials.jsonl")

    @property
    def table(self) -> Path:
        return Path(self.path, "results.csv")

    @property
    def best_config(self) -> Path:
        """The settings of the best trial."""
        return Path(self.path, "best.yaml")

    @property
    def best_params(self) -> Path:
        """All parameters of the best trial."""
        return Path(self.path, "params.yaml")

    @property
    def picture(self) -> Path:
        return Path(self.path, "search.svg")

    @property
    def function(self) -> Path:
        """The folder of train_fn, as it is sent to the trials."""
        return Path(self.path, "function")

    @property
    def parent_log(self) -> Path:
        """Of the process that trials are forked from."""
        return Path(self.path, "trial-processes.log")

    @property
    def ray(self) -> Path:
        """What Ray itself writes."""
        return Path(self.path, "ray")

    def actor_log(self, host: str, pid: int) -> Path:
        """Of the process that the trials of one of Ray's actors are forked from."""
        return self.ray / f"trial-processes-{host}-{pid}.log"

    def trial(self, name: str) -> str:
        return f"{self.path}/trials/{name}"
