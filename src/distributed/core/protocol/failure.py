"""FailureRecord: what a failing rank leaves behind for its launcher, and whether it failed only because another did."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from distributed.core.atomic import write_private
from distributed.core.engines.engine import ENGINES, PeerLoss
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
        write_private(path, json.dumps(mask(asdict(self)), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> FailureRecord | None:
        try:
            return FailureRecord(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None


_NETWORK_TYPES = {"DistNetworkError", "DistBackendError", "DistStoreError", "DistError"}
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|failed to (recv|send)"
    r"|timed out (waiting|after)|remote process (has )?(exited|terminated)|heartbeat|read error|no route to host"
    r"|connectFullMesh|watchdog",
    re.IGNORECASE,
)


# A dataset may have lost a connection too: that of ranks is known by the library that raises.
_OF_TORCH = re.compile(r"gloo|nccl|c10d|ProcessGroup|TCPStore|rendezvous|collective|distributed/", re.IGNORECASE)


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
        if any(_means_peer_loss(loss, link) for engine in ENGINES.entries.values() for loss in engine.peer_losses):
            return True
        if name in ("RuntimeError", "TimeoutError") and _OF_TORCH.search(str(link)) and _LOST_PEER.search(str(link)):
            return True
        link = link.__cause__
    return False


def _means_peer_loss(loss: PeerLoss, error: BaseException) -> bool:
    """Whether an engine means by this error that another rank has failed."""
    if type(error).__name__ not in loss.names:
        return False
    says, unless = (re.search(pattern, str(error), re.IGNORECASE) for pattern in (loss.says, loss.unless))
    return says is not None and (not loss.unless or unless is None)
