"""The lock of a run directory, held by the launching process: `fit`, the command line, or rank 0."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distributed.core.atomic import make_private
from distributed.core.errors import DistributedError, LaunchError
from distributed.core.locks import REQUEUE_S, STALE_S, InUse, Lock, LockFile, Owner


@contextmanager
def owned(run_dir: str | os.PathLike[str], *, resume: bool, token: str = "") -> Iterator[None]:
    """Hold the run directory's lock. A run that resumes waits a while for the previous run to end."""
    lock = Lock(LockFile(make_private(Path(run_dir).absolute())), Owner.me(token or uuid.uuid4().hex))
    try:
        lock.acquire(REQUEUE_S if resume else 0.0)
    except InUse as used:
        raise LaunchError([used.problem("the run directory", "run_dir")]) from None
    except OSError as failed:
        raise LaunchError(
            f"the run directory {run_dir} cannot be locked", why=str(failed), do="choose another run_dir"
        ) from failed
    with lock:
        try:
            yield
        except DistributedError:  # its message says what happened
            raise
        except BaseException as ended:
            if not lock.is_lost:
                raise
            raise _taken(lock) from ended
        if lock.is_lost:
            raise _taken(lock)


def _taken(lock: Lock) -> LaunchError:
    return LaunchError(
        f"the run directory {lock.place.name} was taken by another run",
        why=f"the run did not renew its lock for {STALE_S:.0f} s, for example because its machine was suspended",
        do="let that run finish, or wait for it to end and resume: resume_from_checkpoint=true",
    )
