"""Take a model that trains on one device and train it on many.

The public names are resolved on first use, so importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.core.config import DistributedConfig as DistributedConfig
    from distributed.core.errors import DistributedError as DistributedError
    from distributed.core.history import History as History
    from distributed.engines.horovod.trainer import HorovodTrainer as HorovodTrainer
    from distributed.engines.ray.data import RayRows as RayRows
    from distributed.engines.ray.trainer import RayTrainer as RayTrainer
    from distributed.engines.tensorflow.trainer import TensorFlowDistributedTrainer as TensorFlowDistributedTrainer
    from distributed.train.callbacks.callback import Callback as Callback
    from distributed.train.task import Task as Task
    from distributed.trainers.ddp import PyTorchDDPTrainer as PyTorchDDPTrainer
    from distributed.trainers.own_loop.run import TrainingRun as TrainingRun
    from distributed.trainers.own_loop.start import start as start
    from distributed.trainers.trainer import Trainer as Trainer
    from distributed.tune.tuner import DistributedTuner as DistributedTuner

    __version__: str

_PUBLIC = {
    "Callback": "distributed.train.callbacks.callback",
    "DistributedConfig": "distributed.core.config",
    "DistributedError": "distributed.core.errors",
    "DistributedTuner": "distributed.tune.tuner",
    "History": "distributed.core.history",
    "HorovodTrainer": "distributed.engines.horovod.trainer",
    "PyTorchDDPTrainer": "distributed.trainers.ddp",
    "RayRows": "distributed.engines.ray.data",
    "RayTrainer": "distributed.engines.ray.trainer",
    "Task": "distributed.train.task",
    "TensorFlowDistributedTrainer": "distributed.engines.tensorflow.trainer",
    "Trainer": "distributed.trainers.trainer",
    "TrainingRun": "distributed.trainers.own_loop.run",
    "start": "distributed.trainers.own_loop.start",
}
__all__ = [
    "Callback",
    "DistributedConfig",
    "DistributedError",
    "DistributedTuner",
    "History",
    "HorovodTrainer",
    "PyTorchDDPTrainer",
    "RayRows",
    "RayTrainer",
    "Task",
    "TensorFlowDistributedTrainer",
    "Trainer",
    "TrainingRun",
    "__version__",
    "start",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # pyproject.toml alone says which, and an installation keeps it
        return import_module("distributed.core.registry").installed_version()
    if name not in _PUBLIC:
        raise AttributeError(f"module 'distributed' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__


def dask_clash() -> str:
    """What is wrong when Dask's scheduler, which owns the same import name, is installed beside us; else nothing."""
    try:
        version = metadata.version("distributed")
    except metadata.PackageNotFoundError:
        return ""
    return (
        f"Dask's package 'distributed' {version} is installed in this environment and owns the same import name as "
        "distributed-training: one of the two is broken here. Use separate environments, or: pip uninstall distributed"
    )


def _warn_of_clash() -> None:
    import warnings

    clash = dask_clash()
    if clash:
        warnings.warn(clash, RuntimeWarning, stacklevel=3)


_warn_of_clash()
