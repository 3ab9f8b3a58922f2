"""Task: the user's model, loss, optimizer and metrics, and how a batch goes through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.strategies.base import MetricSum, Outcome, Trial
from distributed.train.given_schedulers import check_scheduler
from distributed.train.loss.probe import logits_of
from distributed.train.loss.state import LossState, holder_of, load_loss, refuse_trained_loss, state_of
from distributed.train.loss.torch_losses import entropy_of, squared_error
from distributed.train.loss.weights import LossWeights
from distributed.train.metrics import Metric, binary_accuracy, class_hits, sum_metrics

OptimizerFactory = Callable[..., torch.optim.Optimizer]
_TARGET_KEYS = ("labels", "label", "targets", "target", "y")
_CROSS_ENTROPY = nn.CrossEntropyLoss()
_OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


@dataclass
class Task:
    """What is trained. A batch is read by these rules:

    - `(inputs, target)` → `model(inputs)`; `(a, b, …, target)` → `model(a, b, …)`; inputs that are a dict are keywords;
    - a dict → `model(**batch)`; with a `loss_fn`, its `labels`/`target` entry is the target and not an input;
    - anything else is the input and the target at once.

    The loss is `loss_fn(outputs, target)`; without a `loss_fn`, the model's own (a scalar, `.loss`, `["loss"]` or the
    first of a tuple), or cross entropy for integer targets and mean squared error for floating ones. Where a step has
    several parts, it is found out whether a loss is a mean over the samples, over the targets that count, or a sum; one
    that is none of them is returned as `(loss, weight)` with how much it goes over.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None = None
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None
    scheduler: Any = None  # a torch scheduler, or a function that makes one of the optimizer
    metrics: Mapping[str, Metric] | None = None
    loss_weighting: str = "auto"
    _resolved: dict[str, Metric] = field(init=False, default_factory=dict)
    _weights: LossWeights = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._resolved = dict(self.metrics or {})
        self._weights = LossWeights(self.loss_fn, self.loss_weighting)

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
        if isinstance(batch, (list, tuple)) and len(batch) == 2:
            inputs, target = batch
            outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        elif isinstance(batch, (list, tuple)) and len(batch) > 2:
            target = batch[-1]
            outputs = model(*batch[:-1])
        elif isinstance(batch, Mapping):
            inputs_by_name, target = _split_mapping(batch, self.loss_fn is not None)
            outputs = model(**inputs_by_name)
        else:
            target = batch[0] if isinstance(batch, (list, tuple)) else batch
            outputs = model(target)
        loss_fn = self.loss_fn
        if loss_fn is None:
            own = _own_loss(outputs, target)
            if own is not None:
                return own if own.is_given else self._weights.of(own, None)
            loss_fn = _fitting_loss(outputs, target)
        loss = loss_fn(outputs, target)
        if isinstance(loss, tuple):
            return _with_weight(loss, outputs, target)
        return self._weights.of(Outcome(loss, outputs, target, fitted=None if self.loss_fn else loss_fn), loss_fn)

    def settle(self, outcome: Outcome | None, batch: Any, size: int, trial: Trial) -> Outcome | None:
        return self._weights.settle(outcome, batch, size, trial)

    def measure(self, outcome: Outcome, size: int) -> dict[str, MetricSum]:
        outputs, target = outcome.outputs, outcome.target
        logits = getattr(outputs, "logits", None)
        return sum_metrics(self._resolved, outputs if logits is None else logits, target, size) | self._accuracy(
            outcome
        )

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


def _split_mapping(batch: Mapping[str, Any], takes_target: bool) -> tuple[Mapping[str, Any], Any]:
    key = next((key for key in _TARGET_KEYS if key in batch), None)
    if key is None:
        return batch, None
    return ({k: v for k, v in batch.items() if k != key} if takes_target else batch), batch[key]


def _own_loss(outputs: Any, target: Any) -> Outcome | None:
    """The loss that the model itself returned, if it did."""
    if isinstance(outputs, Mapping) and "loss" in outputs:
        weight = outputs.get("weight")
        given = None if weight is None else torch.as_tensor(weight)
        return Outcome(outputs["loss"], outputs, target, given, is_own=True, is_given=given is not None)
    if isinstance(getattr(outputs, "loss", None), torch.Tensor):
        return Outcome(outputs.loss, outputs, target, is_own=True)
    if isinstance(outputs, tuple) and isinstance(outputs[0], torch.Tensor) and outputs[0].dim() == 0:
        return Outcome(outputs[0], outputs[1] if len(outputs) > 1 else None, target, is_own=True)
    if isinstance(outputs, torch.Tensor) and outputs.dim() == 0:
        return Outcome(outputs, None, target, is_own=True)
    return None


def _with_weight(loss: tuple[Any, ...], outputs: Any, target: Any) -> Outcome:
    """What a loss function returned as `(loss, weight)`, if it is that."""
    if len(loss) == 2 and isinstance(loss[0], torch.Tensor) and loss[0].dim() == 0:
        weight = torch.as_tensor(loss[1], device=loss[0].device)
        if weight.dim() == 0 and not hasattr(loss, "_fields"):
            return Outcome(loss[0], outputs, target, weight, is_given=True)
    kinds = ", ".join(f"{tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__ for x in loss)
    raise TaskError(
        f"loss_fn returned a {type(loss).__name__} of {len(loss)} ({kinds})",
        why="loss_fn returns the loss, a number, or (loss, weight), two numbers; the loss is a mean over the weight",
        do="loss_fn=lambda outputs, target: my_loss(outputs, target).loss, or another part of it",
    )


def _fitting_loss(outputs: Any, target: Any) -> Callable[[Any, Any], torch.Tensor]:
    """Cross entropy or mean squared error, by the kind of the target."""
    if isinstance(outputs, torch.Tensor) and isinstance(target, torch.Tensor):
        if not target.is_floating_point() and outputs.dim() > target.dim():
            return _CROSS_ENTROPY
        if target.is_floating_point() and outputs.numel() == target.numel():
            return squared_error
    raise TaskError(
        f"no loss: the model returned a {type(outputs).__name__}, and the target is a {type(target).__name__}",
        why="no loss_fn is given, and none can be guessed from these",
        do="pass loss_fn=…, or let the model return its loss",
    )


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
