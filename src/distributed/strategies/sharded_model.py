"""Parts: a model made ready for a mesh in which no rank holds all of it, and what its gradients still need.

The order matters. Layers are cut before anything is patched around them; what is computed again in the backward pass
includes the collectives in it; a stage is cut out of blocks that are complete; sharding comes last, and memory only for
what is left on this rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distributed.core.plan import Plan
from distributed.runtime.session import Session
from distributed.strategies.block_compile import compile_blocks, undo_compile
from distributed.strategies.blocks import find_blocks
from distributed.strategies.compile_cache import compile_cache
from distributed.strategies.context_parallel import ContextParallel
from distributed.strategies.fsdp_unused import ShardedUse
from distributed.strategies.fully_sharded import accumulate, shard
from distributed.strategies.gradient_norm import GradientNorm
from distributed.strategies.gradient_sums import mean_gradients
from distributed.strategies.in_parts import mark_parts, refuse_extra_state
from distributed.strategies.layout import Layout
from distributed.strategies.lora import init_lora, is_adapter
from distributed.strategies.materialize import is_meta, materialize, send_weights
from distributed.strategies.mesh_groups import MeshGroups
from distributed.strategies.part_state import PartState
from distributed.strategies.pipeline import STAGES_PER_RANK, Pipeline
from distributed.strategies.recompute import recompute, undo_recompute
from distributed.strategies.sharded_optimizer import ShardedOptimizer
from distributed.strategies.stages import cut
from distributed.strategies.tensor_computed import refuse_computed
from distributed.strategies.tensor_parallel import TensorParallel
from distributed.strategies.tensor_plans import find_styles, styles_from
from distributed.strategies.used_parameters import UsedParameters

_ONLINE = "TORCHINDUCTOR_ONLINE_SOFTMAX"  # by which a user has said how a compiled softmax sums


class Parts:
    """Of one rank. Made of the whole model, in place."""

    def __init__(self, module: nn.Module, plan: Plan, session: Session) -> None:
        spec, device = plan.mesh, session.device
        self.module, self._device, self._session, self._kind = module, device, session, plan.shard.kind
        self.layout = Layout(module)
        self.names = list(module.state_dict())
        self.is_fsdp = plan.shard.is_fsdp and (spec.dp_shard > 1 or plan.shard.cpu_offload)
        self.groups = MeshGroups(spec, session.rank, device.type, shards=self.is_fsdp)
        self.tensor: TensorParallel | None = None
        self.context: ContextParallel | None = None
        self.pipeline: Pipeline | None = None
        if session.world_size > 1 and not session.is_dry:
            send_weights(module, None, device)
        self._cut_layers(plan)
        self._share_sequences(plan)
        self._blocks = prepare_blocks(module, plan)  # what undoes it lasts as long as the parts
        self._cut_stages(plan, device)
        if self.is_fsdp:
            self._shard(plan, device)  # which moves what it shards, so that no device holds all of it
        else:
            _move(module, device)
        if is_meta(module):
            make(module, plan, session, self.layout)
        if not all(self.layout.is_whole(name) for name in self.names):
            mark_parts(module)
        place = self.groups.place
        # Of the ranks that share the work on the same samples, the last stage's first one has the loss of all.
        self.counts = place["cp"] == place["tp"] == 0 and place["pp"] == spec.pp - 1
        self._norm: GradientNorm | None = None
        self._shared: ShardedOptimizer | None = None
        self._stepped: frozenset[int] = frozenset()  # the ids of the optimizer's parameters
        self._used = UsedParameters(
            self.parameters,
            self._agree_on_use,
            every_step=plan.replicate.find_unused_parameters,
            alike=self._names_alike(),
            rank=session.rank,
        )
        self._sharded_use: ShardedUse | None = None
        if self.is_fsdp and not session.is_dry:
            roots = self.pipeline.stages if self.pipeline is not None else [module]
            self._sharded_use = ShardedUse(roots, self.parameters, lambda: self._used.settled, session.rank)

    def _cut_layers(self, plan: Plan) -> None:
        group = self.groups.group("tp")
        if group is not None:
            degree, asked = plan.mesh.tp, dict(plan.tensor.styles)
            styles = styles_from(asked, self.module, degree) if asked else find_styles(self.module, degree)
            refuse_computed(self.module, styles)
            self.tensor = TensorParallel(self.module, self.layout, group, styles, sequence=plan.tensor.sequence)

    def _share_sequences(self, plan: Plan) -> None:
        group = self.groups.group("cp")
        if group is not None:
            self.context = ContextParallel(self.module, group)

    def _cut_stages(self, plan: Plan, device: torch.device) -> None:
        group = self.groups.group("pp")
        if group is not None:
            self.pipeline = Pipeline(
                self.module,
                self.layout,
                group=group,
                schedule=plan.pipeline.schedule,
                microbatches=plan.batch.accumulation,
                device=device,
                agree=self._largest if self.is_fsdp else lambda case: case,
            )

    def _largest(self, case: int) -> int:
        """Of the numbers of the ranks that share a stage."""
        found = torch.tensor([case], device=self._device)
        for group in self.groups.data_groups:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return int(found.item())

    def _shard(self, plan: Plan, device: torch.device) -> None:
        shard(
            self.module,
            self.layout,
            self.groups.data,
            blocks=find_blocks(self.module, plan.shard.blocks),
            reshard_after_forward=plan.shard.kind == "full" and self.pipeline is None,
            precision=plan.precision.kind,
            cpu_offload=plan.shard.cpu_offload,
            device=device,
            roots=self.pipeline.stages if self.pipeline is not None else (),
        )

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that are here and trained."""
        found = self.module.named_parameters()
        return {name: p for name, p in found if p.requires_grad and self.layout.is_here(name)}

    def synchronize(self, is_last: bool) -> None:
        """Before the backward pass of a micro-batch: whether it is the one whose gradients are reduced.

        Where gradients are sharded for the memory's sake, each is: whole ones would have to be kept in between.
        """
        if self.is_fsdp and self._kind == "grad_op" and self.pipeline is None:
            accumulate([self.module], is_last)

    def finish_gradients(self) -> None:
        """After the last backward pass of a step: what no hook has reduced."""
        if self._session.is_dry:
            parameters: Mapping[str, nn.Parameter] = self.parameters
        elif self.pipeline is None and self.context is None and self.tensor is None and self._sharded_use is None:
            return  # DDP's are complete
        else:
            parameters = self._used.find(self._own_use())
        if self.pipeline is not None:
            self.pipeline.finish_gradients(parameters)
            if not self.is_fsdp:
                for group in self.groups.data_groups:
                    mean_gradients(parameters.values(), group)
        if self.context is not None:
            self.context.finish_gradients(parameters)
        if self.tensor is not None:
            self.tensor.finish_gradients(parameters)
            for parameter in parameters.values():
                if parameter.grad is None:  # of a slice that this rank did not use, and others did of theirs
                    parameter.grad = torch.zeros_like(parameter)

    def _own_use(self) -> list[bool]:
        if self._sharded_use is not None:
            return self._sharded_use.take()
        return [parameter.grad is not None for parameter in self.parameters.values()]

    def _names_alike(self) -> list[str]:
        """Whole parameters that the ranks of a tensor group compute the same gradient of, and nobody sums."""
        if self.tensor is None:
            return []
        partial = set(self.tensor.partial)
        return [name for name in self.parameters if self.layout.cut_of(name) is None and name not in partial]

    def _agree_on_use(self, used: torch.Tensor) -> torch.Tensor:
        """Over all ranks that have the same parameters; those of two stages are looked at together."""
        used = used.to(self._device)
        for group in filter(None, map(self.groups.group, ("dp_replicate", "dp_shard", "cp", "tp"))):
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        stages = self.groups.group("pp")
        if self.pipeline is not None and self.pipeline.shared and stages is not None:
            places = {name: index for index, name in enumerate(self.parameters)}
            found = [[places[name] for name in names if name in places] for names in self.pipeline.shared]
            tied = torch.stack([used[at].amax() if at else used.new_zeros(()) for at in found])
            dist.all_reduce(tied, op=dist.ReduceOp.MAX, group=stages)
            for at, is_used in zip(found, tied, strict=True):
                used[at] = is_used
        return used.cpu()

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks with the same part of the model and other samples, where DDP averages their gradients."""
        is_hooked = not self.is_fsdp and self.pipeline is None
        return self.groups.group("dp_replicate") if is_hooked else None

    def set_stepped(self, parameters: Iterable[nn.Parameter]) -> None:
        """Those of the optimizer: its gradient is measured and clipped, as in one process."""
        self._stepped, self._norm = frozenset(map(id, parameters)), None

    def share_optimizer(self, optimizer: torch.optim.Optimizer) -> ShardedOptimizer | torch.optim.Optimizer:
        """What steps for it, where each rank keeps the state of some parameters only."""
        group = self.groups.group("dp_replicate")
        if group is None:
            return optimizer
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        self._shared = ShardedOptimizer(optimizer, names, group, self.layout)
        return self._shared

    def state_of(self, optimizer: torch.optim.Optimizer, groups: list[list[str]], saved: set[str] | None) -> PartState:
        """`saved`: the names of the tensors that a checkpoint holds; None: all."""
        return PartState(
            self.module,
            optimizer,
            self.layout,
            [name for name in self.names if saved is None or name in saved],
            groups,
            self.is_plain,
            self.stores,
            self.stores if self._shared is None else self._is_first,
            self._shared.owns if self._shared is not None else lambda name: True,
            self._shared is not None,
            self._tell_all if self.pipeline is not None or self._shared is not None else None,
        )

    def _tell_all(self, text: str) -> list[str]:
        return self._session.gather_texts("state of other ranks", text)

    @property
    def norm(self) -> GradientNorm:
        """Over all ranks, of what the optimizer steps."""
        if self._norm is None:
            world = dist.group.WORLD if dist.is_initialized() else None
            stepped = {name: p for name, p in self.parameters.items() if id(p) in self._stepped}
            self._norm = GradientNorm(stepped, self.layout, self._copies, world)
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

    def is_plain(self, name: str) -> bool:
        """Whether every rank has all of a tensor."""
        return self.groups.spec.pp == 1 and self.layout.is_whole(name)

    def stores(self, name: str) -> bool:
        """Of the ranks that have the same of a tensor, whether it is this one that writes it."""
        place = self.groups.place
        is_sharded = self.layout.is_sharded(name)
        return self._is_first(name) and (is_sharded or place["dp_replicate"] == place["dp_shard"] == 0)

    def _is_first(self, name: str) -> bool:
        """Of the ranks that have the same of a tensor for the same samples."""
        place = self.groups.place
        return place["cp"] == 0 and (place["tp"] == 0 or self.layout.cut_of(name) is not None)

    def reshard(self) -> None:
        """Parameters that an evaluation has gathered, back to this rank's rows."""
        roots = self.pipeline.stages if self.pipeline is not None else [self.module]
        for module in (m for root in roots for m in root.modules() if isinstance(m, FSDPModule)):
            module.reshard()

    def close(self) -> None:
        self.groups.close()


