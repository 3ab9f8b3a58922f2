"""The program of one trial: `python -m distributed.launch.rank -m distributed.tune.trial <folder of the function>`.

The environment names the trial (observe/trial.py); how it ended goes over its line, and a traceback into its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import cloudpickle

from distributed.core.env import trial_in_env
from distributed.core.errors import TaskError
from distributed.observe.trial import trial_line
from distributed.tune.session import TrialStopped, returned_metrics, trial_session

FUNCTION, PATHS = "train_fn.pkl", "paths.json"


def write_function(train_fn: Callable[..., Any], folder: Path) -> None:
    """For the trials, which this user's own processes read; a script's functions travel by value."""
    try:
        content = cloudpickle.dumps(train_fn)
    except Exception as failed:  # pickling runs any object's own code, which may raise anything
        raise TaskError(
            "train_fn cannot be sent to the trials",
            why=str(failed).splitlines()[0],
            do="make what it uses (files, connections, locks) inside of it",
        ) from failed
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / FUNCTION, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    (folder / PATHS).write_text(json.dumps([path or os.getcwd() for path in sys.path]), encoding="utf-8")


def run_trial(train_fn: Callable[[Any], Any]) -> bool:
    """Run it in this process to its end, and tell that end; False when it failed."""
    session = trial_session()
    assert session is not None, "whoever runs trials names this one in the environment"
    line = trial_line(trial_in_env())
    line.tell("began")
    try:
        with _leaving_on_sigterm():
            returned = train_fn(session.params)
        line.tell("returned", metrics=returned_metrics(returned))
    except (TrialStopped, KeyboardInterrupt) as stopped:
        line.tell("left", error=str(stopped))
    except BaseException as failed:  # the process boundary: the failure is told, then the trial ends
        text = "".join(traceback.format_exception(failed))
        print(text, file=sys.stderr, flush=True)
        line.tell("failed", error="".join(traceback.format_exception_only(failed)).strip(), traceback=text)
        return False
    return True


@contextlib.contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """SIGTERM raises TrialStopped in train_fn, so that its `finally` runs; a Trainer has its own way meanwhile."""
    trial = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        if os.getpid() == trial:
            raise TrialStopped("its process was ended by SIGTERM")
        signal.signal(number, signal.SIG_DFL)  # in a fork, a worker of a DataLoader say, which knows nothing of this
        os.kill(os.getpid(), number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    folder = Path(sys.argv[1])
    sys.path[:] = json.loads((folder / PATHS).read_text(encoding="utf-8"))
    with (folder / FUNCTION).open("rb") as file:
        train_fn = pickle.load(file)  # written by the process that runs this trial, readable by this user alone
    if not run_trial(train_fn):
        sys.exit(1)


if __name__ == "__main__":
    main()
