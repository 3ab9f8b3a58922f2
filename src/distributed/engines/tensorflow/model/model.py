"""A Keras model taken apart, sent, and made again in a strategy's scope: Keras 3 as well as legacy (tf_keras)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import tensorflow as tf

from distributed.core.errors import TaskError
from distributed.core.plan import OptimizerPlan, Plan
from distributed.engines.tensorflow.input.sources import leaves
from distributed.engines.tensorflow.model.layers import (
    adapted_to_data,
    finalize,
    has_layer_losses,
    synchronize_batchnorm,
)
from distributed.engines.tensorflow.model.scope import call_in_scope
from distributed.engines.tensorflow.model.sending import LIBRARIES, decompose, made

_POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
_BUILD = "pass a function that builds it: TensorFlowDistributedTrainer(lambda: build_model())"
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
_WEIGHT_DECAY = {"adamw": 0.01}  # torch's, so that one setting means one thing


@dataclass(frozen=True)
class Compiled:
    """What a model was compiled with."""

    loss: Any = None
    loss_weights: Any = None
    metrics: Any = None
    weighted_metrics: Any = None
    optimizer: Any = None  # Remade, a name, a function that makes one, or None: the plan's

    def decompose(self) -> Compiled:
        return Compiled(**decompose(self.__dict__))


@dataclass(frozen=True)
class ModelParts:
    """All that a model is: how to build it, its numbers, and what it was compiled with."""

    library: str  # "keras" or "tf_keras"; "": known once it is built
    build: Callable[[], Any] | None = None
    config: Any = None
    customs: dict[str, Any] = field(default_factory=dict)  # classes that Keras does not know, by name
    weights: tuple[Any, ...] = ()
    compiled: Compiled | None = None
    optimizer_values: tuple[Any, ...] = ()

    def make(self, plan: Plan, batch: Any) -> Any:
        """The model, compiled and built with its numbers; in the scope of the strategy that shall train it."""
        model = self._make(plan)
        check_compiled(model, self.compiled, lambda: batch)
        compile_model(model, self.compiled, plan)
        if plan.world_size > 1:
            synchronize_batchnorm(model, plan.replicate.sync_batchnorm)
        build_state(model, batch)
        if self.weights:
            model.set_weights(list(self.weights))
            finalize(model)
        if self.optimizer_values:
            for variable, value in zip(state_of(model.optimizer), self.optimizer_values, strict=True):
                variable.assign(value)
        return model

    def _make(self, plan: Plan) -> Any:
        policy = _POLICIES.get(plan.precision.kind)
        if self.build is not None:
            if policy and not any(name in sys.modules for name in LIBRARIES):
                self.build()  # imports the Keras whose layers it makes
            with policy_of_layers(policy):
                return checked_model(call_in_scope(self.build), "what the given function returned")
        library = import_module(self.library)
        config = with_policy(self.config, policy) if policy else self.config
        try:
            return library.saving.deserialize_keras_object(config, custom_objects=self.customs, safe_mode=False)
        except Exception as failed:  # a layer's own code may raise anything
            raise TaskError("the model cannot be made again from its config", why=str(failed), do=_BUILD) from failed


def decompose_model(model: Any, compiled: Compiled | None) -> ModelParts:
    """The parts of a model that is given whole; `compiled` wins over what it was compiled with."""
    library = library_of(model)
    assert library is not None
    if adapted := adapted_to_data(model):
        raise TaskError(
            f"the layer {adapted[0]} cannot be sent to other processes with what it was adapted to",
            why="what a layer was adapted to is neither in its config nor in a weight",
            do=f"{_BUILD}; or give the layer its vocabulary or boundaries as an argument",
        )
    try:
        config = import_module(library).saving.serialize_keras_object(model)
    except Exception as failed:  # as above
        raise TaskError("the model cannot be sent to other processes", why=str(failed), do=_BUILD) from failed
    customs = {
        getattr(type(layer), "__name__", ""): type(layer)
        for layer in (model, *model._flatten_layers())
        if library_of_class(type(layer), direct=True) is None
    }
    config["compile_config"] = None  # ours is sent beside it
    optimizer = getattr(model, "optimizer", None)
    values: tuple[Any, ...] = ()
    if compiled is None and optimizer is not None and _is_built(optimizer):
        values = tuple(array_of(variable) for variable in state_of(optimizer))
    weights = tuple(model.get_weights()) if model.built else ()
    return ModelParts(
        library,
        build=None,
        config=config,
        customs=customs,
        weights=weights,
        compiled=(compiled or compiled_of(model)).decompose(),
        optimizer_values=values,
    )


def compiled_of(model: Any) -> Compiled:
    """What the model itself was compiled with; empty where it was not."""
    if not is_compiled(model):
        return Compiled()
    if library_of(model) == "keras":
        loss, metrics = model._compile_loss, model._compile_metrics
        user_loss = None if loss is None else loss._user_loss
    else:
        loss, metrics = model.compiled_loss, model.compiled_metrics
        user_loss = None if loss is None else loss._user_losses
    return Compiled(
        user_loss,
        None if loss is None else loss._user_loss_weights,
        None if metrics is None else metrics._user_metrics,
        None if metrics is None else metrics._user_weighted_metrics,
        model.optimizer,
    )


def is_compiled(model: Any) -> bool:
    return bool(getattr(model, "compiled", False) or getattr(model, "_is_compiled", False))


def compile_model(model: Any, given: Compiled | None, plan: Plan) -> None:
    """In scope, with new metrics and an optimizer of this plan. A model that a function compiled stays as it is."""
    if given is None:
        if is_compiled(model):
            _scale_rate(model.optimizer, plan.optimizer)
            return
        given = Compiled()
    library = import_module(library_of(model) or "keras")
    wanted = made(given.__dict__)
    optimizer = wanted.pop("optimizer")
    if optimizer is None:
        optimizer = make_optimizer(library, plan.optimizer)
    else:
        optimizer = library.optimizers.get(optimizer() if _is_factory(optimizer) else optimizer)
        _scale_rate(optimizer, plan.optimizer)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # the loss is scaled by the step, once
    extra = {"auto_scale_loss": False} if library.__name__ == "keras" else {}
    model.compile(optimizer=optimizer, **wanted, **extra)


def make_optimizer(library: Any, wanted: OptimizerPlan) -> Any:
    """The optimizer that the settings name, with torch's defaults where Keras has others."""
    options: dict[str, Any] = {"learning_rate": wanted.learning_rate}
    decay = wanted.weight_decay if wanted.weight_decay is not None else _WEIGHT_DECAY.get(wanted.name)
    if decay:
        options["weight_decay"] = decay
    if wanted.name != "sgd":
        options["epsilon"] = 1e-8
    elif wanted.momentum:
        options["momentum"] = wanted.momentum
    return getattr(library.optimizers, _OPTIMIZERS[wanted.name])(**options)


