"""One step of a Keras model: gradients of micro-batches, summed over replicas, clipped and applied.

Each replica's loss is weighted by its part of the step's samples, so that the sum over replicas and micro-batches is
what one process would compute of the whole global batch, however that is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from distributed.core.plan import Plan
from distributed.engines.tensorflow.input.data import Micro
from distributed.engines.tensorflow.model.calls import call_of, traced
from distributed.engines.tensorflow.model.losses import LossOf
from distributed.engines.tensorflow.model.model import library_of, owns

_SHRINK, _GROW = 0.5, 2.0
_EPSILON = 1e-6  # torch's, by which its clipping keeps a norm of zero from dividing


class StepResult(NamedTuple):
    """Tensors; reading one waits for the step."""

    loss: Any  # mean over the step's samples, over all replicas
    gradient_norm: Any  # before clipping; -1 where nothing is clipped
    asked: Any  # how many processes were asked to stop


class Stepper:
    """Runs a model's steps under a strategy. Made in its scope, once the model and its optimizer are built."""

    def __init__(self, model: Any, strategy: tf.distribute.Strategy, plan: Plan) -> None:
        self._model, self._strategy = model, strategy
        is_legacy = library_of(model) != "keras"
        self._call = call_of(is_legacy=is_legacy)
        self._computes_metrics = not is_legacy or owns(type(model), "compute_metrics")
        self._loss = LossOf(model, strategy.num_replicas_in_sync, self._call)
        self._clip, self._clip_value = plan.optimizer.clip_norm, plan.optimizer.clip_value
        self.optimizer = _single(model.optimizer)
        self._is_legacy = not hasattr(self.optimizer, "apply")
        self._is_patched = False
        if not self._is_legacy and strategy.num_replicas_in_sync > 1:
            # Ours are summed already, since clipping and a look for infinities need the sum.
            self.optimizer._all_reduce_sum_gradients = lambda pairs: pairs
            self._is_patched = True
        self._variables = list(model.trainable_variables)
        self._trained = self._variables  # those that the loss depends on, found when a step is traced
        is_scaled = plan.precision.kind == "fp16" or self.optimizer is not model.optimizer
        self.scaler = Scaler(plan) if is_scaled else None
        self._not_asked = tf.zeros((), tf.float32)
        self._asked = tf.ones((), tf.float32)
        self._micro = traced(self._run_micro)
        self._last = traced(self._run_last)
        self._evaluate = traced(self._run_evaluation)

    def step(self, micros: Sequence[Micro], *, is_asked: bool = False) -> StepResult:
        """One optimizer step over these micro-batches."""
        summed: Any = None
        loss: Any = self._not_asked
        for micro in micros[:-1]:
            batch, weights, sizes = self._spread(micro)
            summed, loss = self._micro(batch, weights, sizes, summed, loss, micro.has_stand_in)
        batch, weights, sizes = self._spread(micros[-1])
        asked = self._asked if is_asked else self._not_asked
        return StepResult(*self._last(batch, weights, sizes, summed, loss, asked, micros[-1].has_stand_in))

    def settle(self) -> None:
        """Wait until the variables are those after the last step; here they always are."""

    def close(self) -> None:
        """The optimizer may be the user's own, who uses it afterwards: it adds up gradients itself again."""
        if self._is_patched:
            del self.optimizer._all_reduce_sum_gradients
            self._is_patched = False

    def evaluate(self, micro: Micro) -> tuple[Any, Any]:
        """The sum of the losses of an evaluation's batch over all replicas, and of its samples."""
        batch, _, sizes = self._spread(micro)
        loss, count = self._evaluate(batch, sizes, micro.has_stand_in)
        return loss, count

    def _spread(self, micro: Micro) -> tuple[Any, Any, Any]:
        """Each local replica's part, as values that the strategy hands to it."""
        parts = micro.parts
        if len(parts) == 1:
            part = parts[0]
            return part.batch, tf.constant(part.weight, tf.float32), tf.constant(part.size, tf.float32)
        first = parts[0].replica

        def of_replica(context: Any) -> Any:
            part = parts[context.replica_id_in_sync_group - first]
            return part.batch, tf.constant(part.weight, tf.float32), tf.constant(part.size, tf.float32)

        spread: tuple[Any, Any, Any] = self._strategy.experimental_distribute_values_from_function(of_replica)
        return spread

    def _run_micro(self, batch: Any, weight: Any, size: Any, summed: Any, loss: Any, has_stand_in: bool) -> Any:
        return self._strategy.run(self._gradients, args=(batch, weight, size, summed, loss, has_stand_in))

    def _run_last(
        self, batch: Any, weight: Any, size: Any, summed: Any, loss: Any, asked: Any, has_stand_in: bool
    ) -> Any:
        arguments = (batch, weight, size, summed, loss, asked, has_stand_in)
        gradients, sums, norm = self._strategy.run(self._summed_gradients, args=arguments)
        if self.scaler is None:
            self._strategy.run(self._apply, args=(gradients,))
        else:
            is_finite = tf.math.is_finite(self._local(norm))
            tf.cond(is_finite, lambda: self._take(gradients), lambda: tf.no_op())
            self.scaler.update(is_finite)
        loss, asked = tf.unstack(self._local(sums))
        return loss, self._local(norm), asked

    def _take(self, gradients: Any) -> Any:
        self._strategy.run(self._apply, args=(gradients,))
        return tf.no_op()

    def _local(self, value: Any) -> Any:
        """Of a value that is the same on every replica."""
        return self._strategy.experimental_local_results(value)[0]

    def _gradients(
        self, batch: Any, weight: Any, size: Any, summed: Any, loss: Any, has_stand_in: bool
    ) -> tuple[list[Any], Any]:
        """Of this replica alone, added to those of the micro-batches before."""
        x, y, sample_weight = unpacked(batch)
        with tf.GradientTape() as tape:
            predicted = self._call(self._model, x, training=True)
            own = self._loss(x, y, predicted, sample_weight, weight)
            scaled = own if self.scaler is None else own * self.scaler.scale
        found = tape.gradient(scaled, self._variables)
        self._trained = [v for v, gradient in zip(self._variables, found, strict=True) if gradient is not None]
        gradients = [tf.convert_to_tensor(gradient) for gradient in found if gradient is not None]
        if summed is not None:
            gradients = [before + gradient for before, gradient in zip(summed, gradients, strict=True)]
        self._measure(x, y, predicted, sample_weight=sample_weight, size=size, has_stand_in=has_stand_in)
        return gradients, loss + tf.cast(own, tf.float32)

    def _summed_gradients(
        self, batch: Any, weight: Any, size: Any, summed: Any, loss: Any, asked: Any, has_stand_in: bool
    ) -> tuple[list[Any], Any, Any]:
        """Over all replicas, in their true scale, clipped; and the other numbers that are summed with them."""
        gradients, loss = self._gradients(batch, weight, size, summed, loss, has_stand_in)
        context = tf.distribute.get_replica_context()
        everything = [*gradients, tf.stack([loss, asked])]
        if self._strategy.num_replicas_in_sync > 1:
            everything = context.all_reduce(tf.distribute.ReduceOp.SUM, everything)
        *gradients, sums = everything
        if self.scaler is not None:
            gradients = [gradient / tf.cast(self.scaler.scale, gradient.dtype) for gradient in gradients]
        norm = tf.constant(-1.0)
        if self._clip is not None or self.scaler is not None:
            norm = tf.linalg.global_norm([tf.cast(gradient, tf.float32) for gradient in gradients])
        if self._clip is not None:
            factor = tf.minimum(1.0, self._clip / (norm + _EPSILON))
            gradients = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        if self._clip_value is not None:
            gradients = [tf.clip_by_value(each, -self._clip_value, self._clip_value) for each in gradients]
        return gradients, sums, norm

    def _apply(self, gradients: list[Any]) -> None:
        if self._is_legacy:
            pairs = zip(gradients, self._trained, strict=True)
            self._call(self.optimizer.apply_gradients, pairs, skip_gradients_aggregation=True)
        else:
            self.optimizer.apply(gradients, self._trained)

    def _measure(self, x: Any, y: Any, predicted: Any, *, sample_weight: Any, size: Any, has_stand_in: bool) -> None:
        """The compiled metrics; a stand-in leaves no trace in them."""

        def update() -> Any:
            if self._computes_metrics:
                self._call(self._model.compute_metrics, x, y, predicted, sample_weight)
            else:  # legacy Keras reads the results as well, for which replicas would have to meet in a condition
                self._call(self._model.compiled_metrics.update_state, y, predicted, sample_weight)
            return tf.no_op()

        if has_stand_in:
            tf.cond(size > 0, update, lambda: tf.no_op())
        else:
            update()

    def _run_evaluation(self, batch: Any, size: Any, has_stand_in: bool) -> Any:
        sums = self._strategy.run(self._evaluation, args=(batch, size, has_stand_in))
        return tf.unstack(self._strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None))

    def _evaluation(self, batch: Any, size: Any, has_stand_in: bool) -> Any:
        x, y, sample_weight = unpacked(batch)
        predicted = self._call(self._model, x, training=False)
        loss = self._loss(x, y, predicted, sample_weight, size)
        self._measure(x, y, predicted, sample_weight=sample_weight, size=size, has_stand_in=has_stand_in)
        return tf.stack([tf.cast(loss, tf.float32), size])


class Scaler:
    """The scale of the loss under fp16: halved where gradients overflow, doubled after steps that went well."""

    def __init__(self, plan: Plan) -> None:
        self._interval = plan.precision.scaler_growth_interval
        self.scale = tf.Variable(plan.precision.scaler_init_scale, trainable=False, dtype=tf.float32, name="loss_scale")
        self.good_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="good_steps")

    def update(self, is_finite: Any) -> None:
        good = tf.where(is_finite, self.good_steps + 1, 0)
        grows = good >= self._interval
        factor = tf.where(is_finite, tf.where(grows, _GROW, 1.0), _SHRINK)
        self.scale.assign(self.scale * factor)
        self.good_steps.assign(tf.where(grows, tf.zeros_like(good), good))


def unpacked(batch: Any) -> tuple[Any, Any, Any]:
    """(inputs, targets, sample weights), of which all but the first may be missing; bare inputs are only these."""
    x, y, sample_weight = (*(batch if isinstance(batch, tuple) else (batch,)), None, None)[:3]
    return x, y, sample_weight


def _single(optimizer: Any) -> Any:
    """The optimizer inside one that scales the loss, which is done here."""
    return getattr(optimizer, "inner_optimizer", optimizer)
