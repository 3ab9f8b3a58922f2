"""Adapters: what was written for Lightning, Accelerate or the transformers Trainer, trained here; resolved on use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.adapters.lightning.task import lightning_task as lightning_task
    from distributed.adapters.transformers.trainer import hf_trainer as hf_trainer

_PUBLIC = {
    "hf_trainer": "distributed.adapters.transformers.trainer",
    "lightning_task": "distributed.adapters.lightning.task",
}
__all__ = ["hf_trainer", "lightning_task"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'distributed.adapters' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
