"""SlowLink: collectives that take as long as over a link of some bandwidth, on ranks of one machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class SlowLink:
    """Within it, each tensor that a rank gives to a collective is on the link for its bytes over `bytes_per_s`."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate, self._free = bytes_per_s, 0.0
        self._was = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "all_to_all_single")}

    def __enter__(self) -> SlowLink:
        dist.all_reduce = self._slowed("all_reduce", 0)
        dist.all_gather = self._slowed("all_gather", 1)
        dist.all_to_all_single = self._slowed("all_to_all_single", 1)
        return self

    def __exit__(self, *_: object) -> None:
        for name, call in self._was.items():
            setattr(dist, name, call)

    def _slowed(self, name: str, sent: int) -> Callable[..., Any]:
        call = self._was[name]

        def slowed(*args: Any, async_op: bool = False, **options: Any) -> Any:
            tensor: torch.Tensor = args[sent]
            self._free = max(time.perf_counter(), self._free) + tensor.numel() * tensor.element_size() / self._rate
            work = _Late(call(*args, async_op=True, **options), self._free)
            return work if async_op else work.wait()

        return slowed


class _Late:
    def __init__(self, work: dist.Work, due: float) -> None:
        self._work, self._due = work, due

    def wait(self, *args: Any) -> bool:
        self._work.wait(*args)
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return True
