"""The end of a run that only tries (fast_dev_run): what it saved to bring the model home is taken away.

What a script does next with that model, from its checkpoints, is tried as well: it is passed over, and said to be.
"""

from __future__ import annotations

import math
import shutil
import warnings
from dataclasses import replace

from distributed.checkpoint.exchange.best import BestCheckpoint
from distributed.core.history import History
from distributed.core.run_dir import RunDir
from distributed.core.values import parse_best


def without_checkpoint(history: History, *, is_main: bool) -> History:
    """The history of a run that keeps no checkpoint. The model is back before any rank calls it."""
    kept = replace(history, checkpoint="")
    if is_main:
        run = RunDir(history.run_dir)
        shutil.rmtree(run.passing, ignore_errors=True)
        kept.save(run.history)
    return kept


def has_only_tried(history: History | None) -> bool:
    """Whether this is the history of such a run: it has trained, and there is no checkpoint."""
    return history is not None and bool(history.epochs) and not history.checkpoint


def say_nothing_is_kept(what: str) -> None:
    """`what`: what is done in place of what was asked for."""
    warnings.warn(f"fast_dev_run keeps no checkpoint: {what}", stacklevel=4)


def tried_best(history: History, wanted: str) -> BestCheckpoint:
    """In place of the best checkpoint: the end of the run, without a path."""
    metric, last = parse_best(wanted)[1] if wanted else "loss", history.epochs[-1]
    return BestCheckpoint("", history.steps, last.epoch, metric, last.metrics.get(metric, math.nan))
