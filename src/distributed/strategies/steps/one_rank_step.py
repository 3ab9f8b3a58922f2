"""OneRankStep: the step of a rank with the whole model, before and after its gradients are reduced."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.core.plan import Decision, Plan
from distributed.runtime.session import Session
from distributed.runtime.step_gate import StepGate
from distributed.runtime.tensor_shard import Box
from distributed.runtime.torch_compat import foreach_norm
from distributed.runtime.torch_module_compat import has_global_step_hooks, loss_scale_tensors
from distributed.strategies.base import LOW_PRECISION, Outcome, StateTree, StepTask
from distributed.strategies.checks.elementwise import has_step_hooks
from distributed.strategies.checks.layers import check_layers
from distributed.strategies.checks.parameter_hooks import ParameterHooks, hooked_parameters
from distributed.strategies.checks.parameter_use import OwnUse
from distributed.strategies.checks.replica_tensors import (
    Named,
    model_tensors,
    more_tensors,
    optimizer_options,
    optimizer_state,
    shared_names,
)
from distributed.strategies.checks.sharded_models import extra_state
from distributed.strategies.checks.stepping import check_made, check_stepping
from distributed.strategies.checks.torch_errors import explain_sample
from distributed.strategies.checks.unstepped import refuse_unstepped
from distributed.strategies.compute_clock import ComputeClock
from distributed.strategies.data_parallel.clip_values import clip_values
from distributed.strategies.data_parallel.sparse_gradients import clip, norm_of
from distributed.strategies.joint_optimizer import JointOptimizer
from distributed.strategies.model.buffer_snapshot import BufferSnapshot
from distributed.strategies.model.compiled_call import CompiledCall
from distributed.strategies.model.copies import is_unwanted
from distributed.strategies.model.optimizer_state import load_named_state, named_state
from distributed.strategies.speed.bf16_parameters import Bf16Parameters
from distributed.strategies.speed.bf16_shards import RoundedShards
from distributed.strategies.speed.device_settings import device_settings
from distributed.strategies.speed.fused import begin_with_momentum, fuse, has_dampening, is_fused, why_not_fused
from distributed.strategies.speed.memory_format import lay_out_state, to_channels_last
from distributed.strategies.steps.copied_model import CopiedModel
from distributed.strategies.steps.evaluation_step import EvaluationStep, idle_optimizer

T = TypeVar("T")


def has_shares(plan: Plan) -> bool:
    """Whether a step has several parts, on ranks or in sequence, which are weighted by their samples."""
    return plan.batch.ranks * plan.batch.most_accumulated > 1 or plan.batch.leaves > 0


class OneRankStep(EvaluationStep, CopiedModel):
    """The model, its optimizer, precision and clipping on one rank."""

    forward_watch: AbstractContextManager[Any] | None = None  # around each forward pass of training, if one is set
    compiled: CompiledCall | None = None  # if the model is compiled as a whole
    _has_channels_last = False
    _low: Bf16Parameters | RoundedShards | None = None  # if the model computes with parameters in bf16
    _hooks_of_parameters: ParameterHooks | None = None  # if gradients are reduced over ranks
    _gate: StepGate | None = None  # if no step may be taken once the world has broken
    _own_use: OwnUse | None = None  # if this rank has parts of parameters, and the user has steps of his own
    _task_before: StateTree | None = None  # what the task keeps, at the beginning of the current step

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.copies = {}
        self._until_closed = ExitStack()  # undoes changes to the user's objects and the process

    @property
    def is_gated(self) -> bool:
        return self._gate is not None

    def check(self, task: StepTask) -> None:
        check_layers(task.model, self._plan)
        check_stepping(task, self._plan)

    def setup(self, task: StepTask, session: Session) -> None:
        plan = self._plan
        self._task, self._loss, self._session, self.decisions = task, task.loss_module, session, []
        self._run = self._run_own_step if task.has_own_step else task.run
        self._replicas = plan.replicate
        self.clock = ComputeClock(session.device)
        self._in_step = False
        self._moves = session.device.type != "cpu" or session.is_dry  # whether reading a value would wait or fail
        looks = plan.detect_anomaly and not session.is_dry
        # On a GPU, reading the loss would synchronize.
        self._checks_loss = plan.on_nan == "stop" and (looks or not self._moves)
        self._is_settled = session.is_dry
        self._has_shares = has_shares(plan)
        self._clip_norm, self._clip_value = plan.optimizer.clip_norm, plan.optimizer.clip_value
        self.module = task.model
        check_layers(self.module, plan)
        check_stepping(task, plan)
        self._keep_modes()
        if not session.is_dry:
            self._until_closed.enter_context(device_settings(plan.speed, session.device))
        self._prepare_model(task)
        self._modes.note_trained(self.module)
        self._lay_out()
        self.optimizer = self._make_optimizer(task)
        check_made(self.optimizer, plan, is_manual=task.is_manual)
        has_hooks = has_step_hooks(self.optimizer) or has_global_step_hooks() or bool(hooked_parameters(self.module))
        self._speed_up()
        self._stepper: Any = self.optimizer  # the object whose `step` is called
        self._choose_parameters()
        self._gate = None if has_hooks else self._gate_steps()  # a hook may change more than the kernels do
        self._forget_gradients()  # of an interrupted step, if the model resumes in another world
        self._model: nn.Module = self.module  # the module that training calls
        self._buffers_before: BufferSnapshot | None = None  # the buffers at the beginning of the current step
        self._steps_kept = math.inf  # of how many of the last steps that is known, should they not be taken
        dtype = LOW_PRECISION.get(plan.precision.kind)
        self._autocast = torch.autocast(session.device.type, dtype) if dtype else None
        self._scaler = None
        if plan.precision.kind == "fp16" and not session.is_dry:
            self._scaler = torch.amp.GradScaler(
                session.device.type,
                init_scale=plan.precision.scaler_init_scale,
                growth_interval=plan.precision.scaler_growth_interval,
            )

    def _choose_parameters(self) -> None:
        """Which parameters are stepped, and which get gradients."""
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        # Also of parameters without an optimizer: a gradient that stays would be added to the next step's.
        trained = (parameter for parameter in self.module.parameters() if parameter.requires_grad)
        self._with_gradients = list(dict.fromkeys([*self._parameters, *trained]))

    def parameters_changed(self) -> None:
        """Train what requires a gradient by now; every rank calls it after the same step."""
        if self._task.has_phases or self._task.is_manual:
            how = "several optimizers" if self._task.has_phases else "manual_optimization"
            raise TaskError(
                f"parameters are frozen or unfrozen in a run with {how}",
                why="its training step says which parameters are trained, and is called with the name of an optimizer"
                if self._task.has_phases
                else "its training step makes gradients and steps itself",
                do="leave parameters out of what configure_optimizers returns, or let the step leave them out",
            )
        self._forget_gradients()
        if self._low is not None:
            self._low.follow_trained()
        stepped = (p for group in self.optimizer.param_groups for p in group["params"])
        with self._whole():
            refuse_unstepped(self.module, set(map(id, (*stepped, *self._with_gradients))))
        self._choose_parameters()

    def _prepare_model(self, task: StepTask) -> None:
        """Prepare the model before its optimizer is made."""
        task.move_to(self._session.device)

    def _make_optimizer(self, task: StepTask) -> torch.optim.Optimizer:
        return task.make_optimizer(self.module, self._plan) if self._plan.trains else idle_optimizer(self.module)

    def _lay_out(self) -> None:
        """Set the memory format before the optimizer is made, because its state gets that of the parameters."""
        self._has_channels_last = self._plan.speed.channels_last
        if self._has_channels_last:
            self._until_closed.callback(to_channels_last(self.module))

    def _speed_up(self) -> None:
        """Set up the optimizer and its parameters; undone at the end of the run."""
        lay_out_state(self.optimizer)
        if isinstance(self.optimizer, JointOptimizer):
            pass  # its members keep their own kernels
        elif self._plan.speed.fused_optimizer and not all(group.get("fused") for group in self.optimizer.param_groups):
            self._fuse()
        self._low = self._lower_parameters()
        if self._low is not None:
            self._until_closed.callback(self._low.close)

    def _gate_steps(self) -> StepGate | None:
        """Let torch's fused kernels read the gate as an overflow flag, which makes them skip the step."""
        gate = self._session.gate
        is_plain = self._plan.precision.kind != "fp16" and self._low is None  # else a step changes more than kernels do
        is_plain = is_plain and not self._task.is_manual
        if gate is None or not is_plain or not is_fused(self.optimizer) or has_dampening(self.optimizer):
            return None
        optimizer: Any = self.optimizer
        self._until_closed.callback(begin_with_momentum(optimizer))
        optimizer.found_inf = gate.latch_tensor
        self._until_closed.callback(lambda: delattr(optimizer, "found_inf"))
        return gate

    def _fuse(self) -> None:
        why_not = why_not_fused(self.optimizer, self.module)
        if why_not:
            self.decisions.append(Decision(f"{type(self.optimizer).__name__} not fused", why_not, "fused_optimizer"))
        else:
            self._until_closed.callback(fuse(self.optimizer))

    def _lower_parameters(self) -> Bf16Parameters | RoundedShards | None:
        plan, session = self._plan, self._session
        if plan.speed.parameters == "fp32":
            return None
        several, rounds = session.world_size > 1 and not session.is_dry, plan.speed.parameters == "stochastic"
        if several:  # DDP broadcasts only the bf16 parameters
            from distributed.strategies.model.materialize import send_weights  # takes long to import

            send_weights(self.module, session)
        # Ranks draw different numbers for dropout, but must round equally.
        shared = torch.Generator(session.device).manual_seed(plan.seed % 2**63) if several and rounds else None
        return Bf16Parameters(self.module, rounds=rounds, generator=shared)

    def _whole(self) -> AbstractContextManager[None]:
        """A scope in which the model has the parameters of the user and the optimizer."""
        return nullcontext() if self._low is None else self._low.whole()

    def finish(self) -> None:
        """Does nothing: the user's model has its new weights."""

    def close(self) -> None:
        """Restore the user's model, optimizer and process, with the new weights."""
        self._until_closed.close()

    def state(self) -> StateTree:
        with self._whole():
            found = {"model": self.module.state_dict(), "optimizer": named_state(self.optimizer, self.module)}
        return found | self._state_beside()

    def _state_beside(self) -> StateTree:
        """The state beside the model and its optimizer."""
        more: StateTree = {} if self._scaler is None else {"scaler": self._scaler.state_dict()}
        if self._low is not None and self._low.generator is not None:
            more["rounding"] = self._low.generator.get_state()
        if self.compiled is not None and self.compiled.choice:
            more["compile"] = {"choice": self.compiled.choice}
        return more | self._state_of_copies()

    def shard_ranges(self, name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        return () if is_unwanted(name, self.copies) else None

    def load_state(self, tree: StateTree) -> None:
        with self._whole():
            self.module.load_state_dict(tree["model"])
            if "optimizer" in tree:  # not in weights that came from another program
                load_named_state(self.optimizer, self.module, tree["optimizer"])
        lay_out_state(self.optimizer)
        self._load_state_beside(tree)

    def _load_state_beside(self, tree: StateTree) -> None:
        if self._low is not None and "rounding" in tree:
            self._low.load_generator(tree["rounding"])
        if self.compiled is not None and "compile" in tree:
            self.compiled.choose(tree["compile"]["choice"])
        if self._scaler is not None and "scaler" in tree:
            self._scaler.load_state_dict(tree["scaler"])
        self._load_copies(tree)

    def replicated(self) -> Named:
        yield from model_tensors(self.module, self._replicas)
        for name, key, value in optimizer_state(self.optimizer, self.module):
            yield f"optimizer state {key} of {name}", value
        yield from optimizer_options(self.optimizer)
        if self._low is not None:
            yield from more_tensors("parameter in fp32, number", self._low.tensors())
        yield from self._loss_scale()
        yield from self._copied_alike(shared_names(self.module, self._replicas))

    def _loss_scale(self) -> Named:
        return more_tensors("optimizer loss scale, number", self._scaler_tensors())

    def _scaler_tensors(self) -> list[torch.Tensor]:
        return [] if self._scaler is None else loss_scale_tensors(self._scaler)

    @torch.no_grad()
    def held_state(self) -> StateTree | None:
        """The state at the last step boundary: an interrupted step changed no parameter; its buffers are restored."""
        gate = self._session.gate
        if gate is not None and self._gate is None:
            return None
        behind = 0 if gate is None else gate.behind
        if behind + self._in_step > self._steps_kept:
            return None  # buffers that forward replaces are those of a step that was not taken
        if (behind or self._in_step or not self._model.training) and self._keeps_more_than_buffers():
            return None  # of which there is no snapshot
        if self._task.keeps_state and (behind or not self._model.training):
            return None  # of the state before several steps, or before an evaluation, there is none
        if (self._in_step or behind) and self._buffers_before is not None:
            self._buffers_before.restore()
        if self._in_step and self._task_before is not None:
            self._task.load_state(self._task_before)
        if self._loss_before is not None:  # the world broke in an evaluation
            self._loss_before.restore()
        return OneRankStep.state(self)

    def _keeps_more_than_buffers(self) -> bool:
        """Whether a call of the model or the loss may change what they save in ways of their own."""
        loss = self._loss
        tensors = set() if loss is None else {name for name, _ in (*loss.named_buffers(), *loss.named_parameters())}
        return bool(extra_state(self.module)) or any(name not in tensors for name in self._task.loss_state())

    def _begin_step(self) -> None:
        """Save the buffers that an interrupted step must restore, if the surviving ranks could resume."""
        self._in_step = True
        if not self._session.can_regroup:
            return
        if self._task.keeps_state:
            self._task_before = copy.deepcopy(self._task.state())
        if self._buffers_before is not None and self._buffers_before.is_current():
            # After steps that the gate skipped, keep the buffers of the first of them.
            self._buffers_before.retake(unless=None if self._gate is None else self._gate.latch_tensor)
            self._steps_kept += 1
        else:  # the first step, or a model that replaces its buffers in forward
            self._steps_kept = math.inf if self._buffers_before is None else 1
            self._buffers_before = BufferSnapshot(self.module, *([] if self._loss is None else [self._loss]))

    @property
    def _is_rough(self) -> bool:
        return self._autocast is not None or self._low is not None

    def _forward(self, model: nn.Module, batch: Any) -> Outcome:
        if self.forward_watch is None:
            return self._call(self._run, model, batch)
        with self.forward_watch:
            return self._call(self._run, model, batch)

    def _run_own_step(self, model: nn.Module, batch: Any) -> Outcome:
        """A training step that is the user's code."""
        return self._task.run(model, batch)

    def _call(self, step: Callable[[nn.Module, Any], T], model: nn.Module, batch: Any) -> T:
        """A step of the task, in the precision of the plan."""
        try:
            if self._own_use is not None:
                with self._own_use.watching(step.__name__), self._autocast or nullcontext():
                    return step(model, batch)
            if self._autocast is None:
                return step(model, batch)
            with self._autocast:
                return step(model, batch)
        except ValueError as error:
            if self._has_shares:
                explain_sample(error)
            raise

    def _backward(self, part: torch.Tensor) -> None:
        if self._scaler is None:
            part.backward()
        else:
            self._scaler.scale(part).backward()

    def _update(self, measure: bool) -> torch.Tensor | None:
        """Clip and apply the gradients of the global batch, then drop them; returns their norm."""
        if self._hooks_of_parameters is not None:
            self._hooks_of_parameters.call()
        norm = self._finish_gradients(measure)
        if self._clip_value is not None:
            clip_values(self._parameters, self._clip_value)
        if self._gate is not None:
            self._gate.latch()
        if self._scaler is None:
            self._stepper.step()
        else:
            self._scaler.step(self._stepper)
            self._scaler.update()
        if self._low is not None:
            self._low.write()
        self._in_step = False
        self._forget_gradients()
        return norm

    def _forget_gradients(self) -> None:
        """Drop gradients as zero_grad does, without its profiling and grouping."""
        for parameter in self._with_gradients:
            parameter.grad = None

    def _finish_gradients(self, measure: bool) -> torch.Tensor | None:
        if self._clip_norm is None and self._clip_value is None and not measure:
            return None
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        if self._clip_norm is None and not measure:
            return None
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if any(gradient.is_sparse for gradient in gradients):
            return norm_of(gradients) if self._clip_norm is None else clip(gradients, self._clip_norm)
        if self._clip_norm is not None:
            return nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        norms = foreach_norm(gradients)
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None
