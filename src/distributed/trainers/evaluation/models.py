"""The model that an evaluation prepares: it leaves the user's own as it is, also where ranks hold parts of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.runtime.session import Session
from distributed.runtime.torch_compat import parameter_of_class
from distributed.strategies.checks.sharded_models import is_in_parts, mark_parts, unmark_parts
from distributed.strategies.model.materialize import is_meta
from distributed.train.task import Task


def task_for_evaluation(task: Task, plan: Plan, model: nn.Module | None = None) -> Task:
    """The same task without what trains; `model` in place of its own."""
    view = copy.copy(task)
    view.model = task.model if model is None else model
    view.optimizer = view.scheduler = None
    view.weigh_by(plan.loss_weighting)  # what its loss is a mean over, a training may have found out for its own mesh
    return view


@contextmanager
def model_in_world(task: Task, plan: Plan, session: Session, weights: str) -> Iterator[tuple[nn.Module, str]]:
    """The model that this rank prepares, and the checkpoint that it gets its weights from; "": it has them.

    After a run that has sharded the model, rank 0 has it whole and the others hold parts: these make room for all of it
    again, and the weights come from rank 0, or from the last checkpoint where the model was built without memory.
    """
    was_in_parts = is_in_parts(task.model)
    try:
        yield _choose(task, plan, session, weights)
    finally:
        if was_in_parts:
            mark_parts(task.model)


def _choose(task: Task, plan: Plan, session: Session, weights: str) -> tuple[nn.Module, str]:
    model, was = task.model, task.before_sharding
    here = is_in_parts(model) and not (was is not None and was.is_whole)
    mine = torch.tensor([float(here), float(is_meta(model))], device=session.device)
    in_parts, without_memory = session.sum("which ranks have the whole model", mine).tolist()
    if in_parts:
        if was is None or not weights:
            raise TaskError(
                "an earlier fit has sharded this model, and its checkpoint is not known",
                why="each rank holds a part of the model only",
                do="trainer.load_checkpoint('last'), or make a new trainer with Trainer.from_run",
            )
        if here:
            was.make_blank(weights, on_meta=was.was_on_meta)
            return model, weights if was.was_on_meta or in_parts == session.world_size else ""
        if was.was_on_meta:
            return copied(model, on_meta=True), weights
    elif without_memory and not weights:
        raise without_weights()
    elif without_memory:
        return copied(model, on_meta=True), weights
    return (model if plan.is_replicated else copied(model)), ""


def without_weights() -> TaskError:
    return TaskError(
        "the model has no weights: it was built on the meta device",
        why="an evaluation trains nothing, and weights that nobody has trained measure nothing",
        do="call trainer.fit(…) first, or trainer.load_checkpoint(path)",
    )


def copied(model: nn.Module, *, on_meta: bool = False) -> nn.Module:
    """The modules again, with the same memory or none: what an engine cuts of them, the original keeps."""
    known: dict[int, Any] = {}
    for parameter in model.parameters():
        value = parameter.detach().to("meta") if on_meta else parameter.detach()
        known[id(parameter)] = parameter_of_class(type(parameter), value, parameter.requires_grad)
    for buffer in model.buffers():
        known[id(buffer)] = buffer.detach().to("meta") if on_meta else buffer.detach()
    try:
        made = copy.deepcopy(model, known)
        unmark_parts(made)
        return made
    except Exception as failed:
        raise TaskError(
            f"the model cannot be copied: {type(failed).__name__}: {failed}",
            why="it is cut for the ranks, and the model that you hold must stay whole",
            do="leave out of it what cannot be copied (locks, open files), in __getstate__ or __deepcopy__",
        ) from failed
