"""A strategy that the user made: given by `strategy=`, or the one in whose scope the model was built."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from distributed.core.config import DistributedConfig
from distributed.core.env import WorkerEnv
from distributed.core.errors import PlanError, TaskError
from distributed.core.plan import Decision, Plan
from distributed.engines.tensorflow.world.strategy import KerasWorld, worker_world

_OF_SEVERAL = {  # whose replicas are in several processes, by `tensorflow_strategy`
    "multi_worker": tf.distribute.MultiWorkerMirroredStrategy,
    "parameter_server": tf.distribute.ParameterServerStrategy,
}


def users_world(strategy: Any, plan: Plan, env: WorkerEnv) -> KerasWorld | None:
    """Of a user's strategy with which this process trains by this plan; None: it trains with one of ours."""
    if strategy is None or int(strategy.num_replicas_in_sync) != plan.world_size:
        return None
    if not isinstance(strategy, tuple(_OF_SEVERAL.values())):
        return KerasWorld(strategy, range(plan.world_size)) if plan.engine["tasks"] == 1 else None
    is_planned = plan.engine["strategy"] == "multi_worker" and plan.engine["processes"] > 1
    if not is_planned or not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return None
    return worker_world(strategy, plan, env)


def checked_strategy(strategy: Any, config: DistributedConfig) -> Any:
    """A strategy that was given: all of its replicas are in this process, as many as the settings ask for."""
    for name, kind in _OF_SEVERAL.items():
        if isinstance(strategy, kind):
            raise PlanError(
                f"strategy= is a {kind.__name__}",
                why="the strategy has replicas in other processes, which would each take themselves for the only one",
                do=f"set tensorflow_strategy={name!r} in place of it, and give the model as a function that builds it",
            )
    if config.tensorflow_strategy in _OF_SEVERAL:
        raise PlanError(
            f"tensorflow_strategy={config.tensorflow_strategy!r} with strategy=",
            why=f"this process would train with the {type(strategy).__name__} that is given, and with no other",
            do="leave one of them out",
        )
    replicas, asked = int(strategy.num_replicas_in_sync), _asked(config)
    if asked not in (None, replicas):
        raise PlanError(
            f"strategy= has {replicas} replica{'s' * (replicas > 1)}, and the settings ask for {asked} devices",
            why="a strategy that is given trains with the replicas that it has",
            do="leave out num_gpus, or leave out strategy=",
        )
    return strategy


def adopted(strategy: Any, config: DistributedConfig) -> Any:
    """The strategy of a model's scope, if this process trains with it; None: a copy is trained in another."""
    if strategy is None or isinstance(strategy, tuple(_OF_SEVERAL.values())) or config.num_nodes > 1:
        return None
    asks_for_another = config.tensorflow_strategy in _OF_SEVERAL
    is_enough = _asked(config) in (None, int(strategy.num_replicas_in_sync))
    return strategy if is_enough and not asks_for_another else None


def why_there(home: Any, is_trained_there: bool) -> Decision:
    """What is trained of a model that was built in the scope of a strategy."""
    replicas = int(home.num_replicas_in_sync)
    built = f"it was built in the scope of a {type(home).__name__} of {replicas} replica{'s' * (replicas > 1)}"
    if is_trained_there:
        return Decision("the model trains in this process", built, "num_gpus, tensorflow_strategy")
    return Decision("a copy of the model is trained", f"{built}, and the settings ask for another", "num_gpus")


def check_outside(strategy: Any) -> None:
    """Refuse a `fit` in the scope of another strategy than the one that trains here."""
    entered = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and entered is not strategy:
        raise TaskError(
            f"fit is called in the scope of a {type(entered).__name__}",
            why="training enters the scope of its own strategy, and TensorFlow has one at a time",
            do="call fit after the `with strategy.scope():` block, in which only the model is built and compiled",
        )


def _asked(config: DistributedConfig) -> int | None:
    """Devices that the settings ask for, on one machine."""
    return config.num_gpus or config.gpus_per_node
