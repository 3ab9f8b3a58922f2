"""KerasJob: all that a process needs in order to train."""

from __future__ import annotations

from dataclasses import dataclass

from distributed.core.plan import Plan
from distributed.engines.tensorflow.input.sources import KerasSource
from distributed.engines.tensorflow.model.model import ModelParts


@dataclass(frozen=True)
class KerasJob:
    """The plan, the model taken apart, and the data."""

    plan: Plan
    model: ModelParts | None  # None: one that is there is trained as it is
    train: KerasSource
    evaluation: KerasSource | None
