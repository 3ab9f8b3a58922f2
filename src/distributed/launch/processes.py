"""RankProcess: one started rank with everything that it starts itself, so that nothing of it outlives the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from distributed.launch.request import ProcessSpec


class RankProcess:
    """A rank and its process group (data loader workers are in it)."""

    def __init__(self, spec: ProcessSpec, environ: Mapping[str, str]) -> None:
        self.rank = spec.rank
        self.log_path = spec.log_path
        self.ended_by_us = False
        self._gone = False  # with all of its group: the number may be another's from then on
        log = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        try:
            # A session of its own: Ctrl-C reaches the launcher alone, which tells the ranks once.
            self._process = subprocess.Popen(
                spec.argv,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code once the rank has ended; what it left running is asked to end too."""
        ended_before = self._process.returncode is not None
        code = self._process.poll()
        if code is not None and not ended_before:
            self._signal_group(signal.SIGTERM)
        if code is not None and not self._gone:
            self._gone = not self._group_exists()
        return code

    def signal(self, number: int) -> None:
        """To the rank alone: it decides what its children shall do."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def end(self, number: int) -> None:
        """End the rank and all of its children; its exit code says nothing from here on."""
        self.ended_by_us = self.ended_by_us or self._process.poll() is None
        self._signal_group(number)

    def is_gone(self) -> bool:
        """Whether the rank and everything that it started have ended."""
        return self.poll() is not None and self._gone

    def _group_exists(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _signal_group(self, number: int) -> None:
        if not self._gone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


def end_all(processes: Sequence[RankProcess], grace_s: float) -> None:
    """SIGTERM, and SIGKILL for whatever is still there after the grace; returns when nothing is."""
    for process in processes:
        process.end(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while not all(process.is_gone() for process in processes):
        if time.monotonic() > deadline:
            for process in processes:
                process.end(signal.SIGKILL)
        time.sleep(0.02)
