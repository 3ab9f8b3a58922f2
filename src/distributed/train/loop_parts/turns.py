"""Turns: what a run's loop hands out, one after the other, to what takes its steps and its evaluations."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from distributed.core.history import History
from distributed.data.loading.loader import Microbatch


class Turn(NamedTuple):
    """What comes next in a run: a step, answered with its StepOutput, or an evaluation, with its metrics."""

    microbatches: Sequence[Microbatch] | None  # of the step; None: an evaluation
    measures: bool = False  # whether the step's numbers are read
    epoch: int = 0
    within_epoch: bool = False  # of an evaluation: whether steps of its epoch may follow


Turns = Generator[Turn, Any, History]
