"""TorchMesh: PyTorch-native parallelism as sizes of one mesh: DDP, FSDP2, ZeRO-1, tensor, context, pipeline, 3D."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.data.loader import Microbatch
from distributed.data.transfer import to_device
from distributed.runtime.portions import Box
from distributed.runtime.session import Session
from distributed.strategies.base import MetricSum, NonFiniteLoss, Outcome, StateTree, StepOutput, StepTask
from distributed.strategies.elementwise import Cut, refuse_closure, refuse_uncuttable
from distributed.strategies.forward_changes import ForwardChanges
from distributed.strategies.gradient_sums import local
from distributed.strategies.in_parts import refuse_extra_state
from distributed.strategies.memory_format import lay_out_state
from distributed.strategies.parameter_hooks import ParameterHooks
from distributed.strategies.passes import Passed, Passes
from distributed.strategies.reduction_check import explain, reduction_check
from distributed.strategies.replica_tensors import Named, optimizer_options
from distributed.strategies.replicated import buffers_can_differ, own_buffers, replicate
from distributed.strategies.sparse_gradients import refuse_sparse
from distributed.strategies.whole_batch import NoWholeBatch, WholeBatch

if TYPE_CHECKING:
    from distributed.strategies.parts import Parts
    from distributed.strategies.pipeline import Pipeline


class TorchMesh(Passes):
    """Forward, backward, reduction, clipping and the optimizer, with no host synchronization in between on a GPU.

    Where every rank holds the whole model, this is DDP. Where not, `Parts` has made it ready for the mesh.
    """

    def __init__(self) -> None:
        self._restore_blocks: Callable[[], None] = lambda: None
        self._restore_layers: Callable[[], None] = lambda: None
        self._parts: Parts | None = None
        self._verifies = False
        self._is_weighted: bool | None = None  # whether the loss is a mean over something else than samples

    @staticmethod
    def check(task: StepTask, plan: Plan) -> None:
        Passes.check(task, plan)
        _check_sparse(task.model, plan)
        if isinstance(task.optimizer, torch.optim.Optimizer):
            _check_cuts(task.optimizer, plan)
        if not plan.is_replicated:
            from distributed.strategies.parts import check_model  # takes long to import

            check_model(task.model, plan)
        if plan.precision.kind == "fp8":
            from distributed.strategies.float8 import need_float8_layers

            need_float8_layers(task.model)

    def setup(self, task: StepTask, plan: Plan, session: Session) -> None:
        _check_sparse(task.model, plan)
        super().setup(task, plan, session)
        self._ranks = plan.mesh.data_ranks
        self._normalizes = plan.replicate.sync_batchnorm and session.world_size > 1
        self._buffers_at_first: list[torch.Tensor] | None = None
        self._buffers_differ = self._ranks > 1 and buffers_can_differ(self.module, self._normalizes)
        self._whole_batch = self._share_batch(plan, session)
        if session.world_size > 1:
            self._hooks_of_parameters = ParameterHooks(self.module.parameters())
            assert self._loans is not None
            self._loans.callback(self._hooks_of_parameters.close)
        self._changes = self._watch_changes(plan, session)
        if self._parts is None:
            self.counts, self.in_step = True, False
            if self._ranks > 1 and not session.is_dry:
                self._model = self._replicate(plan, session)
        else:
            self.counts, self.in_step = self._parts.counts, True
            self._data_groups = self._parts.groups.data_groups
            self._parts.set_stepped(self._parameters)
            self._verifies = self._parts.context is not None and not session.is_dry
            if plan.shard.kind == "optimizer":
                self._stepper = self._parts.share_optimizer(self.optimizer)
            self._state = self._parts.state_of(self.optimizer, self._groups, self._saved)
            if (group := self._parts.replicas) is not None and not session.is_dry:
                self._model = replicate(self.module, plan.replicate, session.device, self._buffers_differ, group)
        if isinstance(self._model, DistributedDataParallel):
            self._check_reduced = reduction_check(self._model, session.rank)
            lay_out_state(self.optimizer)  # for DDP the parameters may have been laid out anew

    def _share_batch(self, plan: Plan, session: Session) -> WholeBatch | None:
        """What gives functions of a whole micro-batch the samples of all ranks; None where each rank has them all."""
        if session.world_size == 1 or self._ranks * plan.mesh.cp == 1:
            return None
        if self._parts is None:
            return WholeBatch(normalizes=self._normalizes)
        if self._parts.pipeline is not None:
            return NoWholeBatch(normalizes=self._normalizes) if self._ranks > 1 else None
        groups = [*self._parts.groups.data_groups, *filter(None, [self._parts.groups.group("cp")])]
        return WholeBatch(groups, plan.mesh.cp, normalizes=self._normalizes)

    def _watch_changes(self, plan: Plan, session: Session) -> ForwardChanges | None:
        if session.world_size == 1 or session.is_dry:
            return None
        if self._parts is None:
            return ForwardChanges(self.module, (None,), is_sharded=False)
        if self._parts.is_fsdp and plan.memory.compile:  # what is compiled in a first step is what later ones run
            return None
        return ForwardChanges(self.module, self._parts.groups.data_groups, is_sharded=self._parts.is_fsdp)

    def _replicate(self, plan: Plan, session: Session) -> nn.Module:
        """What training calls in the model's place, where ranks hold the whole of it and add up their gradients."""
        return replicate(self.module, plan.replicate, session.device, self._buffers_differ)

    def _prepare_model(self, task: StepTask, plan: Plan, session: Session) -> None:
        """Most of what this may need takes long to import, and is imported only when it is needed."""
        lora = plan.memory.lora
        self._saved: set[str] | None = None
        if lora is not None:
            from distributed.strategies.lora import ensure_lora

            self._saved = ensure_lora(self.module, lora, plan.seed)
        if plan.is_replicated:
            self._make_whole(plan, session)
            task.move_to(session.device)
        else:
            self._parts, self._made, self._groups = self._cut(task, plan, session)
            task.move_loss_to(session.device)

    def _cut(
        self, task: StepTask, plan: Plan, session: Session
    ) -> tuple[Parts, torch.optim.Optimizer, list[list[str]]]:
        """The model in parts; an optimizer that was made over the whole of it and now has what is left; its groups."""
        from distributed.strategies.parts import Parts
        from distributed.strategies.sharded_optimizer import rebind

        refuse_extra_state(self.module)
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        made = super()._make_optimizer(task, plan)
        refuse_closure(made)
        _check_cuts(made, plan)
        groups = [[names[id(parameter)] for parameter in group["params"]] for group in made.param_groups]
        parts = Parts(self.module, plan, session)
        rebind(made, names, self.module, parts.layout)
        return parts, made, groups

    def _make_whole(self, plan: Plan, session: Session) -> None:
        """A model that is held whole: its memory, if it has none yet, and what is done to its blocks."""
        if any(tensor.is_meta for tensor in (*self.module.parameters(), *self.module.buffers())):
            from distributed.strategies.parts import make

            make(self.module, plan, session)
        if plan.precision.kind == "fp8":
            from distributed.strategies.float8 import use_float8

            layers, self._restore_layers = use_float8(self.module)
            self.notes.append(layers.note())
        if plan.memory.recompute or plan.memory.compile:
            from distributed.strategies.parts import prepare_blocks

            self._restore_blocks = prepare_blocks(self.module, plan)

    def _make_optimizer(self, task: StepTask, plan: Plan) -> torch.optim.Optimizer:
        return self._made if self._parts is not None else super()._make_optimizer(task, plan)

    def train_step(self, microbatches: Sequence[Microbatch], *, measure: bool = False) -> StepOutput:
        """One optimizer step over one or more micro-batches; `measure` adds metrics and the gradient's norm."""
        self._begin_step()
        self.clock.begin(measure)
        if self._verifies:
            self._verify(microbatches[0])
        if self._parts is not None and self._parts.pipeline is not None:
            return self._pipeline_step(self._parts.pipeline, microbatches, measure)
        output = self.step(microbatches, measure)
        if measure:
            self.check_targets()
        return output

    def step(self, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        """The step itself, on a GPU without a wait for anything: it can be captured as one CUDA graph."""
        try:
            passed = self._pass_all(microbatches, measure)
        except RuntimeError as error:
            explain(error, self._session.rank)
            raise
        return self._finish_step(passed, measure)

    def _verify(self, micro: Microbatch) -> None:
        """Before the first step over parts of sequences: that the model allows it."""
        assert self._parts is not None
        assert self._parts.context is not None
        batch = to_device(micro.batch, self._session.device) if self._moves else micro.batch
        with self._loss_kept():
            self._parts.context.verify(lambda: self._forward(self.module, batch).loss)
        self._verifies = False

    def _finish_step(self, passed: Passed, measure: bool) -> StepOutput:
        loss = passed.loss
        if self._parts is not None:
            if self._parts.tensor is not None:
                self._parts.tensor.check_streams(self._session.device)
            self._parts.finish_gradients()
        if self._low is not None:
            self._low.take_gradients()
        if passed.weight is not None:
            factor = self._divide_gradients(passed.weight)
            loss = loss * (factor if self._moves else factor.item())
            if self._checks_loss and not math.isfinite(loss):  # a mean over no target at all
                raise NonFiniteLoss(float(loss))
        return StepOutput(loss, self._update(measure), passed.metrics)

    def _pipeline_step(self, pipeline: Pipeline, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        """The same over a pipeline: the rank of the last stage knows the loss."""
        losses: list[torch.Tensor | float] = []
        weights: list[torch.Tensor] = []
        metrics: dict[str, MetricSum] = {}  # of the whole batch: that it was cut for the stages must not show

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
            self._scaler.scale(torch.zeros((), device=device))  # which makes the scale, also where there is no loss
        batches = [to_device(micro.batch, device) if self._moves else micro.batch for micro in microbatches]
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
        """Only the last stage has an outcome, and only of a whole pass: of one more, as an evaluation has it."""
        batch = to_device(micro.batch, self._session.device) if self._moves else micro.batch
        devices = [self._session.device] if self._session.device.type == "cuda" else []
        self.train(False)
        with torch.random.fork_rng(devices=devices), torch.no_grad(), self._autocast or nullcontext():
            outcome = pipeline.forward(batch, self._task.run)
        self.train(True)
        torch.clear_autocast_cache()
        self._is_settled = True
        self._task.settle(outcome, batch, micro.size, self._trial())

    @property
    def _is_whole(self) -> bool:
        return self._parts is None

    def eval_step(self, batch: Any, size: int) -> Mapping[str, MetricSum]:
        if self._parts is None or self._parts.pipeline is None:
            found = super().eval_step(batch, size)
            return found if self.counts else {}
        moved = to_device(batch, self._session.device) if self._moves else batch
        with torch.no_grad(), self._autocast or nullcontext():
            outcome = self._parts.pipeline.forward(moved, self._task.run)
        return {} if outcome is None or not self.counts else self._measured(outcome, size)

    def state(self) -> StateTree:
        self._agree_on_buffers()
        if self._parts is not None:
            self._parts.reshard()
            scaler = {} if self._scaler is None else {"scaler": self._scaler.state_dict()}
            return self._state.state() | scaler
        found = super().state()
        if self._saved is not None:
            found["model"] = {name: value for name, value in found["model"].items() if name in self._saved}
        return found

    def boxes(self, name: str, shape: tuple[int, ...]) -> tuple[Box, ...] | None:
        return None if self._parts is None else self._state.boxes(name, shape)

    def load_state(self, tree: StateTree) -> None:
        if self._parts is None:
            with self._whole():
                whole = self.module.state_dict() if self._saved is not None else {}
                super().load_state(tree | {"model": whole | tree["model"]})
            return
        self._parts.reshard()
        self._state.load(tree)
        if self._scaler is not None and "scaler" in tree:
            self._scaler.load_state_dict(tree["scaler"])

    def replicated(self) -> Named:
        if self._parts is None:
            yield from super().replicated()
            return
        self._parts.reshard()  # evaluation leaves some parameters whole
        yield from self._state.local(self._replicas)
        yield from optimizer_options(self.optimizer)
        yield from self._loss_scale()

    def held_state(self) -> StateTree | None:
        """Where ranks may have different buffers, only rank 0 has those that count, unless nothing changes them."""
        if self._parts is not None:
            return None
        held = super().held_state()
        if not self._buffers_differ or self._session.is_main:
            return held
        if self._buffers_at_first is None:  # before the first step of a world all ranks have the same
            return held
        now, first = self._own_buffers(), self._buffers_at_first
        return held if len(now) == len(first) and all(map(torch.equal, now, first)) else None

    def _begin_step(self) -> None:
        super()._begin_step()
        if self._buffers_differ and self._buffers_at_first is None and self._parts is None:
            self._buffers_at_first = [buffer.detach().clone() for buffer in self._own_buffers()]

    def _own_buffers(self) -> list[torch.Tensor]:
        """Those that may differ between ranks."""
        return list(own_buffers(self.module, self._normalizes))

    def close(self) -> None:
        """Give the user's model back as it was made, with its new weights; what was cut stays cut."""
        try:
            self._restore_blocks()
            self._restore_layers()
            if self._parts is not None:
                self._parts.close()
        finally:
            super().close()

    @contextmanager
    def _special_scope(self, micro: Microbatch, synchronizes: bool) -> Iterator[None]:
        """Around a micro-batch: only the last reduces gradients, and a stand-in leaves no trace in BatchNorm."""
        holds = not synchronizes and isinstance(self._model, DistributedDataParallel)
        if holds and self._model.static_graph:  # learnt in a first pass that reduces, and no other pass may differ
            holds = False
        if self._parts is not None:
            self._parts.synchronize(synchronizes)
        try:
            with super()._special_scope(micro, synchronizes), self._model.no_sync() if holds else nullcontext():  # type: ignore[operator]
                yield
        finally:
            if self._parts is not None:
                self._parts.synchronize(True)

    def _divide_gradients(self, total_weight: torch.Tensor) -> torch.Tensor:
        """Divide by the weight of the whole global batch, which is known only now; returns the factor."""
        counted = total_weight.detach().double() * self.counts
        factor = self._unit / self._session.sum("loss weight", counted)
        grads = [local(p.grad) for p in self._parameters if p.grad is not None]
        if grads:  # a stage may have nothing to train
            torch._foreach_mul_(grads, factor.to(grads[0].device))  # which are elsewhere if they are offloaded
        return factor

    def _finish_gradients(self, measure: bool) -> torch.Tensor | None:
        if self._parts is None:
            return super()._finish_gradients(measure)
        if self._scaler is not None:
            self._scaler.unscale_(self._stepper)
            self._agree_on_overflow(self._scaler._found_inf_per_device(self._stepper))
        if self._clip_norm is not None:
            return self._parts.norm.clip(self._clip_norm)
        return self._parts.norm.norm() if measure else None

    def _agree_on_overflow(self, found: dict[Any, torch.Tensor]) -> None:
        """One rank's overflow is everybody's, also of one that has no gradients to look at."""
        device = self._session.device
        worst = torch.zeros(1, device=device)
        for value in found.values():
            worst = torch.maximum(worst, value.to(device))
        self._session.max("overflow", worst)
        for where in list(found) or [device]:
            found[where] = worst.to(where)


def _check_sparse(module: nn.Module, plan: Plan) -> None:
    """Where gradients of embeddings with sparse=True cannot be summed, measured or stepped."""
    if not plan.is_replicated:
        refuse_sparse(module, "the state of the model is shared out", "what ranks share out and sum is dense")
    if plan.strategy == "horovod":
        refuse_sparse(module, "backend='horovod'", "this engine sends dense gradients")
    if plan.world_size > 1 and plan.collectives == "nccl":
        refuse_sparse(module, "the ranks' collectives are NCCL's", "NCCL has no sum of sparse tensors")
    if plan.world_size > 1 and plan.speed.parameters != "fp32":
        refuse_sparse(module, "bf16_parameters", "sparse gradients in bf16 cannot be summed over ranks")


def _check_cuts(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Whether it comes to the same where each rank lets it see what is there only."""
    mesh, shard = plan.mesh, plan.shard
    cuts: dict[str, tuple[Cut, ...]] = {
        f"pipeline_parallel={mesh.pp}": ("parameters",) if mesh.pp > 1 else (),
        "zero_stage=1": ("parameters",) if shard.kind == "optimizer" and mesh.dp_replicate > 1 else (),
        "sharded parameters (FSDP)": ("rows",) if shard.is_fsdp and (mesh.dp_shard > 1 or shard.cpu_offload) else (),
        f"tensor_parallel={mesh.tp}": ("rows", "columns") if mesh.tp > 1 else (),
    }
    for setting, wanted in cuts.items():
        refuse_uncuttable(optimizer, wanted, setting)
    if type(optimizer) is torch.optim.Rprop and shard.is_fsdp:
        raise TaskError(
            "Rprop cannot be trained with sharded parameters (FSDP)",
            why="torch's Rprop steps through masks, which tensors that the ranks hold in parts do not have",
            do="use another optimizer, or backend='pytorch-ddp'",
        )
