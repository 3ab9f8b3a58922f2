"""RestartLimits: what of a run's settings the supervisor needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distributed.core.config import DistributedConfig


@dataclass(frozen=True)
class RestartLimits:
    """The limits of restarts, and the timeouts of a run."""

    max_restarts: int | None = 0  # None: the policy's default
    min_gpus: int | None = None  # None: all
    hang_timeout_s: float | None = None  # None: from the measured steps
    interrupt_grace_s: float = 300.0  # from the first Ctrl-C to SIGKILL: a few steps and a save
    collective_timeout_s: float = math.inf  # after which a collective fails

    @staticmethod
    def of(config: DistributedConfig) -> RestartLimits:
        return RestartLimits(
            config.max_restarts,
            config.min_gpus,
            config.hang_timeout_s,
            collective_timeout_s=config.collective_timeout_s,
        )
