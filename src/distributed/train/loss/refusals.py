"""Errors where the parts of a step would not add up to the loss of one process on the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distributed.core.errors import TaskError
from distributed.train.loss.rules import Mark

RETURN = (
    'return (loss, weight) from loss_fn or the step, or {"loss": …, "weight": …} from the model, with what the mean '
    "goes over"
)
SAMPLES = "set loss_weighting='samples' to weight by samples all the same"


def ignores(marks: Sequence[Mark], where: str, *, is_tried: bool, is_late: bool = False) -> TaskError:
    """`is_tried`: what the mean goes over was found out, and is not torch's to say."""
    back = "resume from the last checkpoint, " if is_late else ""
    how = RETURN if is_tried else "set loss_weighting='targets' (exact)"
    return TaskError(
        f"some targets are {' or '.join(map(str, marks))}, which the loss ignores, {where}",
        why="the mean then goes over fewer targets than the parts of a step are weighted by, so they do not add up",
        do=f"{back}{how}, or with loss_weighting='samples' to weight by samples all the same",
    )


def padded() -> TaskError:
    return TaskError(
        "the parts of a step have outputs of different shapes, with one row a sample",
        why="the loss is a mean over all elements, padding among them: one process pads the whole batch to one "
        "length, and each part of a step has its own",
        do=f"pad all samples to one length; or {RETURN} (without padding); or {SAMPLES}",
    )


def unknown(is_own: bool) -> TaskError:
    return TaskError(
        f"what {_whose(is_own)} is a mean over is not known",
        why="the parts of a step, on several ranks or one after the other, are weighted by it. It could not be "
        "found by trying: the first batch cannot be split, or the loss is random, or its model is sharded over ranks",
        do=f"{RETURN}; or {SAMPLES}",
    )


def fits_none(is_own: bool, weighting: str) -> TaskError:
    if weighting == "targets":
        why = "loss_weighting is 'targets', and the losses of parts of a batch do not add up that way"
        return TaskError(f"{_whose(is_own)} is not a mean over the targets", why=why, do="set loss_weighting='auto'")
    return TaskError(
        f"{_whose(is_own)} of a batch is not the mean of the losses of its parts",
        why="neither by samples nor by targets that count; so the parts of a step do not add up to the loss that "
        "one process has on the whole batch (a mean with weights of its own, or a loss that compares samples)",
        do=f"{RETURN}; or {SAMPLES}",
    )


def changed_kind(target: Any) -> TaskError:
    is_tensor = isinstance(target, torch.Tensor)
    kind = f"{target.dtype} in {target.dim()} dimensions" if is_tensor else type(target).__name__
    return TaskError(
        f"the targets of a step are {kind}",
        why="the targets of the first step were classes, over which the loss is a mean",
        do=f"{RETURN}; or {SAMPLES}",
    )


def _whose(is_own: bool) -> str:
    return "the model's own loss" if is_own else "the loss"
