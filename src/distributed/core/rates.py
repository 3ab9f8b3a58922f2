"""The learning rate's warm-up and decay as a function of the step alone, so a resumed run needs no state."""

from __future__ import annotations

import math

from distributed.core.errors import TaskError
from distributed.core.plan import SchedulePlan


def rate_factor(plan: SchedulePlan, step: int, warmup: int, total: int | None) -> float:
    """The part of the peak rate that the optimizer step with this number (from 0) uses.

    >>> plan = SchedulePlan("cosine", warmup_steps=2)
    >>> [round(rate_factor(plan, step, 2, 6), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < warmup:
        return (step + 1) / warmup
    if plan.kind == "constant" or total is None or total <= warmup:
        return 1.0
    progress = min(1.0, (step - warmup) / (total - warmup))
    falls = 0.5 * (1 + math.cos(math.pi * progress)) if plan.kind == "cosine" else 1 - progress
    return plan.min_ratio + (1 - plan.min_ratio) * falls


def warmup_steps(plan: SchedulePlan, steps_per_epoch: int | None, total: int | None) -> int:
    """How many steps the warm-up takes; refused where the schedule needs a length that is not known."""
    if steps_per_epoch is None and (plan.warmup_epochs or (plan.kind != "constant" and total is None)):
        raise TaskError(
            "the schedule needs the number of steps, and this stream's length is not known",
            why=f"lr_schedule={plan.kind!r} and warmup_epochs are fractions of the total number of steps",
            do="set max_steps and warmup_steps",
        )
    return plan.warmup_steps or round(plan.warmup_epochs * (steps_per_epoch or 0))
