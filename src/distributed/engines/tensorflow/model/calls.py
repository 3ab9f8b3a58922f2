"""Tracing without AutoGraph, which would rewrite the engine's own functions for 0.4 s and change nothing in them.

What a user wrote is rewritten as the model's own Keras does it: Keras 3 never, legacy always, wherever AutoGraph is on
in what calls its layers, losses and metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

as_written = tf.autograph.experimental.do_not_convert


def traced(function: Callable[..., Any]) -> Any:
    """A tf.function of one of the engine's own."""
    return tf.function(as_written(function), reduce_retracing=True)


def call_of(*, is_legacy: bool) -> Callable[..., Any]:
    """How something of a model of this Keras is called in what is traced."""
    return tf.autograph.to_graph(_call) if is_legacy else _call


def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return function(*arguments, **named)
