"""OneRankStep: the step of a rank with the whole model, before and after its gradients are reduced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from distributed.core.plan import Decision, Plan
from distributed.data.loading.transfer import to_device
from distributed.runtime.session import Session
from distributed.runtime.step_gate import StepGate
from distributed.runtime.tensor_shard import Box
from distributed.runtime.torch_compat import foreach_norm, preserved_versions
from distributed.runtime.torch_module_compat import has_global_step_hooks, loss_scale_tensors
from distributed.strategies.base import LossTrial, MetricSum, Outcome, StateTree, StepTask
from distributed.strategies.checks.elementwise import has_step_hooks, refuse_closure
from distributed.strategies.checks.layers import check_layers
from distributed.strategies.checks.parameter_hooks import ParameterHooks, hooked_parameters
from distributed.strategies.checks.replica_tensors import (
    Named,
    model_tensors,
    more_tensors,
    optimizer_options,
    optimizer_state,
)
from distributed.strategies.checks.sharded_models import extra_state
from distributed.strategies.checks.torch_errors import explain_sample
from distributed.strategies.compute_clock import ComputeClock
from distributed.strategies.data_parallel.sparse_gradients import clip, norm_of
from distributed.strategies.model.buffer_snapshot import BufferSnapshot, kept_buffers
from distributed.strategies.model.compiled_call import CompiledCall
from distributed.strategies.model.optimizer_state import load_named_state, named_state
from distributed.strategies.speed.bf16_parameters import LowParameters
from distributed.strategies.speed.bf16_shards import RoundedShards
from distributed.strategies.speed.device_settings import device_settings
from distributed.strategies.speed.fused import begin_with_momentum, fuse, has_dampening, is_fused, why_not_fused
from distributed.strategies.speed.memory_format import lay_out_state, to_channels_last

T = TypeVar("T")
LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}  # of autocast


def unless_empty(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The loss with 0 for the mean over nothing, which is NaN in torch and has no weight."""
    return torch.where(weight > 0, loss, loss.nan_to_num(0.0))


def has_shares(plan: Plan) -> bool:
    """Whether a step has several parts, on ranks or in sequence, which are weighted by their samples."""
    return plan.batch.ranks * plan.batch.accumulation > 1 or plan.batch.leaves > 0


