"""The learning rate of a Keras optimizer over a run: the plan's warm-up and decay, or the optimizer's own schedule."""

from __future__ import annotations

from typing import Any

import numpy as np

from distributed.core.plan import SchedulePlan
from distributed.core.rates import rate_factor, warmup_steps
from distributed.engines.tensorflow.model.model import has_rate_schedule


class Rate:
    """Sets the rate of the next step. Its peak is what the optimizer has when this is made, before any restore."""

    def __init__(self, optimizer: Any, plan: SchedulePlan, steps_per_epoch: int | None, total: int | None) -> None:
        self._optimizer, self._plan, self._total = optimizer, plan, total
        self._warmup = warmup_steps(plan, steps_per_epoch, total)
        self._peak = self.now

    def set(self, step: int, *, is_own: bool = False) -> None:
        """For the step after `step` steps; `is_own`: also where a checkpoint has brought another, constant one."""
        if not self._plan.is_constant or (is_own and not has_rate_schedule(self._optimizer)):
            self._optimizer.learning_rate = self._peak * rate_factor(self._plan, step, self._warmup, self._total)

    def put_back(self) -> None:
        """The peak, once all is over: the optimizer may be the user's own, who uses it afterwards."""
        if not self._plan.is_constant:
            self._optimizer.learning_rate = self._peak

    @property
    def now(self) -> float:
        return float(np.asarray(self._optimizer.learning_rate))
