"""Take a model that trains on one device and train it on many.

The public names are resolved on first use, so importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import callbacks as callbacks
    from distributed import comm as comm
    from distributed.bench.collectives.profile import profile_communication as profile_communication
    from distributed.comm.compression.gradient_compression import GradientCompression as GradientCompression
    from distributed.comm.custom import CustomCommunication as CustomCommunication
    from distributed.core.config import DistributedConfig as DistributedConfig
    from distributed.core.errors import DistributedError as DistributedError
    from distributed.core.history import History as History
    from distributed.data.length_buckets import LengthBucketSampler as LengthBucketSampler
    from distributed.engines.horovod.trainer import HorovodTrainer as HorovodTrainer
    from distributed.engines.ray.data import RayRows as RayRows
    from distributed.engines.ray.trainer import RayTrainer as RayTrainer
    from distributed.engines.tensorflow.trainer import TensorFlowDistributedTrainer as TensorFlowDistributedTrainer
    from distributed.strategies.joint_optimizer import OptimizerSetup as OptimizerSetup
    from distributed.train.callbacks.callback import Callback as Callback
    from distributed.train.predictions.reader import Predictions as Predictions
    from distributed.train.task import Task as Task
    from distributed.train.whole_set.functions import whole_set as whole_set
    from distributed.trainers.ddp import PyTorchDDPTrainer as PyTorchDDPTrainer
    from distributed.trainers.overlapped import OverlappedTrainer as OverlappedTrainer
    from distributed.trainers.own_loop.run import TrainingRun as TrainingRun
    from distributed.trainers.own_loop.start import start as start
    from distributed.trainers.trainer import Trainer as Trainer
    from distributed.tune.tuner import DistributedTuner as DistributedTuner

    __version__: str

_PUBLIC = {
    "Callback": "distributed.train.callbacks.callback",
    "CustomCommunication": "distributed.comm.custom",
    "DistributedConfig": "distributed.core.config",
    "DistributedError": "distributed.core.errors",
    "DistributedTuner": "distributed.tune.tuner",
    "GradientCompression": "distributed.comm.compression.gradient_compression",
    "History": "distributed.core.history",
    "HorovodTrainer": "distributed.engines.horovod.trainer",
    "LengthBucketSampler": "distributed.data.length_buckets",
    "OptimizerSetup": "distributed.strategies.joint_optimizer",
    "OverlappedTrainer": "distributed.trainers.overlapped",
    "Predictions": "distributed.train.predictions.reader",
    "PyTorchDDPTrainer": "distributed.trainers.ddp",
    "RayRows": "distributed.engines.ray.data",
    "RayTrainer": "distributed.engines.ray.trainer",
    "Task": "distributed.train.task",
    "TensorFlowDistributedTrainer": "distributed.engines.tensorflow.trainer",
    "Trainer": "distributed.trainers.trainer",
    "TrainingRun": "distributed.trainers.own_loop.run",
    "profile_communication": "distributed.bench.collectives.profile",
    "start": "distributed.trainers.own_loop.start",
    "whole_set": "distributed.train.whole_set.functions",
}
__all__ = [
    "Callback",
    "CustomCommunication",
    "DistributedConfig",
    "DistributedError",
    "DistributedTuner",
    "GradientCompression",
    "History",
    "HorovodTrainer",
    "LengthBucketSampler",
    "OptimizerSetup",
    "OverlappedTrainer",
    "Predictions",
    "PyTorchDDPTrainer",
    "RayRows",
    "RayTrainer",
    "Task",
    "TensorFlowDistributedTrainer",
    "Trainer",
    "TrainingRun",
    "__version__",
    "callbacks",
    "comm",
    "profile_communication",
    "start",
    "whole_set",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # pyproject.toml alone says which, and an installation keeps it
        return import_module("distributed.core.registry").installed_version()
    if name in ("callbacks", "comm"):  # modules
        return import_module(f"distributed.{name}")
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
