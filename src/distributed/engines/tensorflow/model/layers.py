"""Layers that need a hand where a model is sent or runs in several replicas: BatchNorm, adapted ones, own losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed.core.errors import TaskError


def batchnorms(model: Any) -> list[Any]:
    return [layer for layer in model._flatten_layers() if type(layer).__name__ == "BatchNormalization"]


def synchronize_batchnorm(model: Any, is_wanted: bool) -> None:
    """Statistics over all replicas, so that the result is that of one; or each replica's own."""
    for layer in batchnorms(model):
        layer.synchronized = is_wanted
        if is_wanted and hasattr(layer, "fused"):  # legacy: the kernel that images get knows one replica only
            layer.fused = False


def finalize(model: Any) -> None:
    """After weights were set from outside: Normalization computes with constants that it makes of them."""
    for layer in model._flatten_layers():
        if hasattr(layer, "adapt_mean"):
            layer.finalize_state()


def adapted_to_data(model: Any) -> list[str]:
    """Names of layers that learned from data what is neither in their config nor in a weight."""
    return [str(layer.name) for layer in model._flatten_layers() if _has_own_table(layer)]


def _has_own_table(layer: Any) -> bool:
    lookup = getattr(layer, "_lookup_layer", layer)  # of TextVectorization
    if hasattr(lookup, "input_vocabulary"):
        empty = int(lookup._token_start_index())
        return lookup.input_vocabulary is None and int(lookup.vocabulary_size()) > empty
    if type(layer).__name__ == "Discretization":
        has_boundaries = getattr(layer, "bin_boundaries", None) is not None
        return has_boundaries and getattr(layer, "input_bin_boundaries", None) is None
    return False


def has_layer_losses(model: Any, batch: Callable[[], Any]) -> bool:
    """Whether it has losses besides the compiled one; some are there only once the model is called."""
    if not model.losses:
        model(batch()[0], training=False)
    return bool(model.losses)


def check_layer_losses(model: Any, batch: Callable[[], Any], replicas_here: int) -> None:
    """Refuse what Keras 3 would compute wrongly: a synchronized BatchNorm stops one replica in the middle of a layer's
    call, the next one begins, and forgets the losses that layers of the first have added."""
    synchronized = [layer for layer in batchnorms(model) if layer.synchronized]
    if replicas_here == 1 or not synchronized or not hasattr(model, "_compile_loss"):
        return
    layers = list(model._flatten_layers())
    adding = [layer.name for layer in layers if getattr(layer, "activity_regularizer", None) is not None]
    if not adding:
        model(batch()[0], training=False)
        adding = [layer.name for layer in layers if layer._get_own_losses()]
    if adding:
        raise TaskError(
            f"the layer {adding[0]} adds a loss of its own, and {synchronized[0].name} is synchronized over "
            f"{replicas_here} replicas of one process",
            why="Keras loses such losses on all replicas but one there",
            do="set tensorflow_strategy='multi_worker', which has one replica a process, or sync_batchnorm=False",
        )
