"""The data of a LightningModule or LightningDataModule: prepared and set up as Lightning does, and its DataLoaders."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from distributed.adapters.lightning.hooks import overrides
from distributed.adapters.lightning.module_calls import ModuleCalls
from distributed.adapters.lightning.stand_in import ModuleTrainer
from distributed.core.env import worker_env
from distributed.core.errors import TaskError

_DATA = "LightningDataModule"


def set_up(calls: ModuleCalls, datamodule: Any) -> None:
    """What Lightning calls before a training, in its order."""
    with _in_turn():
        if datamodule is not None:
            datamodule.prepare_data()
        calls.hook("prepare_data")
    if datamodule is not None:
        with _seeing(datamodule, calls.trainer):
            datamodule.setup("fit")
    calls.hook("setup", "fit", stage="training")
    calls.hook("configure_model", stage="training")


def loaders_of(calls: ModuleCalls, datamodule: Any) -> tuple[Any, Any]:
    """The training data, and the validation data if there is some."""
    train = _loader(calls, datamodule, "train_dataloader")
    if train is None:
        raise TaskError(
            f"{type(datamodule or calls.module).__name__} has no train_dataloader",
            do="write it, or pass DataLoaders to fit",
        )
    return train, _loader(calls, datamodule, "val_dataloader") if calls.has("validation_step") else None


def _loader(calls: ModuleCalls, datamodule: Any, name: str) -> Any:
    if datamodule is not None and overrides(datamodule, name, _DATA):
        with _seeing(datamodule, calls.trainer):
            whose, found = type(datamodule).__name__, getattr(datamodule, name)()
    elif calls.has(name):
        whose, found = type(calls.module).__name__, calls.call(name)
    else:
        return None
    if isinstance(found, list | tuple) and len(found) == 1:
        found = found[0]
    if isinstance(found, list | tuple) and not found:
        return None
    if not isinstance(found, DataLoader | Dataset):
        count = f" of {len(found)}" if hasattr(found, "__len__") else ""
        raise TaskError(
            f"{whose}.{name} returned a {type(found).__name__}{count}",
            why="an epoch is one pass over one DataLoader",
            do="return one; torch.utils.data.ConcatDataset and StackDataset join datasets",
        )
    return found


@contextmanager
def _seeing(datamodule: Any, trainer: ModuleTrainer) -> Iterator[None]:
    """Around a method of a data module, which may read `self.trainer`."""
    datamodule.trainer = trainer
    try:
        yield
    finally:
        datamodule.trainer = None


@contextmanager
def _in_turn() -> Iterator[None]:
    """One process of a machine after the other, where a launcher has started several."""
    env = worker_env()
    if env is None or env.local_world_size == 1:
        yield
        return
    path = Path(tempfile.gettempdir(), f"distributed-prepare-data-{os.getuid()}.lock")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
