"""ShardedModel: a model prepared for a mesh in which no rank holds all of it, and the reduction of its gradients.

The order matters. Layers are cut before anything is patched around them; recomputation includes the collectives of a
block; a stage is cut out of complete blocks; sharding comes last, and memory is allocated only for this rank's shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distributed.core.plan import Plan
from distributed.runtime.session import Session
from distributed.strategies.checks.sharded_models import mark_parts, refuse_extra_state
from distributed.strategies.context.context_parallel import ContextParallel
from distributed.strategies.data_parallel.fsdp import accumulate, follow_trained, forget_accumulated, shard
from distributed.strategies.data_parallel.fsdp_unused import ShardedUse
from distributed.strategies.data_parallel.gradient_norm import GradientNorm
from distributed.strategies.data_parallel.shard_sums import SumsOverShards
from distributed.strategies.data_parallel.used_parameters import UsedParameters
from distributed.strategies.data_parallel.zero1 import ShardedOptimizer
from distributed.strategies.gradient_sums import mean_gradients
from distributed.strategies.mesh_groups import MeshGroups
from distributed.strategies.model.blocks import find_blocks
from distributed.strategies.model.materialize import is_meta, send_weights
from distributed.strategies.model.preparation import make, prepare_blocks
from distributed.strategies.pipeline.schedule import STAGES_PER_RANK, Pipeline
from distributed.strategies.pipeline.stages import cut
from distributed.strategies.placement import Layout
from distributed.strategies.sharded_state import ShardedState
from distributed.strategies.speed.bf16_shards import RoundedShards
from distributed.strategies.tensor.computed_weights import refuse_computed
from distributed.strategies.tensor.plans import find_styles, styles_from
from distributed.strategies.tensor.tensor_parallel import TensorParallel


class ShardedModel:
    """This rank's shards of a model, cut in place."""

    def __init__(self, module: nn.Module, plan: Plan, session: Session, *, step: nn.Module | None = None) -> None:
        """`step`: a whole step as a module around this one, if FSDP's root is to be that."""
        spec, device = plan.mesh, session.device
        self._step = step
        self.module, self._device, self._session, self._kind = module, device, session, plan.shard.kind
        self.layout = Layout(module)
        self.names = list(module.state_dict())
        self.is_fsdp = plan.shard.is_fsdp and (spec.dp_shard > 1 or plan.shard.cpu_offload)
        self.groups = MeshGroups(spec, session.rank, device.type, shards=self.is_fsdp)
        self.tensor: TensorParallel | None = None
        self.context: ContextParallel | None = None
        self.pipeline: Pipeline | None = None
        if session.world_size > 1 and not session.is_dry:
            send_weights(module, session)
        self._cut_layers(plan)
        self._share_sequences(plan)
        self._undo_blocks = prepare_blocks(module, plan)
        self._cut_stages(plan)
        if self.is_fsdp:
            self._shard(plan, device)  # moves shards only, so that no device holds the whole model
        else:
            _move(module, device)
        if is_meta(module):
            make(module, plan, session, self.layout)
        self.low: RoundedShards | None = None  # if the optimizer has other parameters than the model
        if plan.speed.parameters == "stochastic":
            self.low = RoundedShards(module, plan.seed, self.groups.place["dp_shard"])
        if not all(self.layout.is_whole(name) for name in self.names):
            mark_parts(module)
        place = self.groups.place
        # Of the ranks with the same samples, the first rank of the last stage reports the loss.
        self.owns_metrics = place["cp"] == place["tp"] == 0 and place["pp"] == spec.pp - 1
        self._norm: GradientNorm | None = None
        self._shared: ShardedOptimizer | None = None
        self._stepped: frozenset[int] = frozenset()  # the ids of the optimizer's parameters
        self._finds_unused = plan.replicate.find_unused_parameters
        self._used_in: dict[str, UsedParameters] = {}  # by the phase of a step
        self._sharded_use: ShardedUse | None = None
        self._watch_use()

    def _watch_use(self) -> None:
        """Look at which of the parameters that are trained a step uses."""
        self._used = self._used_of_all = self._make_used()
        if self.is_fsdp and not self._session.is_dry:
            if self._sharded_use is not None:
                self._sharded_use.close()
            rank = self._session.rank
            self._sharded_use = ShardedUse(self._roots, self.parameters, lambda: self._used.settled, rank)

    def _make_used(self) -> UsedParameters:
        return UsedParameters(
            self.parameters,
            self._agree_on_use,
            every_step=self._finds_unused,
            alike=self._names_alike(),
            rank=self._session.rank,
        )

    def begin_phase(self, name: str) -> None:
        """Which parameters a step uses is another matter in each phase of it; "": the step has none."""
        if name and name not in self._used_in:
            self._used_in[name] = self._make_used()
        self._used = self._used_in[name] if name else self._used_of_all

    def parameters_changed(self) -> None:
        """Reduce the gradients of the parameters that are trained by now."""
        vars(self).pop("parameters", None)
        if self.is_fsdp:
            follow_trained(self._roots)
        if self.pipeline is not None:
            self.pipeline.forget_sets()
        if self._shared is not None:
            self._shared.choose_trained()
        self._watch_use()

    @property
    def is_cut(self) -> bool:
        """Whether several ranks compute the outcome of the same samples."""
        return self.tensor is not None or self.context is not None or self.pipeline is not None

    @property
    def is_whole(self) -> bool:
        """Whether this rank can compute the outcome of its samples without other ranks."""
        return not self.is_cut and not self.is_fsdp

    def _cut_layers(self, plan: Plan) -> None:
        group = self.groups.group("tp")
        if group is not None:
            degree, asked = plan.mesh.tp, dict(plan.tensor.styles)
            styles = styles_from(asked, self.module, degree) if asked else find_styles(self.module, degree)
            refuse_computed(self.module, styles)
            self.tensor = TensorParallel(
                self.module, self.layout, group, styles, self._session, sequence=plan.tensor.sequence
            )

    def _share_sequences(self, plan: Plan) -> None:
        group = self.groups.group("cp")
        if group is not None:
            self.context = ContextParallel(self.module, group, self._session)

    def _cut_stages(self, plan: Plan) -> None:
        group = self.groups.group("pp")
        if group is not None:
            self.pipeline = Pipeline(
                self.module,
                self.layout,
                group=group,
                schedule=plan.pipeline.schedule,
                microbatches=plan.batch.accumulation,
                session=self._session,
                agree=self._largest if self.is_fsdp else lambda case: case,
            )

    def _largest(self, case: int) -> int:
        """The maximum of a number over the ranks of a stage."""
        found = torch.tensor([case], device=self._device)
        for group in self.groups.data_groups:
            self._session.max("shapes of micro-batches", found, group)
        return int(found.item())

    def _shard(self, plan: Plan, device: torch.device) -> None:
        shard(
            self.module,
            self.layout,
            self.groups.data,
            blocks=find_blocks(self.module, plan.shard.blocks),
            reshard_after_forward=plan.shard.kind == "full" and self.pipeline is None,
            precision=plan.precision.kind,
            low_gradients=plan.speed.parameters != "fp32",
            cpu_offload=plan.shard.cpu_offload,
            device=device,
            roots=() if self._roots == [self.module] else self._roots,
            casts=self._step is None,
        )

    @property
    def _roots(self) -> Sequence[nn.Module]:
        """The modules that FSDP's hooks are around, outermost."""
        if self.pipeline is not None:
            return self.pipeline.stages
        return [self.module if self._step is None else self._step]

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters on this rank."""
        found = self.module.named_parameters()
        return {name: p for name, p in found if p.requires_grad and self.layout.is_here(name)}

    def synchronize(self, is_last: bool) -> None:
        """Set before a micro-batch's backward pass whether its gradients are reduced.

        If gradients are sharded to save memory, each micro-batch reduces: otherwise whole gradients would be kept.
        """
        if self.is_fsdp and self._kind == "grad_op" and self.pipeline is None:
            accumulate(self._roots, is_last)

    def forget_accumulated(self) -> None:
        """Drop the whole gradients that `synchronize` has kept for a backward pass that did not come."""
        if self.is_fsdp:
            forget_accumulated(self._roots)

    def finish_gradients(self) -> None:
        """Reduce, after the last backward pass of a step, the gradients that no hook has reduced."""
        if self._session.is_dry:
            parameters: Mapping[str, nn.Parameter] = self.parameters
        elif self.pipeline is None and self.context is None and self.tensor is None and self._sharded_use is None:
            return  # DDP has reduced them
        else:
            parameters = self._used.find(self._own_use())
        if self.pipeline is not None:
            self.pipeline.finish_gradients(parameters)
            if not self.is_fsdp:
                for group in self.groups.data_groups:
                    mean_gradients("gradients over data ranks", parameters.values(), self._session, group)
        if self.context is not None:
            self.context.finish_gradients(parameters)
        if self.tensor is not None:
            self.tensor.finish_gradients(parameters)
            for parameter in parameters.values():
                if parameter.grad is None:  # a slice that this rank did not use, while other ranks used theirs
                    parameter.grad = torch.zeros_like(parameter)

    def _own_use(self) -> list[bool]:
        if self._sharded_use is not None:
            return self._sharded_use.take()
        return [parameter.grad is not None for parameter in self.parameters.values()]

    def _names_alike(self) -> list[str]:
        """Replicated parameters whose gradient is equal on all ranks of a tensor group, and is not reduced."""
        if self.tensor is None:
            return []
        partial = set(self.tensor.partial)
        return [name for name in self.parameters if self.layout.cut_of(name) is None and name not in partial]

    def _agree_on_use(self, used: torch.Tensor) -> torch.Tensor:
        """Agree on used parameters over all ranks that have them; two stages agree on tied ones."""
        used = used.to(self._device)
        for group in filter(None, map(self.groups.group, ("dp_replicate", "dp_shard", "cp", "tp"))):
            self._session.max("parameters that a step uses", used, group)
        stages = self.groups.group("pp")
        if self.pipeline is not None and self.pipeline.shared and stages is not None:
            places = {name: index for index, name in enumerate(self.parameters)}
            found = [[places[name] for name in names if name in places] for names in self.pipeline.shared]
            tied = torch.stack([used[at].amax() if at else used.new_zeros(()) for at in found])
            self._session.max("shared parameters that a step uses", tied, stages)
            for at, is_used in zip(found, tied, strict=True):
                used[at] = is_used
        return used.cpu()

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The group of ranks with the same shard of the model and other samples, if DDP reduces their gradients."""
        is_hooked = not self.is_fsdp and self.pipeline is None
        return self.groups.group("dp_replicate") if is_hooked else None

    def set_stepped(self, parameters: Iterable[nn.Parameter]) -> None:
        """The optimizer's parameters, whose gradient is measured and clipped, as in one process."""
        self._stepped, self._norm = frozenset(map(id, parameters)), None

    def share_optimizer(self, optimizer: torch.optim.Optimizer) -> ShardedOptimizer | torch.optim.Optimizer:
        """The ZeRO-1 wrapper of the optimizer, if each rank keeps the state of some parameters only."""
        group = self.groups.group("dp_replicate")
        if group is None:
            return optimizer
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        self._shared = ShardedOptimizer(optimizer, names, group, self.layout, self._session)
        return self._shared

    def shard_sums(self) -> SumsOverShards:
        """What adds numbers of the optimizer's parameters up over their shards."""
        own = self.low.own if self.low is not None else lambda parameter: parameter
        names = {id(own(parameter)): name for name, parameter in self.module.named_parameters()}
        return SumsOverShards(names, self.layout, self.groups.group, self._session)

    def state_of(
        self, optimizer: torch.optim.Optimizer, groups: list[list[str]], saved: set[str] | None, copied: set[str]
    ) -> ShardedState:
        """`saved`: the names of the tensors that a checkpoint holds; None: all. `copied`: of those of a copy."""
        return ShardedState(
            self.module,
            optimizer=optimizer,
            layout=self.layout,
            names=[name for name in self.names if saved is None or name in saved],
            copied=copied,
            groups=groups,
            is_plain=self.is_plain,
            stores=self.stores,
            stores_state=self.stores if self._shared is None else self._is_first,
            owns=self._shared.owns if self._shared is not None else lambda name: True,
            splits_optimizer=self._shared is not None,
            gather_texts=self._gather_texts if self.pipeline is not None or self._shared is not None else None,
        )

    def _gather_texts(self, text: str) -> list[str]:
        return self._session.gather_texts("state of other ranks", text)

    @property
    def norm(self) -> GradientNorm:
        """The gradient norm over all ranks, of the optimizer's parameters."""
        if self._norm is None:
            own = self.low.own if self.low is not None else lambda parameter: parameter
            stepped = {name: own(p) for name, p in self.parameters.items() if id(own(p)) in self._stepped}
            self._norm = GradientNorm(stepped, self.layout, self._copies, self._session)
        return self._norm

    def _copies(self, name: str) -> int:
        """How many ranks have the same elements of a tensor."""
        spec = self.groups.spec
        copies = spec.world_size // spec.pp
        if self.layout.cut_of(name) is not None:
            copies //= spec.tp
        if self.is_fsdp:
            copies //= spec.dp_shard
        if self.pipeline is not None and any(name in names for names in self.pipeline.shared):
            copies *= 2
        return copies

    def is_apart(self, name: str) -> bool:
        """Whether tensor parallelism gives this rank a part of a parameter, or a part of its gradient."""
        return self.tensor is not None and (self.layout.cut_of(name) is not None or name in self.tensor.partial)

    def begin_norm(self) -> None:
        """Find the parameters whose gradient is measured, while all that are trained require one."""
        _ = self.norm

    def is_plain(self, name: str) -> bool:
        """Whether every rank has all of a tensor."""
        return self.groups.spec.pp == 1 and self.layout.is_whole(name)

    def stores(self, name: str) -> bool:
        """Whether this rank is the one that saves a tensor's shard, of the ranks that hold it."""
        place = self.groups.place
        is_sharded = self.layout.is_sharded(name)
        return self._is_first(name) and (is_sharded or place["dp_replicate"] == place["dp_shard"] == 0)

    def _is_first(self, name: str) -> bool:
        """Whether this rank is the first that holds a tensor's shard for the same samples."""
        place = self.groups.place
        return place["cp"] == 0 and (place["tp"] == 0 or self.layout.cut_of(name) is not None)

    def reshard(self) -> None:
        """Reshard the parameters that an evaluation has gathered."""
        for module in (m for root in self._roots for m in root.modules() if isinstance(m, FSDPModule)):
            module.reshard()

    def close(self) -> None:
        """What is left whole computes as it did before: its blocks by themselves, on sequences that are whole."""
        self._undo_blocks()
        if self.context is not None:
            self.context.close()
        self.groups.close()


def check_model(module: nn.Module, plan: Plan) -> None:
    """Raise the problems of this mesh with this model, before anything is started or cut."""
    mesh = plan.mesh
    refuse_extra_state(module)
    if plan.shard.blocks:
        find_blocks(module, plan.shard.blocks)
    if mesh.tp > 1:
        asked = dict(plan.tensor.styles)
        refuse_computed(module, styles_from(asked, module, mesh.tp) if asked else find_styles(module, mesh.tp))
    if mesh.pp > 1:
        cut(module, mesh.pp * STAGES_PER_RANK[plan.pipeline.schedule])


def _move(module: nn.Module, device: torch.device) -> None:
    """Move this rank's tensors to the device; placeholders of other ranks' tensors have no memory."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)
