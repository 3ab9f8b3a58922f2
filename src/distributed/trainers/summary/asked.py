"""The summary at the start of a run, where the setting model_summary asks for it."""

from __future__ import annotations

from distributed.core.config import DistributedConfig
from distributed.data.source import Source
from distributed.train.task import Task

_DEPTH = 2


def print_summary(task: Task, config: DistributedConfig, source: Source) -> None:
    """To the depth that the setting says."""
    from distributed.trainers.summary.summarizing import summarize  # what training does not need

    depth = _DEPTH if config.model_summary is True else int(config.model_summary)
    print(summarize(task, config, source, depth), flush=True)
