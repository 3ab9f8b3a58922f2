"""Ends what a failed test left running: every process that it started, also those whose parents are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import psutil
import pytest

_MARK = "TESTED_BY"  # in the environment, which is passed on to all that is started


class Leftovers:
    """A plugin of the process that runs tests, which are alone in it."""

    def __init__(self) -> None:
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        os.environ[_MARK] = self._mark.partition("=")[2]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        before = set(_pids())  # among them the servers of fixtures, which outlive the test
        try:
            return (yield)
        except pytest.skip.Exception:
            raise
        except BaseException:
            end(pid for pid in _pids() if pid not in before and self._is_ours(pid))
            raise

    def pytest_sessionfinish(self) -> None:
        """Only those that have lost their parents: others end with this process, or are ended by their fixtures."""
        kept = {child.pid for child in psutil.Process().children(recursive=True)}
        end(pid for pid in _pids() if pid not in kept and self._is_ours(pid))

    def _is_ours(self, pid: int) -> bool:
        try:
            return pid != os.getpid() and self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False


def end(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit()) if os.path.isdir("/proc") else iter(())
