"""Tasks of a trainer's arguments: made of them, and checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.strategies.checks.elementwise import needs_closure
from distributed.train.checks.wrapped_models import refuse_wrapped
from distributed.train.given.optimizers import check_optimizer
from distributed.train.given.schedulers import check_scheduler
from distributed.train.loss.state import holder_of, refuse_trained_loss
from distributed.train.task import Task


@dataclass
class FunctionTask(Task):
    """A task whose steps are functions of (model, batch)."""

    steps: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # by the method that each replaces

    @property
    def has_own_step(self) -> bool:
        return "training_step" in self.steps

    @property
    def has_own_validation(self) -> bool:
        return "validation_step" in self.steps

    @property
    def has_own_optimizers(self) -> bool:
        return "configure_optimizers" in self.steps or self.optimizer is not None

    @property
    def training_step(self) -> Callable[..., Any]:  # type: ignore[override]  # it may take the name of an optimizer
        return self.steps.get("training_step", super().training_step)

    @property
    def validation_step(self) -> Callable[..., Any]:  # type: ignore[override]
        return self.steps.get("validation_step", super().validation_step)

    @property
    def predict_step(self) -> Callable[..., Any]:  # type: ignore[override]
        return self.steps.get("predict_step", super().predict_step)

    @property
    def configure_optimizers(self) -> Callable[..., Any]:  # type: ignore[override]
        return self.steps.get("configure_optimizers", super().configure_optimizers)

    def own_attributes(self) -> dict[str, Any]:
        return {}

    def own_code(self) -> dict[str, Any]:
        return {"task": dict(self.steps)}


_WHY_OBJECT = "the trainer calls an object, which has parameters and state; a class has none"


def make_task(model: Any, parts: Mapping[str, Any], steps: Mapping[str, Callable[..., Any] | None]) -> Task:
    """The task of a trainer's arguments: a task as it is, or one of a model, its parts and its step functions."""
    given = {name: step for name, step in steps.items() if step is not None}
    _refuse_classes(model, parts)
    if isinstance(model, Task):
        own = [name for name, value in {**parts, **given}.items() if value is not None]
        if own:
            raise TaskError(
                f"{', '.join(own)} beside a task",
                why=f"the task has its own: {type(model).__name__} is a Task, and a run has one",
                do=f"pass {own[0]} to {type(model).__name__}, or pass the model alone",
            )
        if "phase" not in vars(model):  # which Task's own __init__ sets
            raise TaskError(
                f"{type(model).__name__} is a Task that was not made ready",
                why=f"{type(model).__name__}.__init__ does not call that of Task",
                do="super().__init__(model), first",
            )
        return model
    for name, step in given.items():
        if not callable(step):
            raise TaskError(
                f"{name} is a {type(step).__name__}",
                why=f"{name} is a function that the trainer calls",
                do=f"{name}=lambda model, batch: …",
            )
    return FunctionTask(model, **parts, steps=given) if given else Task(model, **parts)


def _refuse_classes(model: Any, parts: Mapping[str, Any]) -> None:
    """A class in the place of an object of it: `loss_fn=nn.MSELoss`. Optimizers may be classes."""
    metrics = parts.get("metrics")
    named = [(f"metrics[{name!r}]", metric) for name, metric in dict(metrics or {}).items()]
    for name, value in (("model", model), ("loss_fn", parts.get("loss_fn")), *named):
        if isinstance(value, type) and issubclass(value, nn.Module | Task):
            kind = value.__name__
            do = f"Trainer({kind}(…))" if name == "model" else f"{name.partition('[')[0]}=… {kind}(…)"
            raise TaskError(f"{name} is the class {kind}, and not an object of it", why=_WHY_OBJECT, do=do)


def asked_of_engine(task: Task) -> dict[str, str]:
    """What a task needs beyond the default step, as the engines' features have it, and in its own words."""
    kind = type(task).__name__
    own = "a training_step" if isinstance(task, FunctionTask) else f"the training_step of {kind}"
    found = {"own_step": own} if task.has_own_step else {}
    if task.manual_optimization:
        found["manual"] = task.manual_as or f"manual_optimization of {kind}"
    elif task.has_phases:
        found["several_optimizers"] = f"{own}(model, batch, optimizer)"
    if needs_closure(task.optimizer):
        found["closure"] = f"the optimizer {getattr(task.optimizer, '__name__', type(task.optimizer).__name__)}"
    return found


