"""Replica: what every engine does that keeps the whole model on each rank, before and after gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from distributed.core.plan import Decision, Plan
from distributed.data.transfer import to_device
from distributed.runtime.portions import Box
from distributed.runtime.session import Session
from distributed.strategies.base import MetricSum, Outcome, StateTree, StepTask, Trial
from distributed.strategies.compute_clock import ComputeClock
from distributed.strategies.device_settings import device_settings
from distributed.strategies.elementwise import refuse_closure
from distributed.strategies.fused import fuse, why_not_fused
from distributed.strategies.layer_checks import check_layers
from distributed.strategies.low_parameters import LowParameters
from distributed.strategies.memory_format import lay_out_state, to_channels_last
from distributed.strategies.optimizer_state import load_named_state, named_state
from distributed.strategies.parameter_hooks import ParameterHooks
from distributed.strategies.replica_tensors import (
    Named,
    model_tensors,
    more_tensors,
    optimizer_options,
    optimizer_state,
)
from distributed.strategies.sparse_gradients import clip, norm_of

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}  # of autocast


def unless_empty(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A mean over nothing is NaN in torch; here it is 0, as it has no weight."""
    return torch.where(weight > 0, loss, loss.nan_to_num(0.0))


def has_shares(plan: Plan) -> bool:
    """Whether a step has several parts, on ranks or one after the other, which are weighted by what they hold."""
    return plan.batch.ranks * plan.batch.accumulation > 1 or plan.batch.leaves > 0


class _Kept(NamedTuple):
    """A buffer, where it was found, and what it held; None: it was declared and not made yet."""

    owner: dict[str, torch.Tensor | None]
    name: str
    buffer: torch.Tensor | None
    before: torch.Tensor | None


_Place = tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]


def _buffer_places(module: nn.Module) -> list[_Place]:
    return [(m._buffers, name, buffer) for m in module.modules() for name, buffer in m._buffers.items()]


@torch.no_grad()
def _keep(places: list[_Place]) -> list[_Kept]:
    return [
        _Kept(owner, name, buffer, None if buffer is None else buffer.detach().clone())
        for owner, name, buffer in places
    ]


@torch.no_grad()
def _take_back(before: list[_Kept], places: list[_Place]) -> None:
    """Also those that were replaced meanwhile, and without those that were made."""
    known = {(id(kept.owner), kept.name) for kept in before}
    for owner, name, _ in places:
        if (id(owner), name) not in known:
            del owner[name]
    for kept in before:
        if kept.buffer is not None and kept.before is not None:
            kept.buffer.copy_(kept.before)
        kept.owner[kept.name] = kept.buffer


