"""NCCL's communicators of a world that broke: aborted from another thread, and left behind without being destroyed.

torch's own `destroy_process_group` waits for ever in a group that was aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from distributed.core.env import announce
from distributed.runtime import torch_compat

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


class Communicators:
    """Of all groups that this process is in, also of those that a model makes while it runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._world = torch_compat.default_group() if dist.is_initialized() else None
        self._aborted: list[Any] = []

    def abort(self) -> None:
        """End what runs in them. Their kernels end at once; the rest, which takes half a second, is not waited for, and
        longer where a CUDA graph that holds such kernels is still there."""
        with self._lock:
            is_present = dist.is_initialized() and torch_compat.default_group() is self._world
            backends = [backend for backend in _backends() if backend not in self._aborted] if is_present else []
            self._aborted += backends
        for backend in backends:
            threading.Thread(target=backend.abort, name="nccl-abort", daemon=True).start()


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
