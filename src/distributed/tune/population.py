"""Taking over: the state of one trial becomes that of another, as files."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from distributed.core.atomic import replace_folder
from distributed.core.run_dir import RunDir
from distributed.observe.trial import TrialDir
from distributed.tune.runner import Exploit, Params
from distributed.tune.trials.records import Trial

_TRIES = 5


def take_over(trial: Trial, source: Trial, params: Params, step: int) -> Exploit | None:
    """Copy the newest checkpoint of `source`, the one that it reported or its Trainer's; None while it has none, and
    when it goes away meanwhile: then nothing has changed.

    `step` is where the trial stands.
    """
    reported = source.checkpoint if os.path.isdir(source.checkpoint) else ""
    trained = source.saved if os.path.isdir(source.saved) else ""
    if not reported and not trained:
        return None
    coming = TrialDir(trial.directory).arriving
    try:
        _copy(reported, trained, coming)
    except OSError:  # its owner has saved newer ones and deleted this one, or the disk is full
        shutil.rmtree(coming, ignore_errors=True)
        return None
    source_step = source.checkpoint_step if reported else source.saved_step
    exploit = Exploit(trial.id, step, source.id, source_step, dict(trial.params), dict(params))
    own = TrialDir(trial.directory).checkpoints
    shutil.rmtree(own, ignore_errors=True)
    trial.lineage.append(exploit)
    trial.params, trial.is_untried = dict(params), True
    trial.checkpoint, trial.checkpoint_step = "", source_step
    trial.saved, trial.saved_step = "", 0
    if reported:
        trial.checkpoint = _move(coming / "reported", own, os.path.basename(reported))
    if trained:
        store = RunDir(Path(trial.directory, trial.run)).checkpoints
        trial.saved, trial.saved_step = _move(coming / "trained", store, os.path.basename(trained)), source.saved_step
    shutil.rmtree(coming, ignore_errors=True)
    return exploit


def _copy(reported: str, trained: str, coming: Path) -> None:
    shutil.rmtree(coming, ignore_errors=True)
    if reported:
        shutil.copytree(reported, coming / "reported" / os.path.basename(reported))
    if trained:
        _copy_store(Path(trained), coming / "trained")
        if not (coming / "trained" / os.path.basename(trained)).is_dir():
            raise FileNotFoundError(trained)


def _move(coming: Path, folder: Path, name: str) -> str:
    """To where the trial looks for it; the path of the checkpoint there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    replace_folder(coming, folder)
    return str(folder / name)


def _copy_store(checkpoint: Path, target: Path) -> None:
    """One of the Trainer's checkpoints with its chunks, as links: these files never change. It may be saving and
    deleting meanwhile."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        others = {name for name in names if name.startswith("step-") and name != checkpoint.name}
        return {name for name in names if name.startswith(".")} | (
            others if Path(folder) == checkpoint.parent else set()
        )

    for attempt in range(_TRIES):
        shutil.rmtree(target, ignore_errors=True)
        try:
            shutil.copytree(checkpoint.parent, target, copy_function=_link, ignore=ignored)
            return
        except (shutil.Error, FileNotFoundError):
            if attempt == _TRIES - 1:
                raise
            time.sleep(0.05 * 2**attempt)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        shutil.copy2(source, target)
    return target
