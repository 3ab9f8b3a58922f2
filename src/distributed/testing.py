"""Test tools for users' own tasks: run a function on N real ranks on gloo or NCCL, and get what each returns."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from distributed.core.choices import Device
from distributed.core.collectives import choose_collectives
from distributed.core.env import inherited_environ, worker_env
from distributed.launch.local import LocalLauncher
from distributed.launch.node.preloading import ALWAYS
from distributed.launch.node.warm_parent import WarmParent
from distributed.launch.request import LaunchRequest
from distributed.runtime.session import Session
from distributed.runtime.world import leave_world


class _Lines:
    """Prints the ranks' output, so that pytest captures it."""

    def rank_line(self, rank: int, text: str) -> None:
        print(f"[r{rank}] {text}", flush=True)

    def unfinished_lines(self, lines: Mapping[int, str]) -> None:
        pass

    def attempt_began(self, attempt: int) -> None:
        pass

    def refresh(self) -> None:
        pass


class _Pool(threading.local):
    """The warm parent that this thread's worlds are forked from: it ends with the thread that makes it."""

    def __init__(self) -> None:
        self._parent: WarmParent | None = None
        self._made_for: tuple[int, dict[str, str]] | None = None

    def parent(self, environ: dict[str, str]) -> WarmParent:
        """One that imported torch with these variables, some of which are read only then."""
        wanted = (os.getpid(), {name: value for name, value in environ.items() if name != _CHANGES_EACH_TEST})
        if self._parent is None or self._made_for != wanted or not self._parent.is_alive:
            self.close()
            self._parent, self._made_for = WarmParent(sys.executable, environ, (*ALWAYS, __name__)), wanted
            atexit.register(self.close)
        return self._parent

    def close(self) -> None:
        """End the warm parent, unless this process is a fork of the one that made it."""
        if self._parent is not None and self._made_for is not None and self._made_for[0] == os.getpid():
            self._parent.close()
        self._parent = None
        atexit.unregister(self.close)


_CHANGES_EACH_TEST = "PYTEST_CURRENT_TEST"
_POOL = _Pool()


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, device: Device = "cpu", warm: bool = True
) -> list[Any]:
    """Call `function(*args)` on every rank of a new world of real processes; returns their results in order of rank.

    The function and its arguments are sent by value. A rank that fails raises RankFailedError here, with its traceback.
    With device="cuda" the ranks are joined by NCCL, and share the GPUs where there are fewer than ranks.
    The ranks are forked from a process that imported torch once; warm=False starts a new interpreter for each.

    >>> def total():
    ...     import torch, torch.distributed as dist
    ...     value = torch.ones(1)
    ...     dist.all_reduce(value)
    ...     return value.item()
    >>> run_ranks(total, 2)
    [2.0, 2.0]
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "call").write_bytes(cloudpickle.dumps((sys.path, device, cloudpickle.dumps((function, args)))))
        cores, gpus = os.cpu_count() or 1, 0 if device == "cpu" else torch.cuda.device_count()
        request = LaunchRequest(
            command=("-m", "distributed.testing", folder),
            run_dir=str(work / "run"),
            ranks_per_node=world_size,
            threads_per_rank=max(1, cores // world_size),
            device=device,
            shares_gpus=0 < gpus < world_size,
            gpus=gpus,
        )
        environ = inherited_environ()
        parent = _POOL.parent(environ) if warm and WarmParent.is_supported() else None
        LocalLauncher(environ).submit(request, _Lines(), parent=parent).wait()
        return [cloudpickle.loads((work / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _main(folder: Path) -> None:
    env = worker_env()
    assert env is not None
    sys.path[:], device, call = cloudpickle.loads((folder / "call").read_bytes())
    function, args = cloudpickle.loads(call)
    shares = device == "cuda" and torch.cuda.device_count() < env.world_size
    collectives, _ = choose_collectives(device)
    Session.open(env, device=device, collectives=collectives, timeout_s=120, shares_gpus=shares)
    result = function(*args)
    (folder / f"result-{env.rank}").write_bytes(cloudpickle.dumps(result))
    if dist.is_initialized():
        dist.barrier()
    leave_world()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
