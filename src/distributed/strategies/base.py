"""The seam of a step: what every engine must do, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from distributed.core.plan import Plan
from distributed.data.loader import Microbatch
from distributed.runtime.portions import Box
from distributed.runtime.session import Session
from distributed.strategies.compute_clock import ComputeClock

StateTree = dict[str, Any]  # nested dicts and lists of tensors and JSON values


class Outcome(NamedTuple):
    """What a model made of one batch."""

    loss: torch.Tensor  # a mean over the batch, or a sum where `is_sum`
    outputs: Any
    target: Any
    weight: torch.Tensor | None = None  # over how much the mean goes, where that is not the number of samples
    is_sum: bool = False
    is_own: bool = False  # whether the model itself returned the loss
    is_given: bool = False  # whether the weight came with the loss
    fitted: Any = None  # the loss function, where it was chosen by the target


class Trial(NamedTuple):
    """What a task may do to find out over what its loss is a mean, before the first backward pass of a world."""

    agree: Callable[[torch.Tensor], torch.Tensor]  # the sum over all ranks; every rank calls it
    matters: bool  # whether a step has several parts, which are weighted by it
    module: nn.Module
    run: Callable[[Any], Outcome] | None  # a batch as an evaluation would; None: not while the model is in parts
    is_rough: bool  # whether it computes in few bits


class MetricSum(NamedTuple):
    """A metric as a sum and what it must be divided by, so that shares of any size add up exactly."""

    total: torch.Tensor | float
    weight: torch.Tensor | float


class StepOutput(NamedTuple):
    # Of this rank's share, weighted so that the mean over the ranks is the global batch's loss. On a CPU, where reading
    # it waits for nothing, a number: cheaper to keep than a tensor.
    loss: torch.Tensor | float
    gradient_norm: torch.Tensor | None = None
    metrics: Mapping[str, MetricSum] | None = None  # of this rank's share, when they were asked for


class NonFiniteLoss(ArithmeticError):
    """The loss of a step is not a finite number: of this one, whose weights are untouched, or of one some steps ago."""

    def __init__(self, value: float, steps_ago: int = 0) -> None:
        super().__init__(value)
        self.value, self.steps_ago = value, steps_ago


class StepTask(Protocol):
    """What a strategy needs to know of the work."""

    model: nn.Module
    optimizer: Any  # the user's: one that is made, what makes one, or None

    @property
    def loss_module(self) -> nn.Module | None:
        """The loss, where it is a module and no part of the model."""

    def loss_state(self) -> dict[str, Any]:
        """What the loss keeps from step to step, by name; {}: nothing."""

    def move_to(self, device: torch.device) -> None: ...

    def move_loss_to(self, device: torch.device) -> None: ...

    def run(self, model: nn.Module, batch: Any) -> Outcome: ...

    def settle(self, outcome: Outcome | None, batch: Any, size: int, trial: Trial) -> Outcome | None:
        """The first outcome of a world, with the weight that all ranks have agreed on; every rank comes here."""

    def measure(self, outcome: Outcome, size: int) -> dict[str, MetricSum]: ...

    def check_targets(self) -> None:
        """Raise what the targets since the last look were found to be; a device must be waited for."""

    def check_share(self, outcome: Outcome, size: int) -> None:
        """Raise if the samples of a part of a step are no weight for its loss. Reads shapes only."""

    def check_evaluated(self, outcome: Outcome) -> None:
        """The same as `check_targets` for a batch of an evaluation."""

    def make_optimizer(self, model: nn.Module, plan: Plan) -> torch.optim.Optimizer: ...


class Capturable(Protocol):
    """A strategy whose step can become one CUDA graph."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    clock: ComputeClock

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput: ...

    def step(self, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        """`train_step` without its clock and without a look at any value."""

    def forget_step(self) -> None:
        """A step was begun and is not carried out: no gradient of it is left."""

    def check_targets(self) -> None:
        """After a step that is measured, where values are looked at."""

    def parts(self) -> Mapping[str, Any]:
        """What Python runs in a step, by name: the model, the loss, and the metrics."""

    def changing(self) -> list[torch.Tensor]:
        """Every tensor that a step changes: parameters, buffers, and the state of optimizer and scaler."""


class Strategy(Protocol):
    """A whole step is the seam, so that pipelines, ZeRO engines and a captured graph fit behind it."""

    optimizer: torch.optim.Optimizer
    clock: ComputeClock  # of this rank's own part of a step
    counts: bool  # whether this rank's losses and metrics are to be added up: of ranks with the same samples, one's are
    in_step: bool  # whether an evaluation's step takes all ranks at once
    notes: list[str]  # for people: what of a setting came to be used in this model

    @staticmethod
    def check(task: StepTask, plan: Plan) -> None:
        """Raise what stands in the way of this plan for this model, before anything is started."""

    def setup(self, task: StepTask, plan: Plan, session: Session) -> None: ...

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput: ...

    def eval_step(self, batch: Any, size: int) -> Mapping[str, MetricSum]: ...

    def train(self, mode: bool) -> None: ...

    def finish(self) -> None:
        """The run has ended well, and every rank comes here: what each needs of the others for the user's model."""

    def close(self) -> None:
        """Give the user's model back, also after a failure, when nobody may be left to ask for anything."""

    def state(self) -> StateTree: ...

    def load_state(self, tree: StateTree) -> None: ...

    def boxes(self, name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        """Of a tensor in a checkpoint, by its path and whole shape, what this rank needs; None: all of it."""

    def replicated(self) -> Iterator[tuple[str, torch.Tensor | str]]:
        """What this rank holds, by names that say what and which part of it: ranks with the same name hold the same.

        Texts are settings. Asks no other rank, and waits for no device.
        """

    def held_state(self) -> StateTree | None:
        """`state` as this rank holds it at its last step boundary, without asking the others, which may be gone.

        None where it does not hold all of it.
        """
