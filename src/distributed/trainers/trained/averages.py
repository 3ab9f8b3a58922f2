"""Weights of a run beside those that it ended with: averaged ones, and those of its best checkpoint."""

from __future__ import annotations

import copy

import torch
from torch import nn

from distributed.checkpoint.exchange.averages import COMPONENT, choose_average
from distributed.checkpoint.exchange.best import BestCheckpoint, find_best
from distributed.checkpoint.exchange.catalog import Opened, open_one
from distributed.checkpoint.restore.reading import load_parts
from distributed.checkpoint.storage.chunks import ChunkStore
from distributed.core.errors import CheckpointError, TaskError
from distributed.runtime.host_memory import free_host_memory
from distributed.strategies.checks.sharded_models import is_in_parts


def averaged_copy(model: nn.Module, checkpoint: str, wanted: str) -> nn.Module:
    """A copy of a trained model with the averages that a callback has kept: of the one that is wanted, or the only."""
    opened = open_one(checkpoint)
    if not _is_whole(model, opened):
        raise TaskError(
            "this process has a part of the model only",
            why="an averaged model is a copy of the whole one",
            do='trainer.save_model("averaged.safetensors", averaged=True) writes it whole, and does not hold it',
        )
    label = choose_average(opened.manifest, wanted, checkpoint)
    values = _read(opened, COMPONENT, label)
    made = copy.deepcopy(model)
    _put(made, values)
    return made


def load_best_weights(
    model: nn.Module, checkpoint: str, metric: str, averaged: bool | str, *, is_main: bool
) -> BestCheckpoint:
    """Put the weights of a run's best checkpoint into a model that it has trained; see `Trainer.load_best`."""
    best, opened = find_best(checkpoint, metric)
    if not _is_whole(model, opened):
        if not is_main:
            return best
        raise TaskError(
            f"this process has a part of the model only, and the best {best.metric} is in {best.path}",
            why="the weights of a checkpoint are put into a whole model",
            do=f"distributed checkpoint export {best.path} --to best.safetensors; or set whole_model_on='all'",
        )
    values = _read(opened, "model")
    if averaged:
        label = choose_average(opened.manifest, averaged if isinstance(averaged, str) else "", opened.path)
        values |= _read(opened, COMPONENT, label)
    _put(model, values)
    return best


def _is_whole(model: nn.Module, opened: Opened) -> bool:
    """Whether a model has all tensors of a checkpoint, its parameters in their whole shape."""
    if not is_in_parts(model):
        return True
    entries = opened.manifest.shared.tensors
    saved = {name.removeprefix("model/"): entry.shape for name, entry in entries.items() if name.startswith("model/")}
    named = dict(model.named_parameters(remove_duplicate=False))
    has_all = saved.keys() <= named.keys() | dict(model.named_buffers(remove_duplicate=False)).keys()
    is_plain = all(type(parameter) is nn.Parameter and not parameter.is_meta for parameter in named.values())
    return has_all and is_plain and all(saved.get(name, p.shape) == tuple(p.shape) for name, p in named.items())


def _read(opened: Opened, *place: str) -> dict[str, torch.Tensor]:
    """The tensors of a component, or of a part of one; raises where memory is short."""
    prefix, manifest = "/".join((*place, "")), opened.manifest
    entries = manifest.shared.tensors
    needed = 2 * sum(entry.nbytes for path, entry in entries.items() if path.startswith(prefix))
    if needed > free_host_memory():
        raise CheckpointError(
            f"{opened.path} holds the weights, but this process cannot",
            why=f"to read them takes {needed / 2**30:.1f} GiB, and {free_host_memory() / 2**30:.1f} GiB are free",
            do=f"distributed checkpoint export {opened.path} writes them, and does not hold them",
        )
    boxes = {path: None if path.startswith(prefix) else () for path in entries}
    chunks = ChunkStore(opened.storage)
    (tree,) = load_parts(manifest, [manifest.shared], chunks, boxes=lambda path, shape: boxes[path])
    for name in place:
        tree = tree[name]
    return {name: value for name, value in tree.items() if isinstance(value, torch.Tensor)}


@torch.no_grad()
def _put(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    places = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name, value in values.items():
        if places[name].shape != value.shape:  # a buffer that the run has enlarged
            places[name].resize_(value.shape)
        places[name].copy_(value)
