"""NCCL's communicators of a world that broke: aborted from another thread, and left behind without being destroyed.

torch's own `destroy_process_group` waits for ever in a group that was aborted. And its abort waits, with a lock that
the next collective of the main thread needs, until no CUDA graph holds a kernel of the communicator: so the graphs are
not left to the main thread to destroy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from distributed.core.env import announce
from distributed.runtime import torch_compat

_CAPTURE_S = 20.0  # for a step that is being captured to be over
_LAUNCH_S = 1.0  # for a graph to be launched, unless the device is full of what waits for a lost peer
_left: list[Any] = []  # their destructors would wait as well; an abort has freed the memory that they had on the device


def leave_errors_to_us() -> None:
    """Before a group is made: torch's watchdog would end the process, or abort before the gate of steps is closed.

    When a peer is gone, it would also wait a minute for a dump, with a lock that this rank's next collective needs; and
    what watches it would end the process minutes after an abort that it takes for a hang.
    """
    announce(
        {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
        }
    )


class Graphs:
    """The CUDA graphs of one world, which the thread that aborts its communicators destroys.

    A capture calls the communicators, and its graph holds them before it is whole: an abort waits for it to end. A
    launch may itself wait for a device that only the abort frees: graphs are destroyed after the abort has begun.
    """

    def __init__(self) -> None:
        self._making, self._launching = threading.Lock(), threading.Lock()
        self._graphs: WeakSet[Any] = WeakSet()  # one that is captured again, or given up, frees its memory
        self._is_over = False

    @contextmanager
    def making(self, graph: Any) -> Iterator[None]:
        """Around a capture; nothing in it may wait for the device."""
        with self._making:
            self._check()
            yield
            self._graphs.add(graph)

    def launch(self, graph: Any) -> None:
        with self._launching:
            self._check()
            graph.replay()

    @property
    def are_used(self) -> bool:
        return len(self._graphs) > 0

    def close(self) -> None:
        """For another thread: no graph is made or launched from here on."""
        self._is_over = True
        if self._making.acquire(timeout=_CAPTURE_S):
            self._making.release()

    def destroy(self) -> None:
        """For another thread, once it has closed them; where a launch still waits for the device, at a later call."""
        if not self._launching.acquire(timeout=_LAUNCH_S):
            return
        try:
            while self._graphs:
                self._graphs.pop().reset()
        finally:
            self._launching.release()

    def _check(self) -> None:
        if self._is_over:
            raise RuntimeError("the CUDA graphs of this world were destroyed with its communicators")


class Communicators:
    """Of all groups that this process is in, also of those that a model makes while it runs."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._lock = threading.Lock()
        self._world = torch_compat.default_group() if dist.is_initialized() else None
        self._aborted: list[Any] = []

    def abort(self) -> None:
        """End what runs in them. Their kernels end at once; the rest, which takes half a second, is not waited for.

        To be called again until this rank has left: a graph whose launch waits for the device is destroyed after it.
        """
        self._graphs.close()
        with self._lock:
            is_present = dist.is_initialized() and torch_compat.default_group() is self._world
            backends = [backend for backend in _backends() if backend not in self._aborted] if is_present else []
            self._aborted += backends
        for backend in backends:
            threading.Thread(target=backend.abort, name="nccl-abort", daemon=True).start()
        self._graphs.destroy()


def _backends() -> Iterator[Any]:
    for group in torch_compat.known_groups():
        with suppress(RuntimeError):  # it has none for GPUs
            yield torch_compat.backend_of(group, "cuda")


def has_nccl() -> bool:
    """Whether this process is in a world that uses it."""
    return dist.is_initialized() and "nccl" in torch_compat.default_backends()


def forget_groups() -> None:
    """Leave all groups without shutting them down, which would wait for ranks that are gone."""
    _left.append(torch_compat.known_groups())
    torch_compat.forget_groups()