def check_model(module: nn.Module, plan: Plan) -> None:
    """Raises what stands in the way of this mesh for this model, before anything is started or cut."""
    mesh = plan.mesh
    refuse_extra_state(module)
    if plan.shard.blocks:
        find_blocks(module, plan.shard.blocks)
    if mesh.tp > 1:
        asked = dict(plan.tensor.styles)
        refuse_computed(module, styles_from(asked, module, mesh.tp) if asked else find_styles(module, mesh.tp))
    if mesh.pp > 1:
        cut(module, mesh.pp * STAGES_PER_RANK[plan.pipeline.schedule])


def make(module: nn.Module, plan: Plan, session: Session, layout: Layout | None = None) -> None:
    """Memory and first values for a model without; they are the same whatever the mesh."""
    if session.is_dry:
        return
    layout = layout or Layout(module)
    on = torch.device("cpu") if plan.shard.cpu_offload else session.device
    materialize(module, layout, session.device, plan.seed, parameters_on=on)
    if plan.memory.lora is not None:
        adapters = [(name, parameter) for name, parameter in module.named_parameters() if is_adapter(name)]
        with torch.no_grad():
            for name, parameter in adapters:
                whole = torch.empty(layout.shape(name))
                init_lora(name, whole, plan.seed)
                layout.place(name, whole, parameter)