def check_model(task: Task) -> None:
    """What is wrong with the model alone, before anything starts."""
    if not isinstance(task.model, nn.Module):
        kind = type(task.model)
        is_keras = any(base.__module__.partition(".")[0] in ("keras", "tf_keras") for base in kind.__mro__)
        raise TaskError(
            f"model is a {kind.__name__}" + (" of Keras" if is_keras else ""),
            why="the model must be a torch nn.Module",
            do="pass it to TensorFlowDistributedTrainer"
            if is_keras
            else "Trainer(model, …).fit(train_loader, val_loader)",
        )
    refuse_wrapped(task.model)


def check_task(task: Task) -> None:
    """What can be seen to be wrong before a training starts."""
    check_model(task)
    if not any(p.requires_grad for p in task.model.parameters()):
        raise TaskError(
            "the model has no parameter that requires a gradient",
            why="training changes parameters that require a gradient",
        )
    if isinstance(task.model, nn.ModuleDict) and not task.has_own_step:
        raise TaskError(
            f"a model of {len(task.model)} parts, and no training_step",
            why="how a batch goes through several modules, only a step of your own says",
            do="pass training_step=…, a function of (model, batch), in which model['name'] is a part",
        )
    refuse_trained_loss(holder_of(task.loss_fn, task.model), task.model)
    _check_optimizers(task)
    check_scheduler(task.scheduler)
    owner = getattr(task.scheduler, "optimizer", None)
    if isinstance(owner, torch.optim.Optimizer) and owner is not task.optimizer:
        raise TaskError(
            "the scheduler belongs to another optimizer than the one passed",
            why="the scheduler would change the learning rates of an optimizer that does not train",
            do="pass the optimizer that the scheduler was made with, or a function scheduler=lambda optimizer: …",
        )


def _check_optimizers(task: Task) -> None:
    if isinstance(task.optimizer, Mapping):
        raise TaskError(
            f"optimizer is a dict of {len(task.optimizer)}",
            why="several optimizers are made of the model in the ranks, each with its name",
            do="configure_optimizers=lambda model: {'generator': torch.optim.Adam(model['generator'].parameters()), …}",
        )
    if isinstance(task.optimizer, torch.optim.Optimizer):
        check_optimizer(task.optimizer, task.model)
    elif task.optimizer is not None and not callable(task.optimizer):
        raise TaskError(
            f"optimizer is a {type(task.optimizer).__name__}",
            why="the trainer takes an optimizer over this model's parameters, or a function that makes one of them",
            do="optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
        )
    configures = type(task).configure_optimizers is not Task.configure_optimizers
    configures = "configure_optimizers" in task.steps if isinstance(task, FunctionTask) else configures
    if configures and task.optimizer is not None:
        raise TaskError(
            "both optimizer and configure_optimizers are given",
            why="one of them would have no effect",
            do="leave one of them out",
        )
    if (task.has_phases or task.manual_optimization) and not task.has_own_step:
        raise TaskError(
            f"{type(task).__name__} has manual_optimization, and no training_step",
            why="a manual step calls backward and step itself",
            do="define training_step(self, model, batch)",
        )
    if task.manual_optimization and task.has_phases:
        raise TaskError(
            f"{type(task).__name__} has manual_optimization, and its training_step takes the name of an optimizer",
            why="a manual step is called once a batch, and steps each optimizer itself",
            do="leave the argument out, or manual_optimization",
        )
    if task.has_phases and not configures:
        raise TaskError(
            "training_step takes the name of an optimizer, and there is no configure_optimizers",
            why="it is called once for each optimizer of a dict",
            do="configure_optimizers=lambda model: {'name': torch.optim.Adam(…), …}",
        )


def check_evaluated(task: Task, *, trains: bool = True) -> None:
    """That a task can be evaluated; without training, its optimizers are not made."""
    if task.has_own_validation:
        return
    if task.has_phases and not trains:
        raise TaskError(
            f"{type(task).__name__} has no validation_step, and a training step for each of its optimizers",
            why="which losses of the optimizers there are is known in a training alone",
            do="define validation_step(self, model, batch)",
        )
    if task.manual_optimization:
        raise TaskError(
            f"{type(task).__name__} has no validation_step, and there is validation data",
            why="its training step makes gradients and steps, so an evaluation cannot call it",
            do="define validation_step(self, model, batch), or leave the validation data out",
        )
