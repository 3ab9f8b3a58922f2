"""A logger as Accelerate has it: of the main process, unless a record says otherwise."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from distributed.core.env import worker_env


class MainProcessLogger(logging.LoggerAdapter[logging.Logger]):
    """Takes `main_process_only`, True by default."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:  # type: ignore[override]
        main_process_only = kwargs.pop("main_process_only", True)
        if kwargs.pop("in_order", False):
            raise TypeError("in_order=True: the ranks write to logs of their own")
        world = worker_env()
        if world is None or world.is_main or not main_process_only:
            super().log(level, msg, *args, stacklevel=kwargs.pop("stacklevel", 1) + 1, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs


def get_logger(name: str, log_level: str | None = None) -> MainProcessLogger:
    """
    >>> get_logger("script", "WARNING").isEnabledFor(logging.INFO)
    False
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return MainProcessLogger(logger, {})
