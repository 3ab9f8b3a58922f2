"""Search for the best settings of a training: many trials, in parallel, the bad ones stopped early.

In a training function or script: `tune.report` reports metrics and keeps the trial's state, `tune.checkpoint` returns
that state to a trial that resumes, and `tune.params` are the trial's parameters in a script. Outside a search they do
nothing, so the same code runs by itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from distributed.tune.session import TrialStopped, trial_session
from distributed.tune.space import choice, grid, integer, loguniform, normal, uniform

__all__ = [
    "TrialStopped",
    "checkpoint",
    "choice",
    "grid",
    "integer",
    "loguniform",
    "normal",
    "params",
    "report",
    "uniform",
]


def report(metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
    """Report this trial's metrics to the search, and keep its state.

    `metrics` are numbers by name. `checkpoint` is a dictionary of plain values and tensors, or a folder that was
    written; it is copied. Where the search ends the trial here, this raises TrialStopped, which is no Exception.

    >>> report({"loss": 0.5}, checkpoint={"epoch": 1})  # outside of a trial: nothing
    """
    session = trial_session()
    if session is not None:
        session.report(metrics, checkpoint)


def checkpoint() -> Any:
    """The state to resume from: what this trial, or the one that it took over, reported last. None: start.

    >>> (checkpoint() or {"epoch": 0})["epoch"]
    0
    """
    session = trial_session()
    return None if session is None else session.checkpoint()


def params(file: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The parameters of this trial. Outside of one: those of a YAML file, such as the params.yaml of a search, or none.

    >>> params().get("hidden", 64)
    64
    """
    session = trial_session()
    if session is not None:
        return session.params
    return {} if file is None else dict(yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {})
