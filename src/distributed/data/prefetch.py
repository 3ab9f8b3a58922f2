"""Prefetch: the next step's batches are copied to the GPU on a stream of their own while this step computes.

Only for reading that happens elsewhere (in worker processes) or draws nothing: whatever is read ahead in the process
that trains would take its random numbers out of turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from distributed.core.plan import BatchPlan
from distributed.data.loader import Step, Taken
from distributed.data.transfer import to_device


class Ahead(Protocol):
    """A loader that can be asked for a step before its turn."""

    taken: Taken | None

    @property
    def steps_per_epoch(self) -> int | None: ...

    @property
    def samples_per_epoch(self) -> int | None: ...

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Step]: ...

    def sample_indices(
        self, epoch: int, step: int, batch: BatchPlan | None = None, rank: int | None = None
    ) -> list[int]: ...


class Prefetch:
    """A loader one step ahead of whoever trains. `indices` are those of the step that is being trained."""

    def __init__(self, loader: Ahead, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._taken: Taken | None = None

    @property
    def steps_per_epoch(self) -> int | None:
        return self._loader.steps_per_epoch

    @property
    def samples_per_epoch(self) -> int | None:
        return self._loader.samples_per_epoch

    @property
    def indices(self) -> list[int]:
        return [] if self._taken is None else self._taken.indices

    def sample_indices(
        self, epoch: int, step: int, batch: BatchPlan | None = None, rank: int | None = None
    ) -> list[int]:
        return self._loader.sample_indices(epoch, step, batch, rank)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Step]:
        steps = self._loader.epoch(epoch, first_step)
        coming = self._fetch(steps)
        while coming is not None:
            step, copied, taken = coming
            coming = self._fetch(steps)
            if copied is not None:
                torch.cuda.current_stream(self._device).wait_event(copied)
            self._taken = taken
            yield step

    def _fetch(self, steps: Iterator[Step]) -> tuple[Step, torch.cuda.Event | None, Taken | None] | None:
        """The next step on its way to the device, and the event after which it is there."""
        step = next(steps, None)
        if step is None:
            return None
        taken = self._loader.taken
        if self._stream is None:
            return self._move(step), None, taken
        # Memory of earlier batches is used again on this stream: first, the steps that read them must be done. All
        # that have begun are waited for; the one that is about to begin is not, so the copy goes on beside it.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            moved = self._move(step)
            return moved, self._stream.record_event(), taken

    def _move(self, step: Step) -> Step:
        micros = [micro._replace(batch=to_device(micro.batch, self._device)) for micro in step.microbatches]
        return step._replace(microbatches=micros)
