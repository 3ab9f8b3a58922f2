"""A compiled Keras loss of one replica, so weighted that the replicas' sum is the loss of the whole batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import tensorflow as tf

from distributed.core.errors import Problem, TaskError

_MEANS = ("sum_over_batch_size", "mean", "auto")


class LossOf:
    """Means over samples are weighted by a replica's part of them; sums are added; regularization counts once.

    Keras itself divides a mean by the number of replicas where it runs in one of several, so that its optimizer can
    add them up. That takes all replicas for equally large, which the last ones of an epoch are not. Legacy Keras
    divides all means, which is undone here. Keras 3 does not divide what a loss function returns as one number, so that
    it must not divide at all.
    """

    def __init__(self, model: Any, replicas: int, call: Callable[..., Any]) -> None:
        """`call` calls what is the model's own."""
        self._model, self._replicas, self._call = model, replicas, call
        self._is_legacy = not hasattr(model, "_compile_loss")
        self._compiled = model.compiled_loss if self._is_legacy else model._compile_loss
        self._is_sum = self._adds_up()

    def __call__(self, x: Any, y: Any, predicted: Any, sample_weight: Any, weight: Any) -> Any:
        """`weight` is this replica's part of the step's samples (or their number, for a sum of losses)."""
        total = tf.zeros((), tf.float32)
        if self._compiled is not None:
            with nullcontext() if self._is_legacy else _UNDIVIDED:
                loss = tf.cast(self._call(self._compiled, y, predicted, sample_weight=sample_weight), tf.float32)
            part = weight * self._replicas if self._is_legacy else weight
            total += loss * (tf.cast(weight > 0, tf.float32) if self._is_sum else part)  # a stand-in has no weight
        for extra in self._model.losses:  # regularization, and what layers add: means over samples too
            total += tf.reduce_sum(tf.cast(extra, tf.float32)) * weight
        return total

    def _adds_up(self) -> bool:
        """Whether the loss is a sum over samples. What is neither a sum nor a mean over them cannot be put together."""
        kinds = {_reduction(loss) for loss in _flat(self._model.loss)}
        strange = kinds - {*_MEANS, "sum"}
        if strange or ("sum" in kinds and len(kinds) > 1):
            raise TaskError(
                [
                    Problem(
                        f"the loss is reduced by {' and '.join(sorted(kinds))}",
                        why="the replicas' losses add up only where all are means over samples, or all are sums",
                        do="use reduction='sum_over_batch_size', which is Keras's own default",
                    )
                ]
            )
        return kinds == {"sum"}


class _Undivided:
    """Meanwhile Keras 3 takes a loss for that of a single replica. Replicas are traced in threads, which may take turns
    in here: the last one out puts Keras's own functions back."""

    _NAMES = ("scale_loss_for_distribution", "unscale_loss_for_distribution")

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._own: dict[str, Any] = {}

    def __enter__(self) -> None:
        module = import_module("keras.src.losses.loss")
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._own = {name: getattr(module, name) for name in self._NAMES}
                for name in self._NAMES:
                    setattr(module, name, lambda value: value)

    def __exit__(self, *failure: object) -> None:
        module = import_module("keras.src.losses.loss")
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for name, own in self._own.items():
                    setattr(module, name, own)


_UNDIVIDED = _Undivided()


def _flat(loss: Any) -> list[Any]:
    if isinstance(loss, dict):
        return [part for value in loss.values() for part in _flat(value)]
    if isinstance(loss, list | tuple):
        return [part for value in loss for part in _flat(value)]
    return [] if loss is None else [loss]


def _reduction(loss: Any) -> str:
    """Names and functions are means in Keras."""
    return str(getattr(loss, "reduction", None) or ("none" if hasattr(loss, "reduction") else "mean"))
