"""A trained checkpoint's weights into the model of a trainer, without a training, and what a run says of itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed.checkpoint.exchange.catalog import Opened, open_one
from distributed.checkpoint.exchange.choosing import WORDS, open_chosen
from distributed.checkpoint.restore.reading import load_parts
from distributed.checkpoint.storage.chunks import ChunkStore
from distributed.core.documents.run_config import RunConfig
from distributed.core.errors import CheckpointError, first_of
from distributed.core.plan import LoraPlan, Plan
from distributed.core.run_dir import RunDir
from distributed.runtime.host_memory import free_host_memory
from distributed.strategies.checks.sharded_models import is_in_parts
from distributed.train.checks.nonpersistent import take
from distributed.train.checks.user_state import BUFFERS, LOSS
from distributed.train.task import Task

# What a model's predictions depend on, and its data; not where it was trained, nor what of it was saved.
_CARRIED = (
    *("mixed_precision", "scaler_init_scale", "scaler_growth_interval", "bf16_parameters", "batch_size", "seed"),
    *("loss_weighting", "lora"),
)


def find_checkpoint(which: str | int | os.PathLike[str], place: str) -> Opened:
    """Where `which` is a word or a step, of this place; else it is a path."""
    if isinstance(which, int) or which in WORDS:
        if not place:
            raise CheckpointError(
                f"which checkpoint is {which!r}?",
                why="this trainer has not trained, and neither checkpoint_dir nor run_dir is set",
                do="pass a path, or make the trainer with Trainer.from_run(run_dir, model)",
            )
        return open_chosen(place, which if isinstance(which, int) else str(which))
    return open_one(os.fspath(which))


def carried_settings(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings of a run that belong to its model, as they were given."""
    given = RunConfig.read(Path(run_dir)).config.given_values()
    return {name: value for name, value in given.items() if name in _CARRIED}


def checkpoints_of(run_dir: str | os.PathLike[str]) -> str:
    """Where a run keeps its checkpoints, also one that was moved since."""
    here = RunDir(run_dir).checkpoints
    return str(here) if here.is_dir() else Plan.read(Path(run_dir)).checkpoint.dir


def load_weights(task: Task, opened: Opened) -> None:
    """Into the user's own model, and its loss; raises where the checkpoint is of another one, or memory is short.

    A rank that holds a part of the model is passed over: an evaluation gets the weights where they are needed.
    """
    if is_in_parts(task.model) and not (task.before_sharding is not None and task.before_sharding.is_whole):
        return
    _check_memory(opened)
    manifest = opened.manifest
    lora = manifest.meta.get("plan", {}).get("memory", {}).get("lora")
    if lora:
        from distributed.strategies.model.lora import ensure_lora  # an extra

        ensure_lora(task.model, LoraPlan(**lora | {"targets": tuple(lora["targets"])}), seed=0)
    found = _read(opened)
    saves_alone = bool(lora and lora["saves_alone"])
    _check_names(task, found["model"], opened.path, is_partial=saves_alone)
    is_made = not any(tensor.is_meta for tensor in (*task.model.parameters(), *task.model.buffers()))
    task.model.load_state_dict(found["model"], strict=not saves_alone, assign=not is_made)
    take(task.model, found.get(BUFFERS, {}).get("model", {}))
    if LOSS in found:
        task.load_loss_state(found[LOSS])


def read_weights(path: str) -> dict[str, Any]:
    """The model's state dict in a checkpoint, whole."""
    opened = open_one(path)
    _check_memory(opened)
    weights: dict[str, Any] = _read(opened)["model"]
    return weights


def _read(opened: Opened) -> dict[str, Any]:
    """Without what an optimizer has."""
    (found,) = load_parts(
        opened.manifest,
        [opened.manifest.shared],
        ChunkStore(opened.storage),
        boxes=lambda name, shape: () if name.startswith("optimizer/") else None,
    )
    return found


def _check_memory(opened: Opened) -> None:
    tensors = opened.manifest.shared.tensors
    needed = sum(entry.nbytes for name, entry in tensors.items() if not name.startswith("optimizer/"))
    if needed > free_host_memory():
        raise CheckpointError(
            f"the model of {opened.path} takes {needed / 2**30:.1f} GiB",
            why=f"this process has {free_host_memory() / 2**30:.1f} GiB of memory left",
            do="evaluate it sharded, from a model on the meta device: load_checkpoint then reads on each rank its part",
        )


def _check_names(task: Task, saved: Mapping[str, Any], path: str, *, is_partial: bool) -> None:
    mine = task.model.state_dict()
    odd = [f"{name} is only in the checkpoint" for name in saved if name not in mine]
    if not is_partial:
        odd += [f"{name} is only in this model" for name in mine if name not in saved]
    for name, value in saved.items():
        own = getattr(mine.get(name), "shape", None)
        if own is not None and hasattr(value, "shape") and tuple(own) != tuple(value.shape):
            odd.append(f"{name} is {list(value.shape)} there and {list(own)} here")
    if odd:
        raise CheckpointError(
            f"the checkpoint {path} is of another model",
            why=first_of(odd, between="; "),
            do="make the model as it was made for the training, or choose another checkpoint",
        )
