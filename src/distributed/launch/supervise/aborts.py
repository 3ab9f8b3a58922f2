"""Failures that no rank could record: of one that native code aborted, by its last log lines, or that never began.

NCCL's watchdog, a thread of torch, ends a process by an uncaught exception: after an error of its GPU, a collective
that timed out, or the loss of a peer. Only the first is the fault of the rank that it ends.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from distributed.core.errors import LaunchError
from distributed.core.protocol.failure import FailureRecord
from distributed.launch.node.log_tail import crash_dump

_TAIL_BYTES = 1 << 20
_LAST_WORDS = re.compile(r"^\s*what\(\):\s+(.+)$", re.MULTILINE)
_WATCHDOG = re.compile(r"^(?:\[[^\]]*\]\s*)*Process group watchdog thread terminated with exception:\s*", re.IGNORECASE)
_OF_GPU = re.compile(r"CUDA error|CUDA failure|out of memory", re.IGNORECASE)


def last_words(log: str) -> str:
    """The message of an uncaught C++ exception in a log; "" if there is none.

    >>> last_words("what():  [PG ID 0 Rank 1] Process group watchdog thread terminated with exception: CUDA error: x")
    'CUDA error: x'
    """
    found = _LAST_WORDS.findall(log)
    return _WATCHDOG.sub("", found[-1]).strip() if found else ""


def aborted_record(log_path: str, *, rank: int, host: str, pid: int, time: float) -> FailureRecord | None:
    """The failure record of an aborted rank; None if its log names neither the GPU nor NCCL."""
    try:
        with Path(log_path).open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - _TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return None
    words = last_words(text)
    if not words:
        return None
    of_gpu = bool(_OF_GPU.search(words))
    if not of_gpu and "NCCL" not in words:
        return None
    return FailureRecord(
        rank=rank,
        host=host,
        pid=pid,
        time=time,
        type="AcceleratorError" if of_gpu else "DistBackendError",
        message=words,
        traceback=crash_dump(log_path),
        exit_code=1,
        collateral=not of_gpu,
    )


def unstarted_record(why: str, parent_log: Path, *, rank: int, host: str, time: float) -> FailureRecord:
    """The failure record of a rank that could not be forked; what its parent said last is the traceback."""
    tail = ""
    with contextlib.suppress(OSError):
        lines = parent_log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(line for line in lines if not line.startswith("preloaded "))[-_TAIL_BYTES:]
    return FailureRecord(
        rank=rank,
        host=host,
        pid=0,
        time=time,
        type="LaunchError",
        message=why,
        traceback=tail,
        exit_code=LaunchError.exit_code,
    )