class Replica:
    """The model, its optimizer, precision and clipping on one rank."""

    optimizer: torch.optim.Optimizer
    counts = True
    in_step = False
    notes: list[str]
    _has_channels_last = False
    _is_settled = False  # whether it is known what the loss is a mean over
    _has_shares = True
    _low: LowParameters | None = None  # where the model computes with parameters in bf16
    _hooks_of_parameters: ParameterHooks | None = None  # where gradients are reduced over ranks
    _loans: ExitStack | None = None  # what was taken from the user and the process, to be given back
    _loss: nn.Module | None = None  # where it is a module
    _loss_before: list[_Kept] | None = None  # what the loss kept when an evaluation began

    @staticmethod
    def check(task: StepTask, plan: Plan) -> None:
        check_layers(task.model, plan)
        if isinstance(task.optimizer, torch.optim.Optimizer):
            refuse_closure(task.optimizer)

    def setup(self, task: StepTask, plan: Plan, session: Session) -> None:
        self._task, self._loss, self._session, self.notes = task, task.loss_module, session, []
        self._replicas = plan.replicate
        self.clock = ComputeClock(session.device)
        self._in_step = False
        self._moves = session.device.type != "cpu" or session.is_dry  # whether a look at a value would wait or fail
        self._checks_loss = plan.on_nan == "stop" and not self._moves  # on a GPU a look at the loss would wait for it
        self._is_settled = session.is_dry
        self._has_shares = has_shares(plan)
        self._clip_norm = plan.optimizer.clip_norm
        self.module = task.model
        check_layers(self.module, plan)
        self._loans = ExitStack()
        if not session.is_dry:
            self._loans.enter_context(device_settings(plan.speed, session.device))
        self._prepare_model(task, plan, session)
        self._lay_out(plan)
        self.optimizer = self._make_optimizer(task, plan)
        refuse_closure(self.optimizer)
        self._speed_up(plan, session)
        self._stepper: Any = self.optimizer  # what steps in its name
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        # Also of those that no optimizer steps: a gradient that stays would be taken for one of the next step.
        trained = (parameter for parameter in self.module.parameters() if parameter.requires_grad)
        self._with_gradients = list(dict.fromkeys([*self._parameters, *trained]))
        self._forget_gradients()  # of a step that was cut off, when a model goes on in another world
        self._model: nn.Module = self.module  # what training calls
        self._buffers_before: list[_Kept] | None = None  # what the step in flight began with
        dtype = LOW_PRECISION.get(plan.precision.kind)
        self._autocast = torch.autocast(session.device.type, dtype) if dtype else None
        self._scaler = None
        if plan.precision.kind == "fp16" and not session.is_dry:
            self._scaler = torch.amp.GradScaler(
                session.device.type,
                init_scale=plan.precision.scaler_init_scale,
                growth_interval=plan.precision.scaler_growth_interval,
            )

    def _prepare_model(self, task: StepTask, plan: Plan, session: Session) -> None:
        """Before there is an optimizer over its parameters."""
        task.move_to(session.device)

    def _make_optimizer(self, task: StepTask, plan: Plan) -> torch.optim.Optimizer:
        return task.make_optimizer(self.module, plan)

    def _lay_out(self, plan: Plan) -> None:
        """Before there is an optimizer: its state takes the order of the parameters."""
        assert self._loans is not None
        self._has_channels_last = plan.speed.channels_last
        if self._has_channels_last:
            self._loans.callback(to_channels_last(self.module))

    def _speed_up(self, plan: Plan, session: Session) -> None:
        """What is done to an optimizer and its parameters, and given back in the end."""
        assert self._loans is not None
        lay_out_state(self.optimizer)
        if plan.speed.fused_optimizer and not all(group.get("fused") for group in self.optimizer.param_groups):
            self._fuse(self._loans)
        if plan.speed.parameters != "fp32":
            self._low = self._lower_parameters(plan, session)
            self._loans.callback(self._low.close)

    def _fuse(self, loans: ExitStack) -> None:
        why_not = why_not_fused(self.optimizer, self.module)
        if why_not:
            self.notes.append(str(Decision(f"{type(self.optimizer).__name__} not fused", why_not, "fused_optimizer")))
        else:
            loans.callback(fuse(self.optimizer))

    def _lower_parameters(self, plan: Plan, session: Session) -> LowParameters:
        several, rounds = session.world_size > 1 and not session.is_dry, plan.speed.parameters == "stochastic"
        if several:  # DDP sends the low ones alone
            from distributed.strategies.materialize import send_weights  # takes long to import

            send_weights(self.module, None, session.device)
        # Ranks draw numbers of their own for dropout, but must round alike.
        shared = torch.Generator(session.device).manual_seed(plan.seed % 2**63) if several and rounds else None
        return LowParameters(self.module, rounds=rounds, generator=shared)

    def _whole(self) -> AbstractContextManager[None]:
        """The model with the parameters that the user and the optimizer know."""
        return nullcontext() if self._low is None else self._low.whole()

    def eval_step(self, batch: Any, size: int) -> Mapping[str, MetricSum]:
        with torch.no_grad():
            outcome = self._forward(self.module, to_device(batch, self._session.device) if self._moves else batch)
        return self._measured(outcome, size)

    def _measured(self, outcome: Outcome, size: int) -> Mapping[str, MetricSum]:
        """The sums of an evaluation's batch; none of a stand-in."""
        if not size:
            return {}
        with torch.no_grad():
            weight: torch.Tensor | float = float(size) if outcome.weight is None else outcome.weight
            value = outcome.loss if outcome.weight is None else unless_empty(outcome.loss, outcome.weight)
            loss = MetricSum(value.double() * (1.0 if outcome.is_sum else weight), weight)
            self._task.check_evaluated(outcome)
            return {"loss": loss} | self._task.measure(outcome, size)

    def _settle(self, outcome: Outcome, batch: Any, size: int) -> Outcome:
        """Once in a world, before anything is added up: what the loss is a mean over. Every rank comes here."""
        self._is_settled = True
        settled = self._task.settle(outcome, batch, size, self._trial())
        assert settled is not None
        return settled

    def _trial(self) -> Trial:
        device, total = self._session.device, self._session.sum
        return Trial(
            agree=lambda votes: total("what the loss is a mean over", votes.to(device)).cpu(),
            matters=self._has_shares,
            module=self.module,
            run=self._try if self._is_whole else None,
            is_rough=self._autocast is not None or self._low is not None,
        )

    @property
    def _is_whole(self) -> bool:
        """Whether this rank can compute an outcome of the model by itself."""
        return True

    def _try(self, batch: Any) -> Outcome:
        """An outcome that leaves no trace in the training."""
        modes = [(module, module.training) for module in self.module.modules()]
        devices = [self._session.device] if self._session.device.type == "cuda" else []
        before = _keep(_buffer_places(self.module))
        versions = tuple(kept.buffer for kept in before if kept.buffer is not None and not kept.buffer.is_inference())
        self.module.eval()
        with _unsafe_preserve_version_counter(versions):  # of what a pass before this one keeps for its gradients
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=devices), self._loss_kept():
                    return self._forward(self.module, batch)
            finally:
                _take_back(before, _buffer_places(self.module))
                for module, mode in modes:
                    module.training = mode
                torch.clear_autocast_cache()  # casts made without gradients would be used again with them

    def train(self, mode: bool) -> None:
        """An evaluation leaves no trace in the loss: how many batches a rank sees of it depends on their number."""
        self._model.train(mode)
        loss = self._loss
        if loss is None:
            return
        if not mode and self._loss_before is None:
            self._loss_before = _keep(_buffer_places(loss))
        elif mode and self._loss_before is not None:
            _take_back(self._loss_before, _buffer_places(loss))
            self._loss_before = None

    @contextmanager
    def _loss_kept(self) -> Iterator[None]:
        """Around passes that are not the training's: what the loss keeps stays as it was."""
        loss = self._loss
        before = [] if loss is None else _keep(_buffer_places(loss))
        try:
            yield
        finally:
            if loss is not None:
                _take_back(before, _buffer_places(loss))

    def finish(self) -> None:
        """Nothing: the user's model has its new weights."""

    def close(self) -> None:
        """Give the user's model, optimizer and process back as they were made, with the new weights."""
        if self._loans is not None:
            self._loans.close()

    def state(self) -> StateTree:
        more: StateTree = {} if self._scaler is None else {"scaler": self._scaler.state_dict()}
        if self._low is not None and self._low.generator is not None:
            more["rounding"] = self._low.generator.get_state()
        with self._whole():
            return {"model": self.module.state_dict(), "optimizer": named_state(self.optimizer, self.module)} | more

    def boxes(self, name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        return None

    def load_state(self, tree: StateTree) -> None:
        with self._whole():
            self.module.load_state_dict(tree["model"])
            if "optimizer" in tree:  # not in weights that came from another program
                load_named_state(self.optimizer, self.module, tree["optimizer"])
        lay_out_state(self.optimizer)
        if self._low is not None and "rounding" in tree:
            self._low.load_generator(tree["rounding"])
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
        made = () if self._scaler is None else (self._scaler._scale, self._scaler._growth_tracker)
        return [tensor for tensor in made if tensor is not None]

    @torch.no_grad()
    def held_state(self) -> StateTree | None:
        """Parameters change at the end of a step only; buffers are taken back to its beginning if it was cut off."""
        if self._in_step and self._buffers_before is not None:
            _take_back(self._buffers_before, self._own_places())
        if self._loss is not None and self._loss_before is not None:  # the world broke in an evaluation
            _take_back(self._loss_before, _buffer_places(self._loss))
        return Replica.state(self)

    def _begin_step(self) -> None:
        """What a step that is cut off must be able to take back. Only where there is anybody to go on with."""
        self._in_step = True
        if self._session.can_regroup:
            places = self._own_places()
            before = self._buffers_before
            if before is not None and [id(place[2]) for place in places] == [id(kept.buffer) for kept in before]:
                for kept in before:
                    if kept.buffer is not None and kept.before is not None:
                        kept.before.copy_(kept.buffer)
            else:  # the first step, or a model that makes or replaces buffers as it goes
                self._buffers_before = _keep(places)

    def _own_places(self) -> list[_Place]:
        loss = self._loss
        return _buffer_places(self.module) + ([] if loss is None else _buffer_places(loss))

    def _forward(self, model: nn.Module, batch: Any) -> Outcome:
        if self._autocast is None:
            return self._task.run(model, batch)
        with self._autocast:
            return self._task.run(model, batch)

    def _backward(self, part: torch.Tensor) -> None:
        if self._scaler is None:
            part.backward()
        else:
            self._scaler.scale(part).backward()

    def _update(self, measure: bool) -> torch.Tensor | None:
        """Clip, step, and forget the gradients, which are those of the whole global batch; returns their norm."""
        if self._hooks_of_parameters is not None:
            self._hooks_of_parameters.call()
        norm = self._finish_gradients(measure)
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
        """What zero_grad does, without its profiling and grouping."""
        for parameter in self._with_gradients:
            parameter.grad = None

    def forget_step(self) -> None:
        self._in_step = False
        if self._low is not None:
            self._low.forget()
        self._forget_gradients()
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()  # where it stands within a step

    def parts(self) -> Mapping[str, Any]:
        given = {"loss": getattr(self._task, "loss_fn", None), "metrics": getattr(self._task, "metrics", None)}
        return {"model": self.module} | {name: part for name, part in given.items() if part is not None}

    def changing(self) -> list[torch.Tensor]:
        """Every tensor that a step changes."""
        held = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self._parameters, *(t for t in held if isinstance(t, torch.Tensor))]
        modules = [part for part in self.parts().values() if isinstance(part, nn.Module)]
        tensors += [buffer for module in modules for buffer in module.buffers()]
        if self._low is not None:
            tensors += self._low.tensors()
        return tensors + self._scaler_tensors()

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
        norms = torch._foreach_norm(gradients)
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None