class OneRankStep:
    """The model, its optimizer, precision and clipping on one rank."""

    optimizer: torch.optim.Optimizer
    owns_metrics = True
    lockstep_eval = False
    decisions: list[Decision]
    compiled: CompiledCall | None = None  # if the model is compiled as a whole
    _has_channels_last = False
    _is_settled = False  # whether the divisor of the loss's mean is known
    _has_shares = True
    _low: LowParameters | RoundedShards | None = None  # if the model computes with parameters in bf16
    _hooks_of_parameters: ParameterHooks | None = None  # if gradients are reduced over ranks
    _gate: StepGate | None = None  # if no step may be taken once the world has broken
    _loans: ExitStack | None = None  # changes to the user's objects and the process, to be undone
    _loss: nn.Module | None = None  # if the loss is a module
    _loss_before: BufferSnapshot | None = None  # the loss's buffers when an evaluation began

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @property
    def is_gated(self) -> bool:
        return self._gate is not None

    def check(self, task: StepTask) -> None:
        check_layers(task.model, self._plan)
        if isinstance(task.optimizer, torch.optim.Optimizer):
            refuse_closure(task.optimizer)

    def setup(self, task: StepTask, session: Session) -> None:
        plan = self._plan
        self._task, self._loss, self._session, self.decisions = task, task.loss_module, session, []
        self._replicas = plan.replicate
        self.clock = ComputeClock(session.device)
        self._in_step = False
        self._moves = session.device.type != "cpu" or session.is_dry  # whether reading a value would wait or fail
        self._checks_loss = plan.on_nan == "stop" and not self._moves  # on a GPU, reading the loss would synchronize
        self._is_settled = session.is_dry
        self._has_shares = has_shares(plan)
        self._clip_norm = plan.optimizer.clip_norm
        self.module = task.model
        check_layers(self.module, plan)
        self._loans = ExitStack()
        if not session.is_dry:
            self._loans.enter_context(device_settings(plan.speed, session.device))
        self._prepare_model(task)
        self._lay_out()
        self.optimizer = self._make_optimizer(task)
        refuse_closure(self.optimizer)
        has_hooks = has_step_hooks(self.optimizer) or has_global_step_hooks() or bool(hooked_parameters(self.module))
        self._speed_up()
        self._stepper: Any = self.optimizer  # the object whose `step` is called
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._gate = None if has_hooks else self._gate_steps()  # a hook may change more than the kernels do
        # Also of parameters without an optimizer: a gradient that stays would be added to the next step's.
        trained = (parameter for parameter in self.module.parameters() if parameter.requires_grad)
        self._with_gradients = list(dict.fromkeys([*self._parameters, *trained]))
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

    def _prepare_model(self, task: StepTask) -> None:
        """Prepare the model before its optimizer is made."""
        task.move_to(self._session.device)

    def _make_optimizer(self, task: StepTask) -> torch.optim.Optimizer:
        return task.make_optimizer(self.module, self._plan)

    def _lay_out(self) -> None:
        """Set the memory format before the optimizer is made, because its state gets that of the parameters."""
        assert self._loans is not None
        self._has_channels_last = self._plan.speed.channels_last
        if self._has_channels_last:
            self._loans.callback(to_channels_last(self.module))

    def _speed_up(self) -> None:
        """Set up the optimizer and its parameters; undone at the end of the run."""
        assert self._loans is not None
        lay_out_state(self.optimizer)
        if self._plan.speed.fused_optimizer and not all(group.get("fused") for group in self.optimizer.param_groups):
            self._fuse(self._loans)
        self._low = self._lower_parameters()
        if self._low is not None:
            self._loans.callback(self._low.close)

    def _gate_steps(self) -> StepGate | None:
        """Let torch's fused kernels read the gate as an overflow flag, which makes them skip the step."""
        gate = self._session.gate
        is_plain = self._plan.precision.kind != "fp16" and self._low is None  # else a step changes more than kernels do
        if gate is None or not is_plain or not is_fused(self.optimizer) or has_dampening(self.optimizer):
            return None
        assert self._loans is not None
        optimizer: Any = self.optimizer
        self._loans.callback(begin_with_momentum(optimizer))
        optimizer.found_inf = gate.latch_tensor
        self._loans.callback(lambda: delattr(optimizer, "found_inf"))
        return gate

    def _fuse(self, loans: ExitStack) -> None:
        why_not = why_not_fused(self.optimizer, self.module)
        if why_not:
            self.decisions.append(Decision(f"{type(self.optimizer).__name__} not fused", why_not, "fused_optimizer"))
        else:
            loans.callback(fuse(self.optimizer))

    def _lower_parameters(self) -> LowParameters | RoundedShards | None:
        plan, session = self._plan, self._session
        if plan.speed.parameters == "fp32":
            return None
        several, rounds = session.world_size > 1 and not session.is_dry, plan.speed.parameters == "stochastic"
        if several:  # DDP broadcasts only the bf16 parameters
            from distributed.strategies.model.materialize import send_weights  # takes long to import

            send_weights(self.module, session)
        # Ranks draw different numbers for dropout, but must round equally.
        shared = torch.Generator(session.device).manual_seed(plan.seed % 2**63) if several and rounds else None
        return LowParameters(self.module, rounds=rounds, generator=shared)

    def _whole(self) -> AbstractContextManager[None]:
        """A scope in which the model has the parameters of the user and the optimizer."""
        return nullcontext() if self._low is None else self._low.whole()

    def eval_step(self, batch: Any, size: int) -> Mapping[str, MetricSum]:
        with torch.no_grad():
            outcome = self._call(self._task.evaluate, self.module, self.moved(batch))
        return self._measured(outcome, size)

    def predict_step(self, batch: Any) -> Any:
        """The predictions of this rank's batch."""
        with torch.no_grad():
            return self._call(self._task.predict, self.module, self.moved(batch))

    def moved(self, batch: Any) -> Any:
        """A batch on this rank's device."""
        return to_device(batch, self._session.device) if self._moves else batch

    def _measured(self, outcome: Outcome, size: int) -> Mapping[str, MetricSum]:
        """The metric sums of an evaluation's batch; none for a stand-in."""
        if not size:
            return {}
        with torch.no_grad():
            weight: torch.Tensor | float = float(size) if outcome.weight is None else outcome.weight
            value = outcome.loss if outcome.weight is None else unless_empty(outcome.loss, outcome.weight)
            loss = MetricSum(value.double() * (1.0 if outcome.is_sum else weight), weight)
            self._task.check_evaluated(outcome)
            return {"loss": loss} | self._task.measure(outcome, size)

    def _settle(self, outcome: Outcome, batch: Any, size: int) -> Outcome:
        """Agree once per world on what the loss is a mean over, before any sum; every rank must call it."""
        self._is_settled = True
        settled = self._task.settle(outcome, batch, size, self._trial())
        assert settled is not None
        return settled

    def _trial(self) -> LossTrial:
        device, total = self._session.device, self._session.sum
        return LossTrial(
            agree=lambda votes: total("what the loss is a mean over", votes.to(device)).cpu(),
            matters=self._has_shares,
            module=self.module,
            run=self._try if self._is_whole else None,
            is_joint=False,
            is_rough=self._autocast is not None or self._low is not None,
        )

    @property
    def _is_whole(self) -> bool:
        """Whether this rank can compute an outcome of the model without other ranks."""
        return True

    def _try(self, batch: Any) -> Outcome:
        """An outcome computed without any effect on training."""
        modes = [(module, module.training) for module in self.module.modules()]
        devices = [self._session.device] if self._session.device.type == "cuda" else []
        before = BufferSnapshot(self.module)
        versions = tuple(buffer for buffer in before.buffers if not buffer.is_inference())
        self.module.eval()
        with preserved_versions(versions):  # of tensors that an earlier pass saved for backward
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=devices), kept_buffers(self._loss):
                    return self._forward(self.module, batch)
            finally:
                before.restore()
                for module, mode in modes:
                    module.training = mode
                torch.clear_autocast_cache()  # casts made without gradients would be used again with them

    def train(self, mode: bool) -> None:
        """Switch modes; an evaluation must not change the loss's buffers, as its batches differ between ranks."""
        self._model.train(mode)
        loss = self._loss
        if loss is None:
            return
        if not mode and self._loss_before is None:
            self._loss_before = BufferSnapshot(loss)
        elif mode and self._loss_before is not None:
            self._loss_before.restore()
            self._loss_before = None

    def finish(self) -> None:
        """Does nothing: the user's model has its new weights."""

    def close(self) -> None:
        """Restore the user's model, optimizer and process, with the new weights."""
        if self._loans is not None:
            self._loans.close()

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
        return more

    def shard_ranges(self, name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        return None

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

    def replicated(self) -> Named:
        yield from model_tensors(self.module, self._replicas)
        for name, key, value in optimizer_state(self.optimizer, self.module):
            yield f"optimizer state {key} of {name}", value
        yield from optimizer_options(self.optimizer)
        if self._low is not None:
            yield from more_tensors("parameter in fp32, number", self._low.tensors())
        yield from self._loss_scale()

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
        if (self._in_step or behind) and self._buffers_before is not None:
            self._buffers_before.restore()
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
        if self._buffers_before is not None and self._buffers_before.is_current():
            # After steps that the gate skipped, keep the buffers of the first of them.
            self._buffers_before.retake(unless=None if self._gate is None else self._gate.latch_tensor)
            self._steps_kept += 1
        else:  # the first step, or a model that replaces its buffers in forward
            self._steps_kept = math.inf if self._buffers_before is None else 1
            self._buffers_before = BufferSnapshot(self.module, *([] if self._loss is None else [self._loss]))

    def _forward(self, model: nn.Module, batch: Any) -> Outcome:
        """The outcome of a batch in training."""
        return self._call(self._run, model, batch)

    def _run(self, model: nn.Module, batch: Any) -> Outcome:
        return self._task.run(model, batch)

    def _call(self, step: Callable[[nn.Module, Any], T], model: nn.Module, batch: Any) -> T:
        """A step of the task, in the precision of the plan."""
        try:
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
        if self._clip_norm is None and not measure:
            return None
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if any(gradient.is_sparse for gradient in gradients):
            return norm_of(gradients) if self._clip_norm is None else clip(gradients, self._clip_norm)
        if self._clip_norm is not None:
            return nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        norms = foreach_norm(gradients)
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None
