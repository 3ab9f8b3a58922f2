"""Prefetch: the next step's batches are copied to the GPU on a stream of their own while this step computes.

Only for reading that happens elsewhere (in worker processes) or draws nothing: reading ahead in the process that trains
would change the order of its random numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from distributed.core.batch_plan import BatchPlan
from distributed.data.checks.tally import Tally
from distributed.data.drawn import Tree
from distributed.data.loading.loader import Step, StepSamples
from distributed.data.loading.transfer import to_device
from distributed.data.stream import StreamSamples


class EpochLoader(Protocol):
    """The steps of an epoch, from any step on, and what identifies their samples."""

    @property
    def steps_per_epoch(self) -> int | None: ...  # in the first

    def steps_in(self, epoch: int) -> int | None: ...

    @property
    def samples_per_epoch(self) -> int | None: ...

    @property
    def note(self) -> str: ...  # a warning about the epoch's order

    def order_digest(self, epoch: int) -> str: ...

    def tally(self, epoch: int, first_step: int, stop_step: int) -> Tally: ...

    def expect(self, digest: int) -> None: ...

    def state(self, epoch: int) -> Tree: ...

    def load_state(self, state: Tree) -> None: ...

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Step]: ...

    def sample_indices(
        self, epoch: int, step: int, batch: BatchPlan | None = None, rank: int | None = None
    ) -> list[int]: ...


class Ahead(EpochLoader, Protocol):
    """A loader from which a step can be read before it is trained."""

    @property
    def step_samples(self) -> StepSamples | StreamSamples | None: ...


class _Coming(NamedTuple):
    """A step on its way to the device."""

    step: Step
    copied: torch.cuda.Event | None  # after which it is there
    step_samples: StepSamples | StreamSamples | None


class Prefetch:
    """A loader one step ahead of training. `indices` are those of the step that is being trained."""

    def __init__(self, loader: Ahead, device: torch.device, *, max_steps: int | None = None) -> None:
        """`max_steps`: of the run, after whose last step none is read."""
        self._loader, self._device, self._max_steps = loader, device, max_steps
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._step_samples: StepSamples | StreamSamples | None = None
        self.order_digest, self.tally, self.expect = loader.order_digest, loader.tally, loader.expect
        self.state, self.load_state, self.steps_in = loader.state, loader.load_state, loader.steps_in

    @property
    def steps_per_epoch(self) -> int | None:
        return self._loader.steps_per_epoch

    @property
    def samples_per_epoch(self) -> int | None:
        return self._loader.samples_per_epoch

    @property
    def indices(self) -> list[int]:
        return [] if self._step_samples is None else self._step_samples.indices

    @property
    def read_digest(self) -> int:
        """Until the step that is being trained, not the one that was read last."""
        return self._step_samples.digest if isinstance(self._step_samples, StreamSamples) else 0

    @property
    def note(self) -> str:
        return self._loader.note

    def sample_indices(
        self, epoch: int, step: int, batch: BatchPlan | None = None, rank: int | None = None
    ) -> list[int]:
        return self._loader.sample_indices(epoch, step, batch, rank)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Step]:
        steps, end = self._loader.epoch(epoch, first_step), self._end_in(epoch)
        coming: _Coming | Exception | None = self._fetch(steps)
        for count in itertools.count(first_step + 1):
            if coming is None:
                return
            if isinstance(coming, Exception):  # the step before it was trained first, as without reading ahead
                raise coming
            now, is_last = coming, count == end
            coming = None if is_last else self._look_ahead(steps)
            if now.copied is not None:
                torch.cuda.current_stream(self._device).wait_event(now.copied)
            self._step_samples = now.step_samples
            yield now.step
            if is_last:  # and yet there is one more
                coming = self._fetch(steps)

    def _end_in(self, epoch: int) -> int | None:
        """After how many steps of an epoch the run ends; None: not known. A guess where the number of ranks has
        changed; being wrong, it costs one copy beside a step or one read."""
        before = [self.steps_in(other) for other in range(epoch)] if self._max_steps is not None else []
        known = [steps for steps in before if steps is not None]
        return None if self._max_steps is None or len(known) < epoch else self._max_steps - sum(known)

    def _look_ahead(self, steps: Iterator[Step]) -> _Coming | Exception | None:
        try:
            return self._fetch(steps)
        except Exception as failed:  # noqa: BLE001 - raised in place of the batch, when its step comes
            return failed

    def _fetch(self, steps: Iterator[Step]) -> _Coming | None:
        step = next(steps, None)
        if step is None:
            return None
        step_samples = self._loader.step_samples
        if self._stream is None:
            return _Coming(self._move(step), None, step_samples)
        # Memory of earlier batches is used again on this stream: first, the steps that read them must be done. All
        # that have begun are waited for; the one that is about to begin is not, so the copy overlaps with it.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            moved = self._move(step)
            return _Coming(moved, self._stream.record_event(), step_samples)

    def _move(self, step: Step) -> Step:
        micros = [micro._replace(batch=to_device(micro.batch, self._device)) for micro in step.microbatches]
        return step._replace(microbatches=micros)
