"""Sharded: no rank holds the whole state; FSDP2, ZeRO-1, tensor and context parallelism, and their products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distributed.core.errors import TaskError
from distributed.core.plan import Plan
from distributed.core.protocol.failure import is_collateral
from distributed.data.loading.loader import Microbatch
from distributed.runtime.session import Session
from distributed.runtime.tensor_shard import Box
from distributed.runtime.torch_compat import tree_flatten
from distributed.runtime.torch_module_compat import found_overflows
from distributed.strategies.base import (
    LossTrial,
    MetricSum,
    ModelCopy,
    Outcome,
    StateTree,
    StepOutput,
    StepTask,
)
from distributed.strategies.checks.forward_changes import ForwardChanges
from distributed.strategies.checks.parameter_use import OwnUse
from distributed.strategies.checks.replica_tensors import Named, optimizer_options, shared_names
from distributed.strategies.checks.sharded_models import check_cuts, refuse_extra_state
from distributed.strategies.checks.sparse_layers import refuse_sparse
from distributed.strategies.checks.stepping import check_made
from distributed.strategies.data_parallel.ddp import StepModule
from distributed.strategies.data_parallel.fsdp import computed_dtype
from distributed.strategies.data_parallel.shard_sums import needs_shard_sums
from distributed.strategies.data_parallel.whole_batch import WholeBatch
from distributed.strategies.data_parallel.zero1 import rebind
from distributed.strategies.joint_optimizer import members_of
from distributed.strategies.model.buffer_snapshot import kept_buffers
from distributed.strategies.model.casting import cast_calls
from distributed.strategies.model.copies import copied_names, copy_tensors, is_unwanted
from distributed.strategies.sharded_model import ShardedModel, check_model
from distributed.strategies.sharded_state import ShardedState
from distributed.strategies.speed.bf16_shards import RoundedShards
from distributed.strategies.steps.mesh_step import MeshStep
from distributed.strategies.steps.microbatches import Passed
from distributed.strategies.steps.phases import OptimizerPhase

T = TypeVar("T")


class Sharded(MeshStep):
    """The step of ranks that each hold a shard of the model or of its optimizer's state."""

    lockstep_eval = True
    _is_cut = True
    _shards: ShardedModel
    _state: ShardedState
    _made: torch.optim.Optimizer  # made over the whole model, and now over this rank's shards
    _groups: list[list[str]]  # the names of its parameters, of the whole model
    _copied: set[str]  # the names that a copy of the whole model has
    _root: StepModule | None = None  # FSDP's root, if that is a whole step of the user's own

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._verifies = False  # whether the check of sharded sequences is still to be made

    def check(self, task: StepTask) -> None:
        super().check(task)
        if isinstance(task.optimizer, torch.optim.Optimizer):
            check_cuts(task.optimizer, self._plan)
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
        if task.own_code() and not session.is_dry:
            self._own_use = self._watch_own_use()
        if self._phases:
            self._ready_for_phases()
        self._verifies = shards.context is not None and not session.is_dry
        for member in members_of(self.optimizer):
            if needs_shard_sums(member):
                self._sum_over_shards(member)
        if self._plan.shard.kind == "optimizer":
            self._stepper = shards.share_optimizer(self.optimizer)
        self._state = shards.state_of(self.optimizer, self._groups, self._saved, self._copied)
        if (group := shards.replicas) is not None and not session.is_dry and self._plan.trains:
            self._model = self._replicate(group=group)
            self._check_reduction()
            self._lay_out_state()

    def _sum_over_shards(self, optimizer: Any) -> None:
        optimizer.sum_shards = self._shards.shard_sums()
        self._until_closed.callback(setattr, optimizer, "sum_shards", None)

    def _prepare_model(self, task: StepTask) -> None:
        """Make the optimizer over the whole model, then replace its parameters by this rank's shards."""
        self._add_lora()
        refuse_extra_state(self.module)
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        made = super()._make_optimizer(task)
        check_made(made, self._plan, is_manual=task.is_manual)
        for member in members_of(made):
            check_cuts(member, self._plan)
        self._groups = [[names[id(parameter)] for parameter in group["params"]] for group in made.param_groups]
        self._copied = self._names_to_copy(made)
        self._use_float8()
        mesh = self._plan.mesh
        if task.has_own_step and self._plan.shard.is_fsdp and mesh.tp == mesh.cp == mesh.pp == 1:
            self._root = StepModule(self.module, self._run)
        self._shards = shards = ShardedModel(self.module, self._plan, self._session, step=self._root)
        self._until_closed.callback(shards.close)
        dtype = computed_dtype(self._plan.precision.kind)
        if self._root is not None and dtype is not None:
            self._until_closed.callback(cast_calls(self.module, dtype))
        with shards.low.whole() if shards.low is not None else nullcontext():
            rebind(made, names, self.module, shards.layout)
        self._made = made
        task.move_loss_to(self._session.device)

    def _names_to_copy(self, made: torch.optim.Optimizer) -> set[str]:
        """Of the whole model."""
        stepped = [parameter for group in made.param_groups for parameter in group["params"]]
        saved = self.module.state_dict().keys() if self._saved is None else self._saved
        return copied_names(self.module, stepped, saved)

    def _make_optimizer(self, task: StepTask) -> torch.optim.Optimizer:
        return self._made

    def parameters_changed(self) -> None:
        super().parameters_changed()
        self._shards.parameters_changed()
        self._shards.set_stepped(self._parameters)
        if (group := self._shards.replicas) is not None and not self._session.is_dry:
            self._replicate_again(group=group)

    def _lower_parameters(self) -> RoundedShards | None:
        """The bf16 shards, if rounding is stochastic; fp32 shards are gathered in bf16 by FSDP itself."""
        return self._shards.low

    def _share_batch(self) -> WholeBatch | None:
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
        return self._whole_step(microbatches, measure)

    def _whole_step(self, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        if self._own_use is not None and self._plan.memory.compile:
            self._watch_uncompiled(microbatches[0])
        if self._phases:
            output = self._take_phases(microbatches, measure)
        else:
            output = self._pass_and_update(microbatches, measure)
        if measure:
            self.check_targets()
        return output

    def _pass_and_update(self, microbatches: Sequence[Microbatch], measure: bool) -> StepOutput:
        if not self._is_settled and self._has_shares and self._has_fsdp and self._task.computes_own_loss:
            self._settle_before(microbatches[0])
        return super()._pass_and_update(microbatches, measure)

    @contextmanager
    def _in_phase(self, phase: OptimizerPhase) -> Iterator[None]:
        self._shards.begin_phase(phase.name)
        self._shards.reshard()  # gathered parameters require what the shards did when they were gathered
        try:
            with super()._in_phase(phase):
                yield
        finally:
            self._shards.begin_phase("")

    def _ready_for_phases(self) -> None:
        """Let FSDP begin, and find whose gradients are measured, while all parameters still require gradients."""
        assert self._root is not None
        if self._shards.is_fsdp and not self._session.is_dry:
            with torch.no_grad():
                self._root(None, lambda module, batch: None)
            self._shards.reshard()
        self._shards.begin_norm()

    def _watch_own_use(self) -> OwnUse:
        """Steps of the user's own may not compute with parameters that are cut, or on other ranks."""
        mesh, shards = self._plan.mesh, self._shards
        cut = {id(p) for name, p in self.module.named_parameters() if shards.is_apart(name)}
        setting = "sharded parameters (FSDP)"
        if mesh.pp > 1 or mesh.tp > 1:
            setting = f"pipeline_parallel={mesh.pp}" if mesh.pp > 1 else f"tensor_parallel={mesh.tp}"

        def is_part(parameter: torch.Tensor) -> bool:
            return mesh.pp > 1 or id(parameter) in cut or isinstance(parameter, DTensor)

        return OwnUse(self.module, is_part, setting, calls_once=mesh.pp > 1)

    def _watch_uncompiled(self, micro: Microbatch) -> None:
        """Watch one more pass, as in an evaluation: for a pass of training, blocks would be compiled with the watch."""
        assert self._own_use is not None
        own_use, self._own_use = self._own_use, None
        batch = self.moved(micro.batch)
        try:
            with torch.compiler.set_stance("force_eager"), own_use.watching("a pass before the first step"):
                self._try(batch)
        except Exception as failed:  # the user's code, in a trial pass
            if is_collateral(failed) or isinstance(failed, TaskError):
                raise

    def _verify(self, micro: Microbatch) -> None:
        """Check before the first step that the model allows sharded sequences."""
        batch = self.moved(micro.batch)
        self._verify_by(lambda: self._forward(self.module, batch).loss)

    def _verify_by(self, run: Callable[[], torch.Tensor]) -> None:
        assert self._shards.context is not None
        with kept_buffers(self._loss):
            self._shards.context.verify(run)
        self._verifies = False

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

    def forget_step(self) -> None:
        self._shards.forget_accumulated()
        super().forget_step()

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

    def _evaluated(self, batch: Any) -> Outcome | None:
        self._verify_evaluation(batch)
        return super()._evaluated(batch)

    def _verify_evaluation(self, batch: Any) -> None:
        """Check before the first evaluation, of a run that trains nothing, that the model allows sharded sequences."""
        if self._verifies and not self._plan.trains:
            self._verify_by(lambda: self._call(self._task.evaluate, self.module, batch).loss)

    def _trial_of_evaluation(self) -> LossTrial:
        """Ranks that only gather parameters from each other can try parts of a batch, if all of them do."""
        trial = super()._trial_of_evaluation()
        return trial._replace(run=self._try_evaluation, is_joint=True) if self._has_fsdp else trial

    def eval_step(self, batch: Any, size: int) -> Mapping[str, MetricSum]:
        found = super().eval_step(batch, size)
        return found if self.owns_metrics else {}

    def predict_step(self, batch: Any) -> Any:
        self._verify_prediction(batch)
        found = super().predict_step(batch)
        return found if self.owns_metrics else None

    def _verify_prediction(self, batch: Any) -> None:
        """The same before the first prediction."""
        if self._verifies and not self._plan.trains:
            moved = self.moved(batch)
            self._verify_by(lambda: _first_tensor(self._call(self._task.predict, self.module, moved)))

    def _call(self, step: Callable[[nn.Module, Any], T], model: nn.Module, batch: Any) -> T:
        root = self._root
        if root is None or not self._shards.is_fsdp:
            return super()._call(step, model, batch)

        @wraps(step)
        def through(model: nn.Module, batch: Any) -> T:
            return root(batch, step)  # type: ignore[no-any-return]

        return super()._call(through, model, batch)

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
        return () if is_unwanted(name, self.copies) else self._state.boxes(name, shape)

    @contextmanager
    def weights(self, *, changes: bool = False) -> Iterator[ModelCopy]:
        self._shards.reshard()  # evaluation leaves some parameters gathered
        with super().weights(changes=changes) as found:
            yield found

    def train(self, mode: bool) -> None:
        super().train(mode)
        if mode:  # what callbacks read or change are the shards
            self._shards.reshard()

    def _copied_names(self) -> set[str]:
        return {name for name in self._copied if self._shards.layout.is_here(name)}

    def _copy_state(self, tensors: ModelCopy) -> StateTree:
        return self._state.copy(tensors)

    def _load_copy(self, saved: StateTree) -> ModelCopy:
        with self.weights() as live:
            return self._state.load_copy(saved, live)

    def _copied_alike(self, names: set[str]) -> Named:
        return copy_tensors(self.copies, self._state.boxed, names)

    def replicated(self) -> Named:
        self._shards.reshard()  # evaluation leaves some parameters gathered
        with self._whole():
            found = list(self._state.local(self._replicas))
        yield from found
        yield from optimizer_options(self.optimizer)
        yield from self._loss_scale()
        yield from self._copied_alike(shared_names(self.module, self._replicas))

    def held_state(self) -> StateTree | None:
        """None: this rank holds only shards of the state."""
        return None


def _first_tensor(predictions: Any) -> torch.Tensor:
    """By which sharded sequences are compared with whole ones."""
    tensors = [leaf for leaf in tree_flatten(predictions)[0] if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise TaskError(
            "predict_step returned no tensor, and the model has context_parallel",
            why="its first predictions are compared with those of whole sequences",
            do="return a tensor, or set context_parallel=1",
        )
    return tensors[0]