def prepare_blocks(module: nn.Module, plan: Plan) -> Callable[[], None]:
    """What is done to each block whatever the mesh; returns what undoes it."""
    memory, wanted = plan.memory, plan.shard.blocks
    compiled: list[str] = []
    own = module._compiled_call_impl  # of a user who has compiled it
    if memory.recompute:
        recompute(module, memory.recompute, memory.recompute_every, wanted)
    if memory.compile:
        if memory.compile_whole:
            module.compile(options=_whole_options(plan.device, os.environ))
        else:
            compiled = compile_blocks(module, wanted, memory.compile_mode or None)
    cache = ExitStack()
    cache.enter_context(compile_cache(plan))  # blocks are compiled when they are first called

    def undo() -> None:
        cache.close()
        if memory.compile_whole:
            module._compiled_call_impl = own
        undo_compile(module, compiled)
        undo_recompute(module)

    return undo


def _whole_options(device: str, environ: Mapping[str, str]) -> dict[str, bool] | None:
    """Of the compiler. On a GPU, reading the logits of a vocabulary twice takes a softmax less time than correcting the
    sum of one pass: so for GPT-2's on an H200, by a profile of its kernels."""
    return {"online_softmax": False} if device == "cuda" and _ONLINE not in environ else None


def _move(module: nn.Module, device: torch.device) -> None:
    """What is here; what is on other ranks has no memory to move."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)
