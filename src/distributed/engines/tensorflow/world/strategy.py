"""Which tf.distribute strategy keeps the replicas alike, and this process's part in it."""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from distributed.core.choices import Device, ReplicaStrategy
from distributed.core.env import WorkerEnv
from distributed.core.errors import DistributedError, LaunchError, PlanError
from distributed.core.plan import Plan
from distributed.engines.tensorflow.model.calls import traced

_EARLY = "pass a function that builds the model, and leave all work with TensorFlow to it and to what comes after fit"


@dataclass(frozen=True)
class KerasWorld:
    """A strategy, and the replicas of it that live in this process."""

    strategy: Any
    replicas: range  # their numbers among all
    processes: int = 1

    @property
    def size(self) -> int:
        return int(self.strategy.num_replicas_in_sync)

    @property
    def measures_training(self) -> bool:
        """Whether the model's metrics are kept while it trains."""
        return True

    def gather(self, number: float) -> list[float]:
        """What every process passes, in their order."""
        if self.processes == 1:
            return [number]
        gathered = _gatherer(self.strategy)(tf.constant([float(number)], tf.float64)).numpy()
        return [float(value) for value in gathered[:: len(self.replicas)]]


@functools.cache
def _gatherer(strategy: Any) -> Any:
    def tell(own: Any) -> Any:
        return tf.distribute.get_replica_context().all_gather(tf.identity(own), axis=0)

    def gather(own: Any) -> Any:
        return strategy.experimental_local_results(strategy.run(tell, args=(own,)))[0]

    return traced(gather)


@dataclass(frozen=True)
class Setup:
    """What a strategy is made of; a process has one for each, however many fits it makes."""

    kind: ReplicaStrategy
    replicas: int = 1  # in this process
    device: Device = "cpu"
    communication: str = field(default="auto", compare=False)  # the first of a process counts: there is one world
    slot: int = field(default=0, compare=False)  # of its GPU, where it sees those of other processes too

    @staticmethod
    def of(plan: Plan, slot: int = 0) -> Setup:
        engine = plan.engine
        return Setup(engine["strategy"], engine["replicas"], plan.device, engine["communication"], slot)


def make_world(plan: Plan, env: WorkerEnv) -> KerasWorld:
    """The strategy that the plan names; made before TensorFlow has done anything else in this process."""
    setup = Setup.of(plan, env.local_rank)
    set_threads(setup, plan.threads_per_rank * setup.replicas)
    strategy = make_strategy(setup)
    _check_size(setup, strategy.num_replicas_in_sync, plan.world_size)
    if setup.kind == "multi_worker":
        return worker_world(strategy, plan, env)
    return KerasWorld(strategy, range(plan.world_size))


def worker_world(strategy: Any, plan: Plan, env: WorkerEnv) -> KerasWorld:
    """This process's part of a strategy of several processes."""
    replicas, first = plan.engine["replicas"], env.rank * plan.engine["replicas"]
    return KerasWorld(strategy, range(first, first + replicas), plan.engine["processes"])


def _check_size(setup: Setup, found: int, planned: int) -> None:
    """Gradients are summed over the replicas that there are, and weighted for those that were planned."""
    if found == planned:
        return
    if setup.kind == "tpu":
        raise PlanError(f"num_gpus={planned}, but this TPU has {found} cores", do=f"set num_gpus={found}")
    raise PlanError(
        f"{planned} replicas were planned, but TensorFlow has {found}",
        why="TF_CONFIG has other tasks than were started, or a process sees the GPUs of another",
        do="let `distributed train` start the processes, or give each a TF_CONFIG of all, and one GPU",
    )


@functools.cache
def make_strategy(setup: Setup) -> Any:
    """Some must be made before TensorFlow has done anything else in this process, and only once."""
    if setup.kind == "tpu":
        return _tpu()
    devices = _devices(setup)
    if setup.kind == "multi_worker":
        return _multi_worker(setup)
    if setup.replicas == 1:
        return tf.distribute.get_strategy()
    # On CPUs, sums in one order: TensorFlow's own choice is made for GPUs.
    ops = tf.distribute.ReductionToOneDevice() if setup.device == "cpu" else None
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=ops)


def _multi_worker(setup: Setup) -> Any:
    kinds = tf.distribute.experimental.CommunicationImplementation
    # No timeout: TensorFlow keeps a thread for each collective until its time is over, and soon none would be left.
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=kinds.NCCL if (setup.communication, setup.device) == ("nccl", "cuda") else kinds.AUTO
    )
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except RuntimeError as failed:
        raise _too_late("MultiWorkerMirroredStrategy", failed) from failed


def _devices(setup: Setup) -> list[str]:
    """The devices of this process's replicas; CPUs are as many parts of one."""
    gpus, replicas = tf.config.list_physical_devices("GPU"), setup.replicas
    seen = len(gpus)
    if setup.kind == "multi_worker" and setup.device == "cuda":
        gpus = own_gpu(gpus, setup.slot)
    try:
        if setup.device == "cpu":
            if gpus:
                tf.config.set_visible_devices([], "GPU")
            if replicas > 1:
                parts = [tf.config.LogicalDeviceConfiguration()] * replicas
                tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
        else:
            if len(gpus) < seen:
                tf.config.set_visible_devices(gpus, "GPU")
            for gpu in gpus:
                tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as failed:
        if setup.device == "cpu" and len(tf.config.list_logical_devices("CPU")) < replicas:
            raise _too_late(f"{replicas} replicas on CPUs", failed) from failed
    if setup.device == "cuda" and len(gpus) < replicas:
        raise PlanError(
            f"{replicas} replicas, but TensorFlow sees {len(gpus)} GPUs",
            why="the installed TensorFlow was built without CUDA, or the devices are hidden" if not gpus else "",
            do='pip install "tensorflow[and-cuda]", or set device=cpu' if not gpus else f"set num_gpus={len(gpus)}",
        )
    return [f"{'CPU' if setup.device == 'cpu' else 'GPU'}:{number}" for number in range(replicas)]


def own_gpu(gpus: list[Any], slot: int) -> list[Any]:
    """Of the GPUs that a process of several sees: mpirun, srun and torchrun hide none of them from it, and
    MultiWorkerMirroredStrategy takes all that it sees."""
    return gpus if len(gpus) < 2 else gpus[slot : slot + 1]


def _too_late(what: str, failed: RuntimeError) -> DistributedError:
    return LaunchError(
        f"{what} cannot be set up any more", why=f"TensorFlow was used in this process before: {failed}", do=_EARLY
    )


def _tpu() -> Any:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver()
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, tf.errors.OpError) as failed:
        raise PlanError(
            "tensorflow_strategy='tpu', but there is no TPU",
            why=str(failed).splitlines()[0],
            do="run it on a TPU VM, or set tensorflow_strategy='mirrored'",
        ) from failed
    return tf.distribute.TPUStrategy(resolver)


def set_threads(setup: Setup, threads: int) -> None:
    if setup.device == "cpu":
        with suppress(RuntimeError):  # of a process that has used TensorFlow: then it has its threads already
            tf.config.threading.set_intra_op_parallelism_threads(threads)
