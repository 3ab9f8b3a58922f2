"""The strategy in whose scope a user built a model: its variables are used in that scope, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from distributed.core.errors import TaskError


def strategy_of(model: Any) -> Any:
    """The strategy in whose scope a model was built; None: in none."""
    for name in ("_distribute_strategy", "_distribution_strategy"):  # Keras 3, legacy
        if (kept := getattr(model, name, None)) is not None:
            return kept
    for variable in model.variables if model.built else ():
        for held in (variable, getattr(variable, "value", None)):  # Keras 3 has its own around TensorFlow's
            if (own := getattr(held, "distribute_strategy", None)) is not None:
                return own
    return None


def scope_of(strategy: Any) -> AbstractContextManager[Any]:
    return nullcontext() if strategy is None else strategy.scope()


def is_of_this_scope(optimizer: Any) -> bool:
    """Whether an optimizer was made in the scope that is entered now, in which alone it can make variables."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(inner, "_distribution_strategy", None) in (None, tf.distribute.get_strategy())


def call_in_scope(build: Callable[[], Any]) -> Any:
    """What a user's function builds in the scope that is entered now; a scope of its own is refused."""
    try:
        model = build()
    except RuntimeError as failed:
        if "different tf.distribute.Strategy" not in str(failed):
            raise
        raise _own_scope() from failed
    if getattr(model, "_distribute_strategy", None) not in (None, tf.distribute.get_strategy()):
        raise _own_scope()
    return model


def _own_scope() -> TaskError:
    return TaskError(
        "the function that builds the model enters the scope of a strategy of its own",
        why="the function is called in the scope of the strategy that trains, and TensorFlow has one at a time",
        do="leave strategy.scope() out of the function",
    )
