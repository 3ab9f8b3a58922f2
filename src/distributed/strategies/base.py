"""The interface of a step: the methods of every strategy, and the types that it gets and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from distributed.core.plan import Decision, Plan
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.tensor_shard import Box
from distributed.strategies.compute_clock import ComputeClock

StateTree = dict[str, Any]  # nested dicts and lists of tensors and JSON values
ModelCopy = dict[str, torch.Tensor]  # this rank's part of a model's tensors, or of a copy's, by name
Copies = dict[str, ModelCopy | None]  # by label; None: it has not begun

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}  # of a forward pass


class Logged(NamedTuple):
    """A number that a step of the user's own logs, and how much it is a mean over."""

    value: torch.Tensor | float
    weight: torch.Tensor | float | None  # None: the samples of its batch


class Outcome(NamedTuple):
    """The loss and outputs of a model for one batch."""

    loss: torch.Tensor  # a mean over the batch, or a sum where `is_sum`
    outputs: Any
    target: Any
    weight: torch.Tensor | None = None  # the count that the mean is over, if that is not the number of samples
    is_sum: bool = False
    is_own: bool = False  # whether the model itself returned the loss
    is_given: bool = False  # whether the weight came with the loss
    fitted: Any = None  # the loss function, if it was chosen by the target
    logged: Mapping[str, Logged] | None = None
    is_missing: bool = False  # whether there is no loss


class LossTrial(NamedTuple):
    """The tools by which a task finds what its loss is a mean over, before a world's first backward pass."""

    agree: Callable[[torch.Tensor], torch.Tensor]  # the sum over all ranks; every rank calls it
    matters: bool  # whether a step has several parts, which are weighted by that count
    module: nn.Module
    run: Callable[[Any], Outcome] | None  # runs a batch as an evaluation does; None: ranks compute it in parts
    is_joint: bool  # whether `run` waits until every rank calls it
    is_rough: bool  # whether it computes in low precision
    beside: Callable[[], Mapping[str, Any]] = dict  # what else of the user's a call may change, by name


class MetricSum(NamedTuple):
    """A metric as a sum and its divisor, so that the shares of ranks add up exactly, whatever their size."""

    total: torch.Tensor | float
    weight: torch.Tensor | float


def add_sums(sums: dict[str, MetricSum], more: Mapping[str, MetricSum]) -> None:
    """Add the sums of another part of a batch, or of a step.

    >>> sums = {"hits": MetricSum(1.0, 2.0)}
    >>> add_sums(sums, {"hits": MetricSum(2.0, 2.0)})
    >>> sums
    {'hits': MetricSum(total=3.0, weight=4.0)}
    """
    for name, (total, weight) in more.items():
        before = sums.get(name)
        sums[name] = MetricSum(total, weight) if before is None else MetricSum(before[0] + total, before[1] + weight)


class StepOutput(NamedTuple):
    # The loss of this rank's share, weighted so that the mean over the ranks is the global batch's loss. On a CPU,
    # where reading it does not synchronize, it is a number: cheaper to keep than a tensor.
    loss: torch.Tensor | float
    gradient_norm: torch.Tensor | None = None
    metrics: Mapping[str, MetricSum] | None = None  # of this rank's share, if they were requested


class NonFiniteLoss(ArithmeticError):
    """The loss of a step is not finite: of this step, which changed no weight, or of one some steps ago.

    `ranks`: the ranks with that loss, if all ranks know; otherwise this rank. `origin`: what made it so, if that was
    looked for, and `is_gradient`: whether it is a gradient, and not the loss.
    """

    def __init__(
        self,
        value: float,
        steps_ago: int = 0,
        ranks: tuple[int, ...] = (),
        *,
        origin: str = "",
        is_gradient: bool = False,
    ) -> None:
        super().__init__(value)
        self.value, self.steps_ago, self.ranks = value, steps_ago, ranks
        self.origin, self.is_gradient = origin, is_gradient

    def __str__(self) -> str:
        return f"{'a gradient' if self.is_gradient else 'the loss'} is {self.value}{self.origin and f': {self.origin}'}"


