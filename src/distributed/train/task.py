"""Task: the user's model, loss, optimizer and metrics, and how a batch goes through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from distributed.core.choices import LossWeighting
from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.strategies.base import Logged, LossTrial, MetricSum, Outcome
from distributed.train.batches import apply, takes_inputs
from distributed.train.given_schedulers import check_scheduler
from distributed.train.loss.probe import logits_of
from distributed.train.loss.state import LossState, holder_of, load_loss, refuse_trained_loss, state_of
from distributed.train.loss.torch_losses import entropy_of
from distributed.train.loss.weights import LossWeights
from distributed.train.metrics import Metric, binary_accuracy, class_hits, sum_logged, sum_metrics
from distributed.train.model_outputs import fitting_loss, of_inputs, own_loss, prediction_of, with_weight
from distributed.train.step_results import logged_value, read_result

OptimizerFactory = Callable[..., torch.optim.Optimizer]
Step = Callable[[nn.Module, Any], Any]
_OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


@dataclass
class Task:
    """What is trained: a model with its loss, optimizer and metrics, or a subclass with steps of its own.

    Without a step of its own, a batch is read by these rules:

    - `(inputs, target)` → `model(inputs)`; `(a, b, …, target)` → `model(a, b, …)`; inputs that are a dict are keywords;
    - a dict → `model(**batch)`; with a `loss_fn`, its `labels`/`target` entry is the target and not an input;
    - anything else is the input and the target at once.

    The loss is `loss_fn(outputs, target)`, or `loss_fn(outputs, target, inputs=…)` where it has such an argument;
    without a `loss_fn`, the model's own (a scalar, `.loss`, `["loss"]` or the scalar of a tuple), or cross entropy for
    integer targets and mean squared error for floating ones. Where a step has several parts, it is found out whether a
    loss is a mean over the samples, over the targets that count, or a sum; one that is none of them is returned as
    `(loss, weight)` with how much it goes over.

    >>> class Autoencoder(Task):
    ...     def training_step(self, model, batch):
    ...         restored = model(batch[0])
    ...         self.log("largest", (restored - batch[0]).abs().max())
    ...         return nn.functional.mse_loss(restored, batch[0])
    >>> Autoencoder(nn.Linear(4, 4)).has_own_step
    True
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None = None
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None
    scheduler: Any = None  # a torch scheduler, or a function that makes one of the optimizer
    metrics: Mapping[str, Metric] | None = None
    loss_weighting: LossWeighting = "auto"
    _resolved: dict[str, Metric] = field(init=False, default_factory=dict)
    _weights: LossWeights = field(init=False, repr=False)
    _logged: dict[str, Logged] = field(init=False, default_factory=dict, repr=False)  # in the step that runs

    def __post_init__(self) -> None:
        self._resolved = dict(self.metrics or {})
        self._takes_inputs = takes_inputs(self.loss_fn)
        self.weigh_by(self.loss_weighting)

    def weigh_by(self, weighting: LossWeighting) -> None:
        """Begin a run in which the parts of a step are weighted so."""
        self.loss_weighting = weighting
        loss_fn = None if self.has_own_step or self._takes_inputs else self.loss_fn
        self._weights = LossWeights(loss_fn, weighting)

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        """The loss of a batch, or a dict with `loss`, perhaps `weight`, `outputs` and `target`, and values to log.

        A subclass may replace it; its `model` is to be called, and is this task's, made ready for the ranks.
        """
        inputs, outputs, target = apply(model, batch, takes_target=self.loss_fn is not None)
        loss_fn = self.loss_fn
        if loss_fn is None:
            own = own_loss(outputs, target)
            if own is not None:
                return own
            loss_fn = fitting_loss(outputs, target)
        elif self._takes_inputs:
            return of_inputs(loss_fn(outputs, target, inputs=inputs), outputs, target)
        loss = loss_fn(outputs, target)
        if isinstance(loss, tuple):
            return with_weight(loss, outputs, target)
        return self._weights.of(Outcome(loss, outputs, target, fitted=None if self.loss_fn else loss_fn), loss_fn)

    def validation_step(self, model: nn.Module, batch: Any) -> Any:
        """The same for a batch of an evaluation, without gradients; a loss may be missing."""
        return self.training_step(model, batch)

    def predict_step(self, model: nn.Module, batch: Any) -> Any:
        """The prediction for each sample of a batch: by default the model's outputs, without its loss."""
        return prediction_of(apply(model, batch, takes_target=True).outputs)

    def configure_optimizers(self, model: nn.Module) -> Any:
        """The optimizer of this model, where the settings do not name it; None: they do."""
        return None

    def log(self, name: str, value: Any, weight: Any = None) -> None:
        """Report a number from inside of a step: averaged over micro-batches and ranks, by samples or by `weight`."""
        self._logged[name] = logged_value(name, value, weight)

    @property
    def has_own_step(self) -> bool:
        """Whether a training step is a subclass's."""
        return type(self).training_step is not Task.training_step

    @property
    def has_own_optimizers(self) -> bool:
        return self.optimizer is not None or type(self).configure_optimizers is not Task.configure_optimizers

    @property
    def metric_names(self) -> list[str]:
        return sorted({"accuracy", *self._resolved})

    def move_to(self, device: torch.device) -> None:
        """The model, if it is made, and a loss that has tensors of its own (class weights)."""
        if not any(p.is_meta for p in self.model.parameters()):
            self.model.to(device)
        self.move_loss_to(device)

    def move_loss_to(self, device: torch.device) -> None:
        if self.loss_module is not None:
            self.loss_module.to(device)

    @property
    def loss_module(self) -> nn.Module | None:
        """The loss, where it is a module and no part of the model."""
        holder = holder_of(self.loss_fn, self.model)
        return holder if isinstance(holder, nn.Module) else None

    def loss_state(self) -> dict[str, Any]:
        """What the loss has, by name: its `state_dict()` without what is the model's; {}: nothing."""
        holder = holder_of(self.loss_fn, self.model)
        return {} if holder is None else state_of(holder, self.model)

    def watch_loss(self) -> LossState:
        return LossState(holder_of(self.loss_fn, self.model), self.model)

    def load_loss_state(self, state: dict[str, Any]) -> None:
        holder = holder_of(self.loss_fn, self.model)
        if holder is not None:
            load_loss(holder, state)

    def run(self, model: nn.Module, batch: Any) -> Outcome:
        return self._take(self.training_step, model, batch)

    def evaluate(self, model: nn.Module, batch: Any) -> Outcome:
        return self._take(self.validation_step, model, batch)

    def predict(self, model: nn.Module, batch: Any) -> Any:
        return self.predict_step(model, batch)

    def _take(self, step: Step, model: nn.Module, batch: Any) -> Outcome:
        self._logged.clear()
        outcome = step(model, batch)
        if not isinstance(outcome, Outcome):
            outcome = read_result(outcome, step.__name__, needs_loss=torch.is_grad_enabled())
        if outcome.is_own and not outcome.is_given:
            outcome = self._weights.of(outcome, None)
        if self._logged:
            outcome = outcome._replace(logged={**(outcome.logged or {}), **self._logged})
        return outcome

    def settle(self, outcome: Outcome | None, batch: Any, size: int, trial: LossTrial) -> Outcome | None:
        if outcome is not None and outcome.loss.numel() != 1:
            raise TaskError(
                f"the loss has the shape {list(outcome.loss.shape)}",
                why="the backward pass of a step begins at one number, the loss of its batch",
                do="return its mean: reduction='mean', or loss.mean()",
            )
        return self._weights.settle(outcome, batch, size, trial)

    def measure(self, outcome: Outcome, size: int) -> dict[str, MetricSum]:
        outputs, target = outcome.outputs, outcome.target
        logits = getattr(outputs, "logits", None)
        found = sum_metrics(self._resolved, outputs if logits is None else logits, target, size)
        return found | self._accuracy(outcome) | sum_logged(outcome.logged or {}, size)

    def _accuracy(self, outcome: Outcome) -> dict[str, MetricSum]:
        """The default, unless the user has one: where the classes lie and which targets count, the loss says."""
        if self.metrics is not None and "accuracy" in self.metrics:
            return {}
        outputs, target, rule = outcome.outputs, outcome.target, self._weights.rule
        if isinstance(self.loss_fn, nn.BCEWithLogitsLoss):
            return {"accuracy": binary_accuracy(outputs, target)}
        ignored = rule.ignored if rule is not None and rule.kind in ("targets", "shifted") else self._weights.ignored
        if outcome.is_own:
            is_shifted = rule is not None and rule.kind == "shifted"
            found = class_hits(logits_of(outputs), target, ignored, class_dim=-1, is_shifted=is_shifted)
        else:
            is_torchs = outcome.fitted is not None or entropy_of(self.loss_fn) is not None
            logits = getattr(outputs, "logits", None)
            found = class_hits(
                outputs if logits is None else logits, target, ignored, class_dim=1 if is_torchs else None
            )
        return {} if found is None else {"accuracy": found}

    def check_targets(self) -> None:
        self._weights.check()

    def check_share(self, outcome: Outcome, size: int) -> None:
        self._weights.check_share(outcome, size)

    def check_evaluated(self, outcome: Outcome) -> None:
        self._weights.check_evaluated(outcome)

    def make_optimizer(self, model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
        """The user's instance, what the user's factory makes of the parameters, or the one that the plan names."""
        wanted = plan.optimizer
        if isinstance(self.optimizer, torch.optim.Optimizer):
            if self.optimizer.state:  # of an earlier training: onto the device where the parameters are now
                self.optimizer.load_state_dict(self.optimizer.state_dict())
            if wanted.lr_factor != 1.0:
                self._scale_rates(self.optimizer, plan)
            return self.optimizer
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer is not None:
            made = self.optimizer(parameters)
            check_optimizer(made, model)
            for group in made.param_groups:
                group["lr"] = group["lr"] * wanted.lr_factor
            return made
        options = {"weight_decay": wanted.weight_decay, "momentum": wanted.momentum}
        given = {name: value for name, value in options.items() if value is not None}
        return _OPTIMIZERS[wanted.name](parameters, lr=wanted.learning_rate, **given)

    def _scale_rates(self, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        """Once, however often it is trained with, unless the user has set another rate since."""
        moves = self.scheduler is not None or not plan.schedule.is_constant  # then it is not the user who did
        for group in optimizer.param_groups:
            if "scaled_lr" not in group or (group["lr"] != group["scaled_lr"] and not moves):
                group["unscaled_lr"] = group["lr"]
            group["lr"] = group["scaled_lr"] = group["unscaled_lr"] * plan.optimizer.lr_factor


@dataclass
class FunctionTask(Task):
    """A task whose steps are functions of (model, batch)."""

    steps: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # by the method that each replaces

    @property
    def has_own_step(self) -> bool:
        return "training_step" in self.steps

    @property
    def has_own_optimizers(self) -> bool:
        return "configure_optimizers" in self.steps or self.optimizer is not None

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return self.steps.get("training_step", super().training_step)(model, batch)

    def validation_step(self, model: nn.Module, batch: Any) -> Any:
        return self.steps.get("validation_step", super().validation_step)(model, batch)

    def predict_step(self, model: nn.Module, batch: Any) -> Any:
        return self.steps.get("predict_step", super().predict_step)(model, batch)

    def configure_optimizers(self, model: nn.Module) -> Any:
        make = self.steps.get("configure_optimizers")
        return None if make is None else make(model)


def make_task(model: Any, parts: Mapping[str, Any], steps: Mapping[str, Callable[..., Any] | None]) -> Task:
    """The task of a trainer's arguments: a task as it is, or one of a model, its parts and its step functions."""
    given = {name: step for name, step in steps.items() if step is not None}
    if isinstance(model, Task):
        own = [name for name, value in {**parts, **given}.items() if value is not None]
        if own:
            raise TaskError(
                f"{', '.join(own)} beside a task",
                why=f"the task has its own: {type(model).__name__} is a Task, and a run has one",
                do=f"pass {own[0]} to {type(model).__name__}, or pass the model alone",
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


def check_task(task: Task) -> None:
    """What can be seen to be wrong before anything starts."""
    if not isinstance(task.model, nn.Module):
        kind = type(task.model)
        is_keras = any(base.__module__.partition(".")[0] in ("keras", "tf_keras") for base in kind.__mro__)
        raise TaskError(
            f"model is a {kind.__name__}" + (" of Keras" if is_keras else ""),
            why="the model must be a torch nn.Module",
            do="pass it to TensorFlowDistributedTrainer" if is_keras else "pass model=MyModel()",
        )
    if not any(p.requires_grad for p in task.model.parameters()):
        raise TaskError(
            "the model has no parameter that requires a gradient",
            why="training changes parameters that require a gradient",
        )
    refuse_trained_loss(holder_of(task.loss_fn, task.model), task.model)
    if isinstance(task.optimizer, torch.optim.Optimizer):
        check_optimizer(task.optimizer, task.model)
    elif task.optimizer is not None and not callable(task.optimizer):
        raise TaskError(
            f"optimizer is a {type(task.optimizer).__name__}",
            why="the trainer takes an optimizer over this model's parameters, or a function that makes one of them",
            do="optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
        )
    check_scheduler(task.scheduler)
    owner = getattr(task.scheduler, "optimizer", None)
    if isinstance(owner, torch.optim.Optimizer) and owner is not task.optimizer:
        raise TaskError(
            "the scheduler belongs to another optimizer than the one passed",
            why="the scheduler would change the learning rates of an optimizer that does not train",
            do="pass the optimizer that the scheduler was made with, or a function scheduler=lambda optimizer: …",
        )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    own = {id(p): name for name, p in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in held if id(p) not in own]
    if foreign:
        shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3])
        raise TaskError(
            f"the optimizer is not over this model's parameters: {len(foreign)} of its {len(held)} are not ({shapes})",
            why="the optimizer would train tensors that the model does not use, as after the model was copied",
            do="make it of this model: torch.optim.AdamW(model.parameters(), …), or pass a function of the parameters",
        )
