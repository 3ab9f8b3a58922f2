"""Sharded: no rank holds the whole state; FSDP2, ZeRO-1, tensor, context and pipeline parallelism, and 3D."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.core.protocol.failure import is_collateral
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.tensor_shard import Box
from distributed.runtime.torch_module_compat import found_overflows
from distributed.strategies.base import MetricSum, Outcome, StateTree, StepOutput, StepTask
from distributed.strategies.checks.elementwise import Cut, refuse_closure, refuse_step_hooks, refuse_uncuttable
from distributed.strategies.checks.forward_changes import ForwardChanges
from distributed.strategies.checks.replica_tensors import Named, optimizer_options
from distributed.strategies.checks.sharded_models import refuse_extra_state
from distributed.strategies.checks.sparse_layers import refuse_sparse
from distributed.strategies.data_parallel.whole_batch import NoWholeBatch, PartsOfBatch, WholeBatch
from distributed.strategies.data_parallel.zero1 import rebind
from distributed.strategies.mesh_step import MeshStep
from distributed.strategies.microbatches import Passed
from distributed.strategies.model.buffer_snapshot import kept_buffers
from distributed.strategies.pipeline.schedule import Pipeline, Run
from distributed.strategies.sharded_model import ShardedModel, check_model
from distributed.strategies.sharded_state import ShardedState
from distributed.strategies.speed.bf16_shards import RoundedShards


class Sharded(MeshStep):
    """The step of ranks that each hold a shard of the model or of its optimizer's state."""

    lockstep_eval = True
    _shards: ShardedModel
    _state: ShardedState
    _made: torch.optim.Optimizer  # made over the whole model, and now over this rank's shards
    _groups: list[list[str]]  # the names of its parameters, of the whole model

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._verifies = False  # whether the check of sharded sequences is still to be made
        self._is_weighted: bool | None = None  # whether the loss is a mean over other things than samples

    def check(self, task: StepTask) -> None:
        super().check(task)
        if isinstance(task.optimizer, torch.optim.Optimizer):
            _check_cuts(task.optimizer, self._plan)
        check_model(task.model, self._plan)

    def _refuse_sparse(self, module: nn.Module) -> None:
        refuse_sparse(module, "the state of the model is sharded", "sharded gradients are reduced as dense tensors")
        super()._refuse_sparse(module)

    def setup(self, task: StepTask, session: Session) -> None:
        super().setup(task, session)
        shards = self._shards
        self.owns_metrics = shards.owns_metrics
        self._data_groups = shards.groups.data_groups
        shards.set_stepped(self._parameters)
        self._verifies = shards.context is not None and not session.is_dry
        if self._plan.shard.kind == "optimizer":
            self._stepper = shards.share_optimizer(self.optimizer)
        self._state = shards.state_of(self.optimizer, self._groups, self._saved)
        if (group := shards.replicas) is not None and not session.is_dry:
            self._model = self._replicate(group=group)
            self._check_reduction()
            self._lay_out_state()

    def _prepare_model(self, task: StepTask) -> None:
        """Make the optimizer over the whole model, then replace its parameters by this rank's shards."""
        self._add_lora()
        refuse_extra_state(self.module)
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        made = super()._make_optimizer(task)
        refuse_closure(made)
        _check_cuts(made, self._plan)
        self._groups = [[names[id(parameter)] for parameter in group["params"]] for group in made.param_groups]
        self._use_float8()
        self._shards = shards = ShardedModel(self.module, self._plan, self._session)
        assert self._loans is not None
        self._loans.callback(shards.close)
        with shards.low.whole() if shards.low is not None else nullcontext():
            rebind(made, names, self.module, shards.layout)
        self._made = made
        task.move_loss_to(self._session.device)

    def _make_optimizer(self, task: StepTask) -> torch.optim.Optimizer:
        return self._made

    def _lower_parameters(self) -> RoundedShards | None:
        """The bf16 shards, if rounding is stochastic; fp32 shards are gathered in bf16 by FSDP itself."""
        return self._shards.low

    def _share_batch(self) -> WholeBatch | None:
        if self._shards.pipeline is not None:
            return NoWholeBatch(normalizes=self._normalizes) if self._ranks > 1 else PartsOfBatch()
        if self._session.world_size == 1 or self._ranks * self._plan.mesh.cp == 1:
            return None
        groups = [*self._shards.groups.data_groups, *filter(None, [self._shards.groups.group("cp")])]
        return WholeBatch(groups, self._plan.mesh.cp, normalizes=self._normalizes)

    def _watch_changes(self) -> ForwardChanges | None:
        if self._shards.is_fsdp and self._plan.memory.compile:  # the first step compiles the code of later ones
            return None
        groups, is_sharded = self._shards.groups.data_groups, self._shards.is_fsdp
        return ForwardChanges(self.module, groups, self._session, is_sharded=is_sharded)

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput:
        """One optimizer step over one or more micro-batches; `measure` adds metrics and the gradient's norm."""
        self._begin_step()
        self.clock.begin(measure)
        if self._verifies:
            self._verify(microbatches[0])
        if self._shards.pipeline is not None:
            return self._pipeline_step(self._shards.pipeline, microbatches, measure)
        if not self._is_settled and self._has_shares and self._has_fsdp and self._task.loss_fn is None:
            self._settle_before(microbatches[0])
        output = self._finish_step(self._pass_explained(microbatches, measure), measure)
        if measure:
            self.check_targets()
        return output

    def _verify(self, micro: Microbatch) -> None:
        """Check before the first step that the model allows sharded sequences."""
        assert self._shards.context is not None
        batch = self.moved(micro.batch)
        with kept_buffers(self._loss):
            self._shards.context.verify(lambda: self._forward(self.module, batch).loss)
        self._verifies = False

    def _settle_before(self, micro: Microbatch) -> None:
        """Settle a model's own loss before its first pass, since FSDP allows no trial between a pass and its backward.

        A model that has a loss only in training is settled by its first training pass, without a trial.
        """
        batch = self.moved(micro.batch)
        try:
            outcome = self._try(batch)
        except Exception as failed:  # the user's code, in a trial pass
            if is_collateral(failed):  # a peer is lost: no rank starts another collective
                raise
            return
        if outcome.is_own:
            self._is_settled = True
            self._task.settle(outcome, batch, micro.size, self._trial()._replace(run=self._try, is_joint=True))

    @property
    def _is_whole(self) -> bool:
        return self._shards.is_whole

    @property
    def _has_fsdp(self) -> bool:
        """Whether FSDP alone shards the model, so that each rank computes the whole outcome of its samples."""
        return self._shards.is_fsdp and not self._shards.is_cut

    @contextmanager
    def _special_scope(self, micro: Microbatch, synchronizes: bool) -> Iterator[None]:
        self._shards.synchronize(synchronizes)
        try:
            with super()._special_scope(micro, synchronizes):
                yield
        finally:
            self._shards.synchronize(True)

    def _finish_step(self, passed: Passed, measure: bool) -> StepOutput:
        if self._shards.tensor is not None:
            self._shards.tensor.check_streams(self._session.device)
        self._shards.finish_gradients()
        return super()._finish_step(passed, measure)

    def _finish_gradients(self, measure: bool) -> torch.Tensor | None:
        if self._scaler is not None:
            self._scaler.unscale_(self._stepper)
            self._agree_on_overflow(found_overflows(self._scaler, self._stepper))
        if self._clip_norm is not None:
            return self._shards.norm.clip(self._clip_norm)
        return self._shards.norm.norm() if measure else None

    def _agree_on_overflow(self, found: dict[Any, torch.Tensor]) -> None:
        """Agree on an overflow over all ranks, including ranks without gradients."""
        device = self._session.device
        worst = torch.zeros(1, device=device)
        for value in found.values():
            worst = torch.maximum(worst, value.to(device))
        self._session.max("overflow", worst)
        for where in list(found) or [device]:
            found[where] = worst.to(where)

    def _pipeline_step(self, pipeline: Pipeline, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        """Run the micro-batches through a pipeline, whose last stage has the loss."""
        losses: list[torch.Tensor | float] = []
        weights: list[torch.Tensor] = []
        metrics: dict[str, MetricSum] = {}  # of the whole batch, independent of its micro-batches

        def weigh(index: int, outcome: Outcome) -> torch.Tensor:
            part = self._part_of(microbatches[index], outcome)
            losses.append(self._value_of(part))
            if outcome.weight is not None:
                weights.append(outcome.weight.detach() * bool(microbatches[index].size))
            if measure and microbatches[index].size:
                for name, (total, weight) in self._task.measure(outcome, microbatches[index].size).items():
                    before = metrics.get(name, MetricSum(0.0, 0.0))
                    metrics[name] = MetricSum(before.total + total, before.weight + weight)
            return part if self._scaler is None else self._scaler.scale(part)

        device = self._session.device
        if not self._is_settled:
            self._settle_pipeline(pipeline, microbatches[0])
        if self._scaler is not None:
            self._scaler.scale(torch.zeros((), device=device))  # creates the scale on ranks without a loss
        batches = [self.moved(micro.batch) for micro in microbatches]
        watched = nullcontext() if self._changes is None else self._watched_changes()
        with watched, self._autocast or nullcontext(), self._whole_batch or nullcontext():
            pipeline.forward_backward(batches, self._task.run, weigh)
        self.clock.mark()
        if self._is_weighted is None:
            is_weighted = torch.tensor([int(bool(weights))], device=device)
            self._is_weighted = bool(self._session.max("whether the loss has weights", is_weighted).item())
        total = sum(weights, torch.zeros((), device=device)) if self._is_weighted else None
        if measure:
            self.check_targets()
        return self._finish_step(Passed(sum(losses, 0.0), total, metrics if measure else None), measure)

    def _settle_pipeline(self, pipeline: Pipeline, micro: Microbatch) -> None:
        """Settle the loss by one more pass, as in an evaluation, because only the last stage has an outcome."""
        batch = self.moved(micro.batch)
        devices = [self._session.device] if self._session.device.type == "cuda" else []
        self.train(False)
        with torch.random.fork_rng(devices=devices), torch.no_grad(), self._autocast or nullcontext():
            outcome = pipeline.forward(batch, self._task.run)
        self.train(True)
        torch.clear_autocast_cache()
        self._is_settled = True
        self._task.settle(outcome, batch, micro.size, self._trial())

    def eval_step(self, batch: Any, size: int) -> Mapping[str, MetricSum]:
        if self._shards.pipeline is None:
            found = super().eval_step(batch, size)
            return found if self.owns_metrics else {}
        outcome = self._through(self._shards.pipeline, batch, self._task.evaluate)
        return {} if outcome is None or not self.owns_metrics else self._measured(outcome, size)

    def predict_step(self, batch: Any) -> Any:
        if self._shards.pipeline is None:
            found = super().predict_step(batch)
            return found if self.owns_metrics else None

        def predict(model: nn.Module, moved: Any) -> Outcome:
            return Outcome(torch.zeros((), device=self._session.device), self._task.predict(model, moved), None)

        outcome = self._through(self._shards.pipeline, batch, predict)
        return outcome.outputs if outcome is not None and self.owns_metrics else None

    def _through(self, pipeline: Pipeline, batch: Any, run: Run) -> Outcome | None:
        """A batch without gradients; only the ranks of the last stage have the outcome."""
        with torch.no_grad(), self._autocast or nullcontext():
            return pipeline.forward(self.moved(batch), run)

    def state(self) -> StateTree:
        self._agree_on_buffers()
        self._shards.reshard()
        with self._whole():
            return self._state.state() | self._state_beside()

    def load_state(self, tree: StateTree) -> None:
        self._shards.reshard()
        with self._whole():
            self._state.load(tree)
        self._load_state_beside(tree)

    def shard_ranges(self, name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        return self._state.boxes(name, shape)

    def replicated(self) -> Named:
        self._shards.reshard()  # evaluation leaves some parameters gathered
        with self._whole():
            found = list(self._state.local(self._replicas))
        yield from found
        yield from optimizer_options(self.optimizer)
        yield from self._loss_scale()

    def held_state(self) -> StateTree | None:
        """None: this rank holds only shards of the state."""
        return None


def _check_cuts(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuse an optimizer whose step on shards differs from that on the whole."""
    mesh, shard = plan.mesh, plan.shard
    cuts: dict[str, tuple[Cut, ...]] = {
        f"pipeline_parallel={mesh.pp}": ("parameters",) if mesh.pp > 1 else (),
        "zero_stage=1": ("parameters",) if shard.kind == "optimizer" and mesh.dp_replicate > 1 else (),
        "sharded parameters (FSDP)": ("rows",) if shard.is_fsdp and (mesh.dp_shard > 1 or shard.cpu_offload) else (),
        f"tensor_parallel={mesh.tp}": ("rows", "columns") if mesh.tp > 1 else (),
    }
    for setting, wanted in cuts.items():
        refuse_uncuttable(optimizer, wanted, setting)
    if mesh.tp > 1 or mesh.pp > 1:  # FSDP's shards are DTensors, and ZeRO-1 calls hooks with whole parameters
        refuse_step_hooks(optimizer, f"tensor_parallel={mesh.tp}" if mesh.tp > 1 else f"pipeline_parallel={mesh.pp}")
    if type(optimizer) is torch.optim.Rprop and shard.is_fsdp:
        raise TaskError(
            "Rprop cannot be trained with sharded parameters (FSDP)",
            why="torch's Rprop uses boolean masks, which sharded tensors do not support",
            do="use another optimizer, or backend='pytorch-ddp'",
        )
