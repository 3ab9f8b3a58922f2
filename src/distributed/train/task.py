"""Task: the user's model, loss, optimizer and metrics, and how a batch goes through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import nn

from distributed.core.choices import LossWeighting
from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.strategies.base import Logged, LossTrial, MetricSum, OptimizerCalls, Outcome
from distributed.strategies.joint_optimizer import OptimizerSetup
from distributed.train.callbacks.callback import Callback
from distributed.train.checks.task_attributes import AttributeWatch, restored
from distributed.train.given.batches import apply, takes_inputs, target_argument
from distributed.train.given.model_outputs import fitting_loss, of_inputs, own_loss, prediction_of, with_weight
from distributed.train.given.modules import as_module
from distributed.train.given.optimizers import OptimizerFactory, by_factory, by_plan, configured, taken_over
from distributed.train.given.step_results import check_number, logged_value, read_result, sum_of_phases, takes_optimizer
from distributed.train.loss.accuracy import accuracy_of, logits_or_all
from distributed.train.loss.state import loss_name
from distributed.train.loss.weights import LossWeights
from distributed.train.metrics import Metric, sum_logged, sum_metrics
from distributed.train.task_modules import TaskModules
from distributed.train.whole_set.metrics import WholeSetMetrics, is_whole_set

Step = Callable[..., Any]  # of (model, batch); a training step of several optimizers also takes the name of one


@dataclass
class Task(TaskModules):
    """What is trained: a model with its loss, optimizer and metrics, or a subclass with steps of its own.

    Without a step of its own, a batch is read by these rules:

    - `(inputs, target)` → `model(inputs)`; `(a, b, …, target)` → `model(a, b, …)`; inputs that are a dict are keywords.
      Without a `loss_fn`, a pair's target goes to an argument `targets`, `target`, `labels` or `label` of the model;
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

    manual_optimization: ClassVar[bool] = False  # True: its training step calls backward, step and zero_grad itself
    manual_as: ClassVar[str] = ""  # how it asks for that, in errors; "": by manual_optimization

    model: nn.Module  # or a dict of modules by name, which becomes an nn.ModuleDict
    loss_fn: Callable[..., Any] | None = None
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None
    scheduler: Any = None  # a torch scheduler, or a function that makes one of the optimizer
    metrics: Mapping[str, Metric] | None = None
    loss_weighting: LossWeighting = "auto"
    samples: int = field(init=False, default=0)  # of the batch that a step gets; 0: a stand-in, which leaves no trace
    phase: str = field(init=False, default="", repr=False)  # the optimizer that the step is for, of several
    optimizer_setup: OptimizerSetup | None = field(init=False, default=None, repr=False)  # of a single optimizer
    _phases: tuple[str, ...] = field(init=False, default=(), repr=False)
    _calls: OptimizerCalls | None = field(init=False, default=None, repr=False)  # in a step that is manual
    _resolved: dict[str, Metric] = field(init=False, default_factory=dict)
    whole_set: WholeSetMetrics = field(init=False, repr=False)  # of `metrics`, those that no mean over batches is
    before_sharding: Any = field(init=False, default=None, repr=False)  # of a model that a run has cut: what it was
    _weights_of: dict[str, LossWeights] = field(init=False, default_factory=dict, repr=False)  # by phase
    _weights: LossWeights = field(init=False, repr=False)  # of this phase
    _evaluated: LossWeights = field(init=False, repr=False)  # of a validation step of its own
    _logged: dict[str, Logged] = field(init=False, default_factory=dict, repr=False)  # in the step that runs
    _watch: AttributeWatch | None = field(init=False, default=None, repr=False)  # of attributes that a step changes
    _takes_inputs: bool = field(init=False, default=False, repr=False)
    _target_name: str = field(init=False, default="", repr=False)  # the argument of a model that computes the loss

    def __post_init__(self) -> None:
        self.model = as_module(self.model)
        given = dict(self.metrics or {})
        self._resolved = {name: metric for name, metric in given.items() if not is_whole_set(metric)}
        self.whole_set = WholeSetMetrics({name: metric for name, metric in given.items() if is_whole_set(metric)})
        self._takes_inputs = takes_inputs(self.loss_fn)
        self.weigh_by(self.loss_weighting)

    def begin_run(self, plan: Plan, samples: int | None) -> None:
        """A run of this plan over that many samples an epoch is to begin; None: of a stream. Raises what it cannot."""
        self.weigh_by(plan.loss_weighting)

    def weigh_by(self, weighting: LossWeighting) -> None:
        """Weight the parts of a step so."""
        self.loss_weighting = weighting
        self._target_name = "" if self.loss_fn is not None else target_argument(self.model)
        self._weights_of, self._evaluated = {}, LossWeights(None, weighting)
        self._watch = None if self.keeps_state or not self.has_own_step else AttributeWatch()
        self.begin_phase("")

    def begin_phase(self, name: str) -> None:
        """From here on, training steps are for this optimizer; "": for all."""
        self.phase = name
        if name not in self._weights_of:
            self._weights_of[name] = LossWeights(None if self.computes_own_loss else self.loss_fn, self.loss_weighting)
        self._weights = self._weights_of[name]

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        """The loss of a batch, or a dict with `loss`, perhaps `weight`, `outputs` and `target`, and values to log.

        A subclass may replace it; its `model` is to be called, and is this task's, made ready for the ranks. With a
        third argument `optimizer` it is called once for each optimizer, with its name.
        """
        loss_fn, name = self.loss_fn, self._target_name
        inputs, outputs, target = apply(model, batch, takes_target=loss_fn is not None, target_name=name)
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
        if isinstance(self.model, nn.ModuleDict):
            raise TaskError(
                f"a prediction of a model of {len(self.model)} parts",
                why="how a batch goes through several modules, only a step of your own says",
                do="define predict_step(model, batch)",
            )
        _, outputs, _ = apply(model, batch, takes_target=True)
        return prediction_of(outputs)

    def configure_optimizers(self, model: nn.Module) -> Any:
        """The optimizer of this model, or a dict of names and optimizers (or `OptimizerSetup`); None: the settings'."""
        return None

    def log(self, name: str, value: Any, weight: Any = None) -> None:
        """Report a number from inside of a step: averaged over micro-batches and ranks, by samples or by `weight`."""
        self._logged[name] = logged_value(name, value, weight)

    def backward(self, loss: torch.Tensor, weight: Any = None, *, retain_graph: bool = False) -> None:
        """Add the gradient of a loss, a mean over this batch's samples or over `weight`, in a manual step."""
        self._manual("backward").backward(loss, weight, retain_graph=retain_graph)

    def step(self, optimizer: str = "") -> None:
        """Step an optimizer by the gradient of all ranks, in a manual step; "": the only one."""
        self._manual("step").step(optimizer)

    def zero_grad(self, optimizer: str = "") -> None:
        """Drop the gradients of an optimizer's parameters, in a manual step; "": of all."""
        self._manual("zero_grad").zero_grad(optimizer)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the task itself, the same on every rank: numbers, texts and tensors."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None: ...

    @property
    def has_own_step(self) -> bool:
        """Whether a training step is a subclass's."""
        return type(self).training_step is not Task.training_step

    @property
    def has_own_validation(self) -> bool:
        return type(self).validation_step is not Task.validation_step

    @property
    def why_not_captured(self) -> str:
        """Why a step cannot be repeated as one CUDA graph, because of what the task does in Python; "": it does not."""
        return ""

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """Callbacks that belong to the task; they are called before those of its trainer."""
        return ()

    @property
    def has_own_optimizers(self) -> bool:
        return self.optimizer is not None or type(self).configure_optimizers is not Task.configure_optimizers

    @property
    def is_manual(self) -> bool:
        return self.manual_optimization

    @property
    def has_phases(self) -> bool:
        """Whether its training step is called once for each of several optimizers."""
        return takes_optimizer(self.training_step)

    @property
    def computes_own_loss(self) -> bool:
        """Whether the loss may be another one than `loss_fn` of outputs and target."""
        return self.has_own_step or self._takes_inputs or self.loss_fn is None

    @property
    def sums_loss(self) -> bool:
        """Whether the loss of a batch is the sum of its samples' losses; known after the first step."""
        return self._weights.is_sum

    @property
    def keeps_state(self) -> bool:
        """Whether it says what is kept of it between steps."""
        return type(self).state is not Task.state

    @property
    def metric_names(self) -> list[str]:
        return sorted({"accuracy", *self._resolved, *(f"loss_{name}" for name in self._phases)})

    @property
    def loss_name(self) -> str:
        """By which it is known again what is minimized: the loss, the step of the user's own, or both."""
        step = getattr(self.training_step, "__qualname__", "a step") if self.has_own_step else ""
        return " of ".join(filter(None, [loss_name(self.loss_fn), step]))

    def own_attributes(self) -> dict[str, Any]:
        """What a subclass has put into the task."""
        return {name: value for name, value in vars(self).items() if name not in _FIELDS}

    def unchanged(self) -> AbstractContextManager[bool]:
        """A scope that leaves no trace in what a subclass has put into the task; whether there can be one."""
        return restored(self, self.own_attributes, (self, self.model, *self.model.modules(), *self.model.parameters()))

    def own_code(self) -> dict[str, Any]:
        """The objects with code of the user's that runs in a step, beside the model, the loss and the metrics."""
        kinds = [kind for kind in type(self).__mro__ if kind not in Task.__mro__]
        return {"task": self.own_attributes(), "class of the task": kinds} if kinds else {}

    def run(self, model: nn.Module, batch: Any) -> Outcome:
        if self._watch is not None and torch.is_grad_enabled():
            return self._run_watched(self._watch, model, batch)
        if self._logged:
            self._logged.clear()
        step: Step = self.training_step
        found = step(model, batch, self.phase) if self.phase else step(model, batch)
        if type(found) is Outcome and not found.is_own and not self._logged:  # the usual case, in which all is known
            return found
        return self._outcome(found, step, self._weights)

    def _run_watched(self, watch: AttributeWatch, model: nn.Module, batch: Any) -> Outcome:
        self._watch = None
        try:
            with watch.watching(self.own_attributes, self.model):
                return self.run(model, batch)
        finally:
            self._watch = None if watch.is_done else watch

    def evaluate(self, model: nn.Module, batch: Any) -> Outcome:
        if self._phases and not self.has_own_validation:
            return self._evaluate_phases(model, batch)
        self._logged.clear()
        step, weights = self.validation_step, self._evaluated if self.has_own_validation else self._weights
        outcome = self._outcome(step(model, batch), step, weights)
        return weights.learn(outcome) if self.has_own_validation else outcome

    def _evaluate_phases(self, model: nn.Module, batch: Any) -> Outcome:
        found = {}
        try:
            for name in self._phases:
                self.begin_phase(name)
                found[name] = self.run(model, batch)
        finally:
            self.begin_phase("")
        return sum_of_phases(found)

    def predict(self, model: nn.Module, batch: Any) -> Any:
        return self.predict_step(model, batch)

    def _outcome(self, found: Any, step: Step, weights: LossWeights) -> Outcome:
        """What a step of ours or the user's has returned and logged. `weights`: of its loss, if it is its own."""
        if not isinstance(found, Outcome):
            needs_loss = torch.is_grad_enabled() and not self.manual_optimization
            name = getattr(step, "__name__", "a step") + (f"(…, {self.phase!r})" if self.phase else "")
            found = read_result(found, name, needs_loss=needs_loss)
        if found.is_own and not found.is_given:
            found = weights.of(found, None)
        if self._logged:
            found = found._replace(logged={**(found.logged or {}), **self._logged})
        return found

    def steps_by(self, calls: OptimizerCalls | None) -> None:
        """What its calls of backward, step and zero_grad go to, in a run whose steps are manual; None: none."""
        self._calls = calls

    def _manual(self, call: str) -> OptimizerCalls:
        if self._calls is None:
            raise TaskError(
                f"{type(self).__name__} calls self.{call}, and no manual step runs",
                why="the trainer itself makes gradients and steps, unless the task says that it does",
                do=f"set manual_optimization = True in {type(self).__name__}, or leave the call out",
            )
        return self._calls

    def settle(self, outcome: Outcome | None, batch: Any, size: int, trial: LossTrial) -> Outcome | None:
        if outcome is not None:
            check_number(outcome.loss)
        return self._weights.settle(outcome, batch, size, trial)

    def measure(self, outcome: Outcome, size: int) -> dict[str, MetricSum]:
        found = sum_metrics(self._resolved, logits_or_all(outcome.outputs), outcome.target, size)
        return found | self._accuracy(outcome) | self.measure_logged(outcome, size)

    def measure_logged(self, outcome: Outcome, size: int) -> dict[str, MetricSum]:
        return sum_logged(outcome.logged or {}, size)

    @property
    def step_metrics(self) -> Mapping[str, Metric]:
        """Of `metrics`, those of a batch."""
        return self._resolved

    def collect(self, outcome: Outcome) -> None:
        if self.whole_set:
            self.whole_set.update(logits_or_all(outcome.outputs), outcome.target)

    def _accuracy(self, outcome: Outcome) -> dict[str, MetricSum]:
        """The default, unless the user has one."""
        if self.metrics is not None and "accuracy" in self.metrics:
            return {}
        return accuracy_of(outcome, self.loss_fn, self._weights)

    def check_targets(self) -> None:
        for weights in self._weights_of.values():
            weights.check()

    def check_share(self, outcome: Outcome, size: int) -> None:
        self._weights.check_share(outcome, size)

    def check_evaluated(self, outcome: Outcome) -> None:
        (self._evaluated if self.has_own_validation else self._weights).check_evaluated(outcome)

    def make_optimizer(self, model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
        """The user's instance, what the user's functions make of the model, or the one that the plan names."""
        made, has_scheduler = self.configure_optimizers(model), self.scheduler is not None
        if made is not None:
            how = {"has_phases": self.has_phases, "is_manual": self.manual_optimization, "has_scheduler": has_scheduler}
            optimizer, setups = configured(made, model, plan, **how)
            self.optimizer_setup = setups.get("")
            self._phases = tuple(setups) if self.has_phases else ()
            return optimizer
        if isinstance(self.optimizer, torch.optim.Optimizer):
            return taken_over(self.optimizer, plan, has_scheduler=has_scheduler)
        return by_plan(model, plan) if self.optimizer is None else by_factory(self.optimizer, model, plan)


_FIELDS = frozenset(one.name for one in fields(Task))
