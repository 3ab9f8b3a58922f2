"""FailureRecord: what a failing rank leaves behind for its launcher, and whether it failed only because another did."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from distributed.core.secrets import mask


@dataclass(frozen=True)
class FailureRecord:
    """The end of one rank in its own words; `time` is seconds since 1970 on its host."""

    rank: int
    host: str
    pid: int
    time: float
    type: str
    message: str
    traceback: str
    exit_code: int
    collateral: bool = False  # another rank's end broke this one's connection

    def write(self, path: Path) -> None:
        """Publish whole or not at all: the launcher may look at any time."""
        partial = path.with_name(f".{path.name}.{self.pid}")
        partial.write_text(json.dumps(mask(asdict(self)), indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)

    @staticmethod
    def read(path: Path) -> FailureRecord | None:
        try:
            return FailureRecord(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None


def failure_path(attempt_dir: str | os.PathLike[str], rank: int) -> Path:
    return Path(attempt_dir) / f"failure-{rank}.json"


def rank_of(path: Path) -> int:
    return int(path.stem.removeprefix("failure-"))


_NETWORK_TYPES = {"DistNetworkError", "DistBackendError", "DistStoreError", "DistError"}
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|failed to (recv|send)"
    r"|timed out (waiting|after)|remote process (has )?(exited|terminated)|heartbeat|read error|no route to host"
    r"|connectFullMesh|watchdog",
    re.IGNORECASE,
)


# A dataset may have lost a connection too: that of ranks is known by who tells of it.
_OF_TORCH = re.compile(r"gloo|nccl|c10d|ProcessGroup|TCPStore|rendezvous|collective|distributed/", re.IGNORECASE)
_OF_TENSORFLOW = {"UnavailableError", "AbortedError", "InternalError", "DeadlineExceededError"}
_ABORTED = re.compile(r"collective ops is aborted|coordination (service|agent)", re.IGNORECASE)
# The bare name of a task is in every error of a task's own kernels too.
_LOST_TASK = re.compile(r"(remote target|error reported from) /job:(worker|chief|ps)/", re.IGNORECASE)


def is_collateral(error: BaseException) -> bool:
    """Whether an error, or the one that it was raised from, is what a rank sees when another one ends.

    >>> is_collateral(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"))
    True
    >>> is_collateral(ValueError("Connection closed by peer")), is_collateral(RuntimeError("shapes differ"))
    (False, False)
    """
    link: BaseException | None = error
    for _ in range(20):
        if link is None:
            return False
        name = type(link).__name__
        if getattr(link, "collateral", False) or name in _NETWORK_TYPES:
            return True
        if name == "HorovodInternalError":  # also what ranks get that hand it tensors which differ
            return "mismatched" not in str(link).lower()
        if name in _OF_TENSORFLOW and _ABORTED.search(str(link)):
            return True
        if name in _OF_TENSORFLOW - {"InternalError"} and _LOST_TASK.search(str(link)):
            return True
        if name in ("RuntimeError", "TimeoutError") and _OF_TORCH.search(str(link)) and _LOST_PEER.search(str(link)):
            return True
        link = link.__cause__
    return False
