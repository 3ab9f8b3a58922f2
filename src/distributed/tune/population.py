"""Taking over: the state of one trial becomes that of another, as files."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from distributed.tune.records import Trial
from distributed.tune.runner import Exploit, Params

_TRIES = 5


def take_over(trial: Trial, source: Trial, params: Params, step: int) -> Exploit | None:
    """Copy the newest checkpoint of `source`, the one that it reported or its Trainer's; None while it has none.

    `step` is where the trial stands.
    """
    reported = source.checkpoint if os.path.isdir(source.checkpoint) else ""
    trained = source.saved if os.path.isdir(source.saved) else ""
    if not reported and not trained:
        return None
    source_step = source.checkpoint_step if reported else source.saved_step
    exploit = Exploit(trial.id, step, source.id, source_step, dict(trial.params), dict(params))
    own = Path(trial.directory, "checkpoints")
    shutil.rmtree(own, ignore_errors=True)
    trial.lineage.append(exploit)
    trial.params, trial.is_untried = dict(params), True
    trial.checkpoint, trial.checkpoint_step = "", source_step
    trial.saved, trial.saved_step = "", 0
    if reported:
        trial.checkpoint = str(own / os.path.basename(reported))
        shutil.copytree(reported, trial.checkpoint)
    if trained:
        _copy_store(Path(trained), Path(trial.directory, trial.run, "checkpoints"))
        trial.saved, trial.saved_step = source.saved, source.saved_step
    return exploit


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