def _scale_rate(optimizer: Any, wanted: OptimizerPlan) -> None:
    if wanted.lr_factor != 1.0:
        optimizer.learning_rate = float(np.asarray(optimizer.learning_rate)) * wanted.lr_factor


def has_rate_schedule(optimizer: Any) -> bool:
    """Whether the optimizer has a schedule of its own, which sets its rate."""
    rate = getattr(optimizer, "_learning_rate", None)
    return rate is not None and hasattr(rate, "get_config") and callable(rate)


def build_state(model: Any, batch: Any) -> None:
    """Make all variables now, in scope: those of layers, metrics and the optimizer."""
    if library_of(model) == "keras":
        model._symbolic_build(data_batch=(*batch, None, None)[:3])
    else:
        x, y, _ = (*batch, None, None)[:3]
        predicted = model(x, training=False)
        if not model.compiled_loss.built:
            model.compiled_loss.build(predicted)
        if y is not None and not model.compiled_metrics.built:
            model.compiled_metrics.build(predicted, y)
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if not _is_built(optimizer):
        optimizer.build(model.trainable_variables)


def _is_built(optimizer: Any) -> bool:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return bool(getattr(inner, "built", False) or getattr(inner, "_built", False))


def state_of(optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(inner.variables)


def array_of(variable: Any) -> np.ndarray[Any, Any]:
    """A variable's value, over all replicas where each has a part of it."""
    return np.asarray(tf.convert_to_tensor(variable))


def with_policy(config: Any, policy: str | None) -> Any:
    """A model's config with this dtype policy wherever it has plain float32."""
    if isinstance(config, dict):
        changed = {key: with_policy(value, policy) for key, value in config.items()}
        dtype = changed.get("dtype")
        if "name" in changed and dtype == "float32" and changed.get("sparse") is None:
            changed["dtype"] = policy
        elif isinstance(dtype, dict) and dtype.get("config", {}).get("name") == "float32":
            changed["dtype"] = dtype | {"config": dtype["config"] | {"name": policy}}
        return changed
    if isinstance(config, list | tuple):
        return [with_policy(part, policy) for part in config]
    return config


@contextmanager
def policy_of_layers(policy: str | None) -> Iterator[None]:
    """Layers that are made meanwhile compute in this precision, of any version of Keras."""
    libraries = [keras.mixed_precision for keras in map(sys.modules.get, LIBRARIES) if keras is not None and policy]
    before = [mixed.global_policy() for mixed in libraries]
    for mixed in libraries:
        mixed.set_global_policy(policy)
    try:
        yield
    finally:
        for mixed, own in zip(libraries, before, strict=True):
            mixed.set_global_policy(own)


def library_of(model: Any) -> str | None:
    """Which Keras a model is of; None: it is no Keras model."""
    return library_of_class(type(model))


def library_of_class(kind: type, *, direct: bool = False) -> str | None:
    for one in (kind,) if direct else kind.__mro__:
        name = one.__module__.partition(".")[0]
        if name in LIBRARIES:
            return name
    return None


def checked_model(model: Any, what: str) -> Any:
    """A Keras model, or an error that says what it is instead."""
    library = library_of(model)
    if library is not None and hasattr(model, "compile"):
        _check_backend(library)
        return model
    is_torch = any(kind.__module__.partition(".")[0] == "torch" for kind in type(model).__mro__)
    raise TaskError(
        f"{what} is a {type(model).__name__}" + (", a torch module" if is_torch else ""),
        why="TensorFlowDistributedTrainer trains Keras models",
        do="pass it to PyTorchDDPTrainer" if is_torch else "pass a keras.Model, or a function that builds one",
    )


def _check_backend(library: str) -> None:
    """Keras 3 computes with the backend that was set when it was imported."""
    backend = "tensorflow" if library == "tf_keras" else import_module(library).config.backend()
    if backend != "tensorflow":
        raise TaskError(
            f"Keras computes with {backend} in this process",
            why="a tf.distribute strategy trains what TensorFlow computes",
            do="set KERAS_BACKEND=tensorflow, in the environment or in ~/.keras/keras.json, before keras is imported",
        )


def check_compiled(model: Any, given: Compiled | None, batch: Callable[[], Any]) -> None:
    """Refuse a model that has nothing to minimize, and one whose own step we would pass over."""
    kind = type(model)
    loss = (given or compiled_of(model)).loss
    if not leaves(loss) and not owns(kind, "compute_loss") and not has_layer_losses(model, batch):
        what = "the model is not compiled, and no loss is given" if not is_compiled(model) else "there is no loss"
        raise TaskError(what, why="training needs a number to minimize", do="model.compile(loss=…, …), or pass loss=…")
    own = [name for name in ("train_step", "compute_loss") if owns(kind, name)]
    if own:
        raise TaskError(
            f"{kind.__name__} has a {own[0]} of its own",
            why="a step is cut over replicas and micro-batches here, and Keras's own would not be called",
            do="use a compiled loss and add_loss in layers; or train it with model.fit",
        )


def owns(kind: type, name: str) -> bool:
    """Whether a user's class of models has a method in place of Keras's."""
    owner = next(one for one in kind.__mro__ if library_of_class(one, direct=True) and name in one.__dict__)
    return getattr(kind, name) is not owner.__dict__[name]


def _is_factory(optimizer: Any) -> bool:
    return callable(optimizer) and not hasattr(optimizer, "get_config")
