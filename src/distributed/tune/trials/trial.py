"""The program of one trial: `-m distributed.tune.trials.trial <folder>`.

The environment names the trial (observe/trial.py); how it ended goes over its line, and a traceback into its log.
"""

from __future__ import annotations

import contextlib
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

from distributed.core.atomic import make_private, read_sealed, write_sealed
from distributed.core.env import ticket_in_env, trial_in_env
from distributed.core.errors import TaskError
from distributed.core.protocol.ticket import Ticket
from distributed.observe.trial import trial_line
from distributed.tune.session import TrialStopped, returned_metrics, trial_session

FUNCTION = "train_fn.pkl"


def write_function(train_fn: Callable[..., Any], folder: Path) -> Ticket:
    """For the trials, which this user's own processes read; a script's functions travel by value. The ticket
    identifies that file."""
    try:
        content = cloudpickle.dumps(train_fn)
    except Exception as failed:  # pickling runs any object's own code, which may raise anything
        raise TaskError(
            "train_fn cannot be sent to the trials",
            why=str(failed).splitlines()[0],
            do="create what it uses (files, connections, locks) inside train_fn",
        ) from failed
    sealed = write_sealed(make_private(folder) / FUNCTION, content)
    return Ticket(sealed, tuple(path or os.getcwd() for path in sys.path))


def run_trial(train_fn: Callable[[Any], Any]) -> bool:
    """Run it in this process to its end, and report how it ended; False when it failed."""
    session = trial_session()
    assert session is not None, "the runner names the trial in the environment"
    line = trial_line(trial_in_env())
    line.tell("began")
    try:
        with _leaving_on_sigterm():
            returned = train_fn(session.params)
        line.tell("returned", metrics=returned_metrics(returned))
    except (TrialStopped, KeyboardInterrupt) as stopped:
        line.tell("left", error=str(stopped))
    except BaseException as failed:  # noqa: BLE001 - the process boundary: the failure is reported, then the trial ends
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
    ticket = Ticket.from_text(ticket_in_env())
    sys.path[:] = ticket.sys_path
    train_fn = pickle.loads(read_sealed(folder, ticket.payload))  # what the process that runs the search wrote
    if not run_trial(train_fn):
        sys.exit(1)


if __name__ == "__main__":
    main()
