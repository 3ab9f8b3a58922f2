"""DeepSpeedEngine: DeepSpeed behind the seam of a step, with our micro-batches, weights, schedule and state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.data.loading.loader import Microbatch
from distributed.engines.deepspeed import ops as deepspeed_ops
from distributed.engines.deepspeed.checks import check_optimizer, check_task, check_values
from distributed.engines.deepspeed.flats import keep_unaligned_gradients, share_masters
from distributed.engines.deepspeed.ownership import BorrowedModel
from distributed.engines.deepspeed.process import (
    complete,
    deepspeed_environ,
    device_index,
    files_on_disk,
    linear_kept,
    process_group,
)
from distributed.engines.deepspeed.state import ZeroState
from distributed.engines.deepspeed.unused_parameters import UseCheck
from distributed.runtime.session import Session
from distributed.runtime.tensor_shard import Box
from distributed.strategies.base import (
    LOW_PRECISION,
    ModelCopy,
    NonFiniteLoss,
    Outcome,
    StateTree,
    StepOutput,
    StepTask,
)
from distributed.strategies.checks.forward_changes import ForwardChanges
from distributed.strategies.checks.layers import check_layers
from distributed.strategies.checks.parameter_use import OwnUse
from distributed.strategies.checks.replica_tensors import Named, model_tensors, optimizer_options
from distributed.strategies.checks.stepping import check_made, check_stepping
from distributed.strategies.compute_clock import ComputeClock
from distributed.strategies.data_parallel.ddp import buffers_can_differ
from distributed.strategies.data_parallel.whole_batch import WholeBatch
from distributed.strategies.model.casting import cast_calls
from distributed.strategies.model.copies import is_unwanted
from distributed.strategies.model.optimizer_state import named_state
from distributed.strategies.steps.microbatches import MicrobatchStep
from distributed.strategies.steps.one_rank_step import has_shares


class DeepSpeedEngine(MicrobatchStep):
    """ZeRO-1, -2 and -3; forward and backward are DeepSpeed's, and so is the step."""

    _model: Any

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._engine: Any = None
        self._state: ZeroState | None = None

    def check(self, task: StepTask) -> None:
        plan = self._plan
        check_layers(task.model, plan)
        check_task(task, plan)
        check_stepping(task, plan)
        if plan.engine["source"]:  # what we have written ourselves needs no look, and DeepSpeed takes long to import
            check_values(plan)
        deepspeed_ops.check_ops(deepspeed_ops.needed_ops(plan.engine["config"]))

    def setup(self, task: StepTask, session: Session) -> None:
        plan = self._plan
        check_layers(task.model, plan)
        check_task(task, plan)
        check_stepping(task, plan)
        self._task, self._loss, self._session, self.decisions = task, task.loss_module, session, []
        self._run = self._run_own_step if task.has_own_step else task.run
        self._replicas = plan.replicate
        self._is_settled = session.is_dry
        self.clock = ComputeClock(session.device)
        self._moves = session.device.type != "cpu"
        self._checks_loss = plan.on_nan == "stop" and (plan.detect_anomaly or not self._moves)
        self._ranks = plan.mesh.data_ranks
        self._keeps_small = plan.precision.kind == "fp16"
        self._autocast, self._scaler = None, None
        self._has_shares = has_shares(plan)
        self.module = task.model
        self._keep_modes()
        config = complete(plan)
        # At stage 3 every forward pass gathers parameters from all ranks.
        self.lockstep_eval = config["zero_optimization"]["stage"] == 3
        saved = self._prepare(task, plan, session)
        self._until_closed.enter_context(files_on_disk(config, session))
        self._until_closed.enter_context(process_group(session.device.type))
        self._until_closed.enter_context(linear_kept())
        self._until_closed.enter_context(deepspeed_environ(session.device.type, device_index(session)))
        self._buffers_differ = self._ranks > 1 and buffers_can_differ(self.module, self._normalizes)
        self._agree_on_buffers()
        dtype = LOW_PRECISION.get(plan.precision.kind)
        self._rounds = dtype is not None
        whole = self._whole_values() if self._rounds else {}
        if plan.engine["source"]:
            check_values(plan, device_index(session))
        optimizer, groups, earlier = self._take_optimizer(task, plan, config)
        self._borrowed.return_values(whole)
        self._engine = self._model = self._start(config, optimizer, session)
        self._borrowed.lend_to(self._engine)
        self._zero = self._engine.optimizer
        share_masters(self._zero)
        keep_unaligned_gradients(self._zero)
        use = UseCheck(self._engine, dict(self.module.named_parameters()), session)
        self.optimizer = self._zero.optimizer
        if optimizer is not None and self.optimizer is not optimizer:
            _follow(self.optimizer, optimizer)
        self._state = ZeroState(
            self.module,
            self._zero,
            saved=saved,
            groups=groups,
            whole=whole,
            unused=use.unused,
            is_alone=session.world_size == 1,
        )
        for index, (options, _) in enumerate(self._borrowed.groups):
            self._state.keep_options(index, options)
        if whole or earlier is not None:
            begun = {"model": whole} | ({} if earlier is None else {"optimizer": earlier})
            self._state.load(begun, is_partial=True)
        if dtype is not None:
            self._until_closed.callback(cast_calls(self.module, dtype))
            self._autocast = torch.autocast(session.device.type, dtype)  # for buffers that have stayed in fp32
        if self.lockstep_eval and task.own_code():
            self._own_use = OwnUse(self.module, _is_part, "zero_stage=3")
        self._borrowed.begin()
        self._engine.set_gradient_accumulation_boundary(True)

    def _prepare(self, task: StepTask, plan: Plan, session: Session) -> list[str]:
        """What is done to a model before any engine sees it; returns the names of what is saved of it."""
        alone: set[str] | None = None
        if plan.memory.lora is not None:
            from distributed.strategies.model.lora import ensure_lora  # an extra

            alone = ensure_lora(self.module, plan.memory.lora, plan.seed)
        if plan.memory.recompute:
            from distributed.strategies.model.preparation import prepare_blocks  # takes long to import

            self._until_closed.callback(prepare_blocks(self.module, plan))
        if session.world_size > 1:
            self._normalizes = plan.replicate.sync_batchnorm
            self._whole_batch = WholeBatch(normalizes=self._normalizes)
            if not self.lockstep_eval:  # or DeepSpeed puts other values into parameters itself
                self._changes = ForwardChanges(self.module, (None,), session, is_sharded=True)
        task.move_to(session.device)
        for parameter in self.module.parameters():  # DeepSpeed sends them as they lie in memory
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        return [name for name in self.module.state_dict() if alone is None or name in alone]

    def _start(self, config: dict[str, Any], optimizer: torch.optim.Optimizer | None, session: Session) -> Any:
        device = session.device.type
        deepspeed = deepspeed_ops.import_deepspeed(device)
        deepspeed_ops.load_ops(deepspeed_ops.needed_ops(config))
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=self.module,
            optimizer=optimizer,
            model_parameters=trained if optimizer is None else None,
            config=config,
            dist_init_required=False,
        )
        return engine

    def _whole_values(self) -> dict[str, torch.Tensor]:
        """Rank 0's parameters before DeepSpeed makes them less precise, which is what its masters would begin with."""
        found = {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}
        for name, value in found.items():
            self._session.send_from(f"values of {name}", 0, value)
        return found

    def _take_optimizer(
        self, task: StepTask, plan: Plan, config: Mapping[str, Any]
    ) -> tuple[torch.optim.Optimizer | None, list[list[str]], StateTree | None]:
        """The optimizer, unless DeepSpeed makes it; the names of the parameters in each group; its state so far."""
        if "optimizer" in config:
            self._lend(None)
            return None, [[name for name, parameter in self.module.named_parameters() if parameter.requires_grad]], None
        made = task.make_optimizer(self.module, plan)
        check_made(made, plan, is_manual=task.is_manual)
        check_optimizer(made)
        self._lend(made)
        state = named_state(made, self.module)
        groups = [group["params"] for group in state["param_groups"]]
        made.state.clear()  # of the parameters; DeepSpeed's own tensors will have it
        for group in made.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
        return made, groups, state if state["state"] else None

    def _lend(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._borrowed = BorrowedModel(self.module, optimizer)
        self._until_closed.callback(self._borrowed.take_back)

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput:
        """One optimizer step over one or more micro-batches; `measure` adds metrics and the gradient's norm."""
        self.clock.begin(measure)
        loss, weight, metrics = self._pass_all(microbatches, measure)
        if measure:
            self.check_targets()
        if weight is None:
            self._engine.step()
        else:
            loss = loss * self._weighted_step(weight)
        return StepOutput(loss, self._norm() if measure else None, metrics)

    @property
    def _is_whole(self) -> bool:
        return False

    def _run_own_step(self, model: nn.Module, batch: Any) -> Outcome:
        """A step of the user's own gets the user's model, in which DeepSpeed has its hooks."""
        return self._task.run(self.module, batch)

    def _backward(self, part: torch.Tensor) -> None:
        self._engine.backward(part, scale_wrt_gas=False)

    @contextmanager
    def _special_scope(self, micro: Microbatch, synchronizes: bool) -> Iterator[None]:
        """Where a step ends is ours to say: DeepSpeed would count micro-batches, of which there may be fewer."""
        self._engine.set_gradient_accumulation_boundary(synchronizes)
        try:
            with super()._special_scope(micro, synchronizes):
                yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def _weighted_step(self, total_weight: torch.Tensor) -> float:
        """A step by gradients that are still to be divided by the weight of the whole global batch.

        DeepSpeed divides them by the scale of the loss before it clips them and takes their norm; the weight is made a
        part of that scale. Returns what the loss is to be multiplied by.
        """
        total = self._session.sum("loss weight", total_weight.detach().double()).item() / self._unit
        if not total:
            raise NonFiniteLoss(math.nan)
        zero = self._zero
        custom, external = zero.custom_loss_scaler, zero.external_loss_scale
        zero.external_loss_scale, zero.custom_loss_scaler = zero.loss_scale * total, True
        try:
            self._engine.step()
        finally:
            zero.custom_loss_scaler, zero.external_loss_scale = custom, external
        return 1.0 / total

    def _norm(self) -> torch.Tensor | None:
        norm = self._engine.get_global_grad_norm()
        return norm if norm is None or isinstance(norm, torch.Tensor) else torch.tensor(norm)

    def parameters_changed(self) -> None:
        raise TaskError(
            "a callback freezes or unfreezes parameters, with backend='deepspeed'",
            why="DeepSpeed lays out the parameters that are trained in flat tensors when it begins",
            do="use backend='pytorch-ddp' or 'fsdp'",
        )

    @contextmanager
    def weights(self, *, changes: bool = False) -> Iterator[ModelCopy]:
        """Of parameters, this rank's ranges of the fp32 values that are stepped."""
        assert self._state is not None
        with torch.no_grad(), self._state.opened(changes) as found:
            yield found

    def _copy_state(self, tensors: ModelCopy) -> StateTree:
        assert self._state is not None
        return self._state.copy_state(tensors)

    def _load_copy(self, saved: StateTree) -> ModelCopy:
        assert self._state is not None
        with self.weights() as live:
            return self._state.load_copy(saved, live)

    def state(self) -> StateTree:
        assert self._state is not None
        self._agree_on_buffers()
        scaler = {"scaler": _scaler_state(self._zero)} if self._zero.dynamic_loss_scale else {}
        return self._state.state() | scaler | self._state_of_copies()

    def shard_ranges(self, name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        assert self._state is not None
        return () if is_unwanted(name, self.copies) else self._state.boxes(name, shape)

    def load_state(self, tree: StateTree) -> None:
        assert self._state is not None
        self._state.load(tree)
        if self._zero.dynamic_loss_scale and "scaler" in tree:
            _load_scaler(self._zero, tree["scaler"])
        self._load_copies(tree)

    def replicated(self) -> Named:
        """Not the optimizer's state, which ZeRO has cut into ranges; of parameters, those that are whole here."""
        yield from model_tensors(self.module, self._replicas)
        yield from optimizer_options(self.optimizer)

    def held_state(self) -> StateTree | None:
        return None

    def finish(self) -> None:
        """Bring the master values together, where the model here has a part of them, or less precise ones."""
        if self._state is not None and (self.lockstep_eval or self._rounds):
            device, add = self._session.device, self._session.sum
            self._borrowed.return_values(self._state.whole_values(lambda name, part: add(name, part.to(device))))

    def close(self) -> None:
        """Give the user's model back as it was made, with its new weights, where this rank has all of them.

        After a failure other ranks may be gone, so nothing is gathered: what is sharded stays so, and is marked.
        """
        try:
            if self._state is not None and self._session.world_size == 1:
                self.finish()
                self._borrowed.return_state(self._state.state()["optimizer"])
        finally:
            self._engine = self._model = self._state = None
            self._until_closed.close()


def _is_part(parameter: Any) -> bool:
    """Whether ZeRO-3 holds a range of it here, which it gathers while a layer computes."""
    return int(getattr(parameter, "ds_numel", parameter.numel())) != parameter.numel()


def _scaler_state(zero: Any) -> dict[str, Any]:
    """As torch's own scaler has it."""
    scaler = zero.loss_scaler
    return {
        "scale": float(scaler.cur_scale),
        "growth_factor": float(scaler.scale_factor),
        "backoff_factor": 1.0 / scaler.scale_factor,
        "growth_interval": scaler.scale_window,
        "_growth_tracker": (scaler.cur_iter - scaler.last_overflow_iter - 1) % scaler.scale_window,
    }


def _load_scaler(zero: Any, state: Mapping[str, Any]) -> None:
    scaler = zero.loss_scaler
    scaler.cur_scale = state["scale"]
    scaler.last_overflow_iter = scaler.cur_iter - state["_growth_tracker"] - 1


def _follow(made: torch.optim.Optimizer, given: torch.optim.Optimizer) -> None:
    """Where DeepSpeed replaces an optimizer (Adagrad): a scheduler that was made for the given one sets its rates."""
    for new, old in zip(made.param_groups, given.param_groups, strict=True):
        new.update({key: value for key, value in old.items() if key not in ("params", "param_names")})
    given.param_groups = made.param_groups