class OptimizerCalls(Protocol):
    """What a manual step calls for its gradients and its optimizers; every rank makes the same calls."""

    def backward(self, loss: torch.Tensor, weight: Any, *, retain_graph: bool) -> None: ...

    def step(self, name: str) -> None: ...

    def zero_grad(self, name: str) -> None: ...


class StepTask(Protocol):
    """The model, loss and optimizer of a user, as a strategy uses them."""

    model: nn.Module
    optimizer: Any  # the user's: an optimizer, a function that makes one, or None
    loss_fn: Any  # the user's; None: the model's own, or one chosen by its outputs
    metrics: Any  # the user's, by name
    samples: int  # of the batch that `run` or `evaluate` gets next; 0: a stand-in

    @property
    def is_manual(self) -> bool:
        """Whether a training step makes gradients and steps itself."""

    @property
    def has_phases(self) -> bool:
        """Whether a training step is called once for each of several optimizers."""

    @property
    def computes_own_loss(self) -> bool:
        """Whether the loss may be another one than `loss_fn` of outputs and target."""

    @property
    def keeps_state(self) -> bool:
        """Whether the task has a state of its own between steps."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...

    def own_code(self) -> dict[str, Any]:
        """The objects with code of the user's that runs in a step, beside the model, the loss and the metrics."""

    def begin_phase(self, name: str) -> None:
        """From here on, training steps are for this optimizer of several; "": for all."""

    def steps_by(self, calls: OptimizerCalls | None) -> None:
        """What the calls of a manual step go to."""

    @property
    def loss_module(self) -> nn.Module | None:
        """The loss, if it is a module outside the model."""

    def loss_state(self) -> dict[str, Any]:
        """The state of the loss between steps, by name; {}: none."""

    def move_to(self, device: torch.device) -> None: ...

    def move_loss_to(self, device: torch.device) -> None: ...

    @property
    def has_own_step(self) -> bool:
        """Whether a training step is the user's code, which may call the model as it likes."""

    def run(self, model: nn.Module, batch: Any) -> Outcome: ...

    def evaluate(self, model: nn.Module, batch: Any) -> Outcome: ...

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """The prediction of each sample of a batch: a tensor, or a mapping or sequence of tensors."""

    def settle(self, outcome: Outcome | None, batch: Any, size: int, trial: LossTrial) -> Outcome | None:
        """The first outcome of a world, with the weight that all ranks agree on; every rank must call it."""

    def measure(self, outcome: Outcome, size: int) -> dict[str, MetricSum]: ...

    def measure_logged(self, outcome: Outcome, size: int) -> dict[str, MetricSum]:
        """Of what a step of the user's own logs alone."""

    def check_targets(self) -> None:
        """Raise if targets since the last check were invalid; synchronizes with the device."""

    def check_share(self, outcome: Outcome, size: int) -> None:
        """Raise if the number of samples of a share cannot weight its loss. Reads shapes only."""

    @property
    def step_metrics(self) -> Any:
        """Of the user's metrics those of a batch, by name."""

    @property
    def has_own_validation(self) -> bool:
        """Whether the step of an evaluation is the user's own, which may collect what it has seen."""

    def collect(self, outcome: Outcome) -> None:
        """Add a batch of an evaluation to the metrics of the whole set."""

    def check_evaluated(self, outcome: Outcome) -> None:
        """The same as `check_targets` for a batch of an evaluation."""

    def make_optimizer(self, model: nn.Module, plan: Plan) -> torch.optim.Optimizer: ...


