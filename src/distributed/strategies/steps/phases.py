"""PhasedStep: a step of several optimizers, one phase each, in which only its parameters require gradients.

    step ─ phase of the first: forward and backward over all micro-batches, reduce, clip, step
         ─ phase of the second: the same, with the first one's new weights
         ─ …

Between two phases a rank holds the state of no step: if the world breaks there, it resumes from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distributed.data.loading.loader import Microbatch
from distributed.strategies.base import MetricSum, StateTree, StepOutput, add_sums
from distributed.strategies.checks.forward_changes import ForwardChanges
from distributed.strategies.joint_optimizer import JointOptimizer, OptimizerSetup
from distributed.strategies.steps.microbatches import MicrobatchStep


@dataclass
class OptimizerPhase:
    """The part of a step that is for one optimizer, and what of a strategy is its own."""

    name: str
    setup: OptimizerSetup
    others: list[nn.Parameter]  # which are trained, and not by this optimizer
    model: nn.Module  # that training calls
    check_reduced: Callable[[], None] | None = None
    is_settled: bool = False  # what its loss is a mean over
    is_tried: bool = False  # whether that was to be found out before its first step
    changes: ForwardChanges | None = None


class PhasedStep(MicrobatchStep):
    """Takes a step in phases where the task has them."""

    _phases: Sequence[OptimizerPhase] = ()
    _steps_in_phases = 0
    _is_torn = False  # whether the step in progress has changed parameters already

    def _pass_and_update(self, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        """Forward, backward, reduction and an optimizer's step."""
        raise NotImplementedError

    def _make_phases(self) -> None:
        """Of the optimizers that were made, if the task has a phase for each."""
        joint = self.optimizer
        if not self._task.has_phases or not isinstance(joint, JointOptimizer):
            return
        own = {name: _trained(setup) for name, setup in joint.setups.items()}
        self._phases = [
            OptimizerPhase(
                name,
                setup,
                others=[p for other, held in own.items() if other != name for p in held],
                model=self._model,
                is_settled=self._is_settled,
            )
            for name, setup in joint.setups.items()
        ]

    def _take_phases(self, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        number = self._steps_in_phases + 1
        if len(microbatches) == 1:  # else each phase moves them again, and they need not all be on the device at once
            microbatches = [microbatches[0]._replace(batch=self.moved(microbatches[0].batch))]
        self._settle_later(number, microbatches[0])
        outputs = {}
        for phase in self._phases:
            if phase.setup.is_due(number) or self._session.is_dry:
                with self._in_phase(phase):
                    outputs[phase.name] = self._pass_and_update(microbatches, measure)
                self._is_torn = self._in_step = True
        self._is_torn = self._in_step = False
        self._steps_in_phases = number
        return _sum_of(outputs, measure)

    def _settle_later(self, number: int, micro: Microbatch) -> None:
        """Find out at once what the losses of phases to come are means over: their first batch may be a short one."""
        for phase in self._phases:
            if not (phase.is_settled or phase.is_tried or phase.setup.is_due(number)):
                with self._in_phase(phase):
                    self._settle_before(micro)
            phase.is_tried = True

    @contextmanager
    def _in_phase(self, phase: OptimizerPhase) -> Iterator[None]:
        """A scope in which only this phase's parameters require gradients, and its optimizer alone is due."""
        joint = self.optimizer
        assert isinstance(joint, JointOptimizer)
        kept = self._model, self._check_reduced, self._clip_norm, self._is_settled, self._changes
        for parameter in phase.others:
            parameter.requires_grad_(False)
        self._task.begin_phase(phase.name)
        joint.due = (phase.name,)
        self._model, self._check_reduced = phase.model, phase.check_reduced
        self._is_settled, self._changes = phase.is_settled, phase.changes
        if phase.setup.gradient_clipping is not None:
            self._clip_norm = phase.setup.gradient_clipping
        try:
            yield
        finally:
            phase.is_settled, phase.changes = self._is_settled, self._changes
            self._model, self._check_reduced, self._clip_norm, self._is_settled, self._changes = kept
            self._task.begin_phase("")
            joint.due = tuple(joint.setups)
            for parameter in phase.others:
                parameter.requires_grad_(True)

    def _collect(self, batch: Any) -> None:
        """The passes of every phase, of which each may call other parts of the model."""
        try:
            for name in [phase.name for phase in self._phases] or [""]:
                self._task.begin_phase(name)
                super()._collect(batch)
        finally:
            self._task.begin_phase("")

    def _state_beside(self) -> StateTree:
        more = {"phases": {"step": self._steps_in_phases}} if self._phases else {}
        return super()._state_beside() | more

    def _load_state_beside(self, tree: StateTree) -> None:
        super()._load_state_beside(tree)
        self._steps_in_phases = tree.get("phases", {}).get("step", 0)

    def held_state(self) -> StateTree | None:
        return None if self._is_torn else super().held_state()


def _trained(setup: OptimizerSetup) -> list[nn.Parameter]:
    return [p for group in setup.optimizer.param_groups for p in group["params"] if p.requires_grad]


def _sum_of(outputs: dict[str, StepOutput], measure: bool) -> StepOutput:
    """The phases of a step as one: the sum of their losses, each loss by name, and the norm of all gradients."""
    loss = sum((output.loss for output in outputs.values()), 0.0)
    if not measure:
        return StepOutput(loss)
    metrics: dict[str, MetricSum] = {}
    for name, output in outputs.items():
        add_sums(metrics, {f"loss_{name}": MetricSum(output.loss, 1.0), **(output.metrics or {})})
    norms = [output.gradient_norm for output in outputs.values() if output.gradient_norm is not None]
    norm = torch.linalg.vector_norm(torch.stack([one.double() for one in norms])) if norms else None
    return StepOutput(loss, norm, metrics)
