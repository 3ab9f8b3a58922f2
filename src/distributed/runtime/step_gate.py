"""StepGate: on a GPU, a step changes the state only if its world was whole until its gradients were there.

The host runs ahead of the device. When a rank dies, the others' hosts may have sent off several more steps, all behind
an all-reduce that never ends. NCCL's abort ends it, with arbitrary memory content and no error on the device: the
optimizer's kernels behind it would take that for gradients.

    cut off:    close all gates ── then ── abort       (another thread of the host)
    each step:  all-reduce ── latch ── optimizer       (the device's stream; the optimizer reads the latch)

An all-reduce that ends before the gate closes has ended well; one that was aborted ends after it. So a latch that finds
the gate open has sums of all ranks before it, and one that finds it closed has the optimizer leave everything as it is.
It finds out on the device: no host waits. How many steps the device has taken is counted there too.

An abort also sends garbage to the peers of its rank, so the gates of all are closed before the first one
(`core/protocol/rank_protocol.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_OPEN, _CLOSED = (np.array(word, dtype=np.float32).view(np.int64)[0] for word in ([0.0, 1.0], [1.0, 0.0]))


class _OnDevice:
    """Pinned host memory as a kernel sees it, under the same address."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self._pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "<f4",
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }


class StepGate:
    """Of one world of one rank; made open, and closed for good."""

    def __init__(self, device: torch.device) -> None:
        word = torch.zeros(2)  # (is closed, what a step counts)
        on_gpu = device.type == "cuda"
        self._word = word.pin_memory() if on_gpu else word
        self._stored = self._word.numpy().view(np.int64)  # written in one store, so that no reader sees half of it
        self._stored[0] = _OPEN
        self._seen: Any = torch.as_tensor(_OnDevice(self._word), device=device) if on_gpu else self._word
        self._latched = torch.zeros(2, device=device)
        self._keeps = torch.tensor([0.0, 1.0], device=device)
        self.latch_tensor = self._latched[0]  # 1: the steps from here on are not taken
        self.is_closed = False
        self.behind = 0  # steps that the host has counted and the device has not taken, once that is known

    def latch(self) -> None:
        """Sent off behind a step's collectives and before its optimizer."""
        torch.addcmul(self._seen, self._latched, self._keeps, out=self._latched)

    def close(self) -> None:
        """Before the world's collectives are aborted; for any thread to call."""
        self.is_closed = True
        self._stored[0] = _CLOSED

    def restart(self) -> None:
        """Count the steps from here on."""
        self._latched[1].zero_()

    def find_behind(self, counted: int) -> int:
        """How many of the steps that the host counted since the last restart the device has not taken. Waits for it."""
        missing = counted - self.steps()
        self.behind = max(0, missing)
        return missing

    def steps(self) -> int:
        """Steps that the device has taken since the last restart. Waits for it."""
        return int(self._latched[1].item())

    def tensors(self) -> list[torch.Tensor]:
        """What a step changes here."""
        return [self._latched]
