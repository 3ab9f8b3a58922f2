"""Loader: what the loop asks of whatever gives it a rank's share of the training data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from distributed.core.plan import BatchPlan
from distributed.data.loader import Step


class Loader(Protocol):
    @property
    def steps_per_epoch(self) -> int | None: ...

    @property
    def samples_per_epoch(self) -> int | None: ...

    @property
    def indices(self) -> list[int]: ...  # of the samples that this rank used in the step that came last

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Step]: ...

    def sample_indices(
        self, epoch: int, step: int, batch: BatchPlan | None = None, rank: int | None = None
    ) -> list[int]: ...
