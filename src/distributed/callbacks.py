"""Callbacks that are ready to use: `Trainer(callbacks=[callbacks.EMA(0.999), callbacks.EarlyStopping("val_loss")])`.

The names are resolved on first use, so importing this module imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.train.callbacks.averaging import WeightAveraging as WeightAveraging
    from distributed.train.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from distributed.train.callbacks.ema import EMA as EMA
    from distributed.train.callbacks.freeze import Freeze as Freeze
    from distributed.train.callbacks.swa import SWA as SWA

_PUBLIC = {
    "SWA": "distributed.train.callbacks.swa",
    "EMA": "distributed.train.callbacks.ema",
    "EarlyStopping": "distributed.train.callbacks.early_stopping",
    "Freeze": "distributed.train.callbacks.freeze",
    "WeightAveraging": "distributed.train.callbacks.averaging",
}
__all__ = ["EMA", "SWA", "EarlyStopping", "Freeze", "WeightAveraging"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'distributed.callbacks' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