class Capturable(Protocol):
    """A strategy whose step can become one CUDA graph."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    clock: ComputeClock
    why_not_captured: str  # why the reduction of gradients cannot be captured; "": it can

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput: ...

    def step(self, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        """`train_step` without its clock and without reading any value."""

    def forget_step(self) -> None:
        """Drop the gradients of a step that was begun and is not completed."""

    def check_targets(self) -> None:
        """Check the targets after a measured step, in which values are read anyway."""

    def parts(self) -> Mapping[str, Any]:
        """The objects that Python calls in a step, by name: the model, the loss, and the metrics."""

    def changing(self) -> list[torch.Tensor]:
        """Every tensor that a step changes: parameters, buffers, and the state of optimizer and scaler."""

    def stay_eager(self) -> None:
        """Stop trying to capture steps; every rank must call it after the same step."""


class Strategy(Protocol):
    """One whole step is the interface, so that pipelines, ZeRO engines and captured graphs can implement it.

    Made from a plan, by the target that an engine's declaration names (`core/engines/engine.py`).
    """

    optimizer: torch.optim.Optimizer
    clock: ComputeClock  # of this rank's own part of a step
    owns_metrics: bool  # whether this rank's losses and metrics are summed: one of the ranks with the same samples
    lockstep_eval: bool  # whether an evaluation step needs all ranks at once
    decisions: list[Decision]  # how settings were applied to this model
    copies: Copies  # of the model, beside it: part of `state`
    is_follower: bool  # whether this rank takes its state from another one, which holds all of it; after `setup`
    is_timed: bool  # whether a step depends on the timing of the ranks, so that none can be repeated

    @property
    def is_gated(self) -> bool:
        """Whether its steps stand behind the session's gate, so that an abort changes no state; after `setup`."""

    def check(self, task: StepTask) -> None:
        """Raise the problems of the plan with this model, before anything is started."""

    def setup(self, task: StepTask, session: Session) -> None: ...

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput: ...

    def eval_step(self, batch: Any, size: int) -> Mapping[str, MetricSum]: ...

    def settle_evaluation(self, batch: Any, size: int) -> None:
        """Before an evaluation's first batch, on every rank: what the loss is a mean over, if no step has shown it."""

    def predict_step(self, batch: Any) -> Any:
        """The predictions of this rank's batch; None: another rank with the same samples has them."""

    def train(self, mode: bool) -> None: ...

    def collect_statistics(self, microbatches: Sequence[Microbatch]) -> None:
        """Forward passes in training mode and without gradients, by which BatchNorm collects statistics."""

    def parameters_changed(self) -> None:
        """Train what requires a gradient by now; every rank calls it after the same step."""

    def keep_copies(self, labels: Iterable[str]) -> None:
        """What copies of the model there may be, before a state is loaded: others are left out of it."""

    def weights(self, *, changes: bool = False) -> AbstractContextManager[ModelCopy]:
        """This rank's part of the tensors of a model that copies have, by name, and as the optimizer steps them.

        Every rank must enter it. `changes`: they are written to.
        """

    def finish(self) -> None:
        """Gather what the user's model needs of other ranks; every rank must call it after a run that ended well."""

    def close(self) -> None:
        """Restore the user's model, also after a failure, without a collective."""

    def state(self) -> StateTree: ...

    def load_state(self, tree: StateTree) -> None: ...

    def own_state(self) -> StateTree:
        """What this rank alone has of a state; {}: `state` is all."""

    def load_own_state(self, own: StateTree) -> None:
        """What `own_state` gave on this rank, where as many ranks resume as have saved; after `load_state`."""

    def compared(self) -> StateTree:
        """The state of this rank as a resume certificate compares it."""

    def shard_ranges(self, name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        """The ranges of a checkpoint's tensor that this rank needs, by its path and whole shape; None: all of it."""

    def replicated(self) -> Iterator[tuple[str, torch.Tensor | str]]:
        """This rank's tensors, by names with their shard: ranks with the same name must hold the same values.

        Texts are settings. Uses no collective, and does not synchronize with the device.
        """

    def held_state(self) -> StateTree | None:
        """`state` of this rank at its last step boundary, without a collective, because other ranks may be gone.

        None if this rank does not hold all of it.
        """
