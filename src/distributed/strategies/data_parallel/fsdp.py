"""Fully sharded data parallelism (FSDP2): every rank keeps a shard of each parameter, gradient and state."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distributed.core.errors import PlanError
from distributed.runtime.torch_compat import UNSHARDED, fsdp_groups
from distributed.strategies.base import LOW_PRECISION
from distributed.strategies.placement import Layout, local, rows_here


def shard(
    module: nn.Module,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    blocks: Sequence[str],
    reshard_after_forward: bool,
    precision: str,
    low_gradients: bool = False,
    cpu_offload: bool,
    device: torch.device,
    roots: Sequence[nn.Module] = (),
    casts: bool = True,
) -> None:
    """Shard each of a model's blocks, and then the rest of the model; the layout records the shards.

    `mesh` has the axis dp_shard, or dp_replicate and dp_shard. `roots` are called in place of the whole model: the
    stages of a pipeline, or a whole step, whose batch nothing `casts` to the precision of the gathered parameters.
    Gradients become the mean over all ranks of the mesh, reduced in that precision (`low_gradients`), or in fp32.
    """
    here = _names_here(module, layout)
    _refuse(here, roots)
    before = dict(module.named_parameters(remove_duplicate=False))
    ignored = {p for p in module.parameters() if p not in here}
    for parameter in here:
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy()
    shared: dict[str, Any] = {"mesh": mesh, "offload_policy": offload, "ignored_params": ignored}
    mixed = _mixed(precision, low_gradients)
    for block in _separate(module, blocks, here):
        _shard_one(block, here, reshard_after_forward=reshard_after_forward, mp_policy=mixed, **shared)
    mixed = _mixed(precision, low_gradients, keeps_outputs=bool(roots), casts=casts)
    reshards = None if reshard_after_forward else False  # None: not those of a root, which are needed again at once
    for root in roots or (module,):
        _shard_one(root, here, reshard_after_forward=reshards, mp_policy=mixed, **shared)
    _follow(module, before, here)
    _record_rows(module, layout, mesh)


def accumulate(roots: Iterable[nn.Module], synchronizes: bool) -> None:
    """Set whether the next backward pass reduces gradients, or only accumulates them for a later one.

    Until then each rank holds the whole gradient of every parameter. That saves messages if parameters are whole during
    a step anyway (grad_op); with full sharding it would need the memory that sharding saves.
    """
    for root in roots:
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(synchronizes)


def forget_accumulated(roots: Iterable[nn.Module]) -> None:
    """Drop whole gradients that no backward pass has reduced."""
    for module in (m for root in roots for m in root.modules() if isinstance(m, FSDPModule)):
        for group in fsdp_groups(module):
            for parameter in group.fsdp_params:
                if hasattr(parameter, UNSHARDED):  # it was gathered once
                    parameter.unsharded_accumulated_grad = parameter.unsharded_param.grad = None


def follow_trained(roots: Iterable[nn.Module]) -> None:
    """Let what is gathered require a gradient where its shard does by now."""
    for module in (m for root in roots for m in root.modules() if isinstance(m, FSDPModule)):
        for group in fsdp_groups(module):
            for parameter in group.fsdp_params:
                if hasattr(parameter, UNSHARDED):  # it was gathered once
                    parameter.unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)


def _shard_one(module: nn.Module, here: dict[nn.Parameter, list[str]], **options: Any) -> None:
    """Shard one group, and free the whole parameters, to which a user's optimizer may still refer."""
    whole = [p for p in module.parameters() if p in here]
    _refuse_types({p: here[p] for p in whole if p.requires_grad})
    fully_shard(module, **options)
    for parameter in whole:
        parameter.data = parameter.data.new_empty(0)


def _mixed(
    precision: str, low_gradients: bool, *, keeps_outputs: bool = True, casts: bool = True
) -> MixedPrecisionPolicy:
    """Mixed precision with gradients reduced in fp32, unless low ones are requested; outputs of the whole model are
    fp32 too, so that the loss is exact."""
    dtype = LOW_PRECISION.get(precision)
    if dtype is None:
        return MixedPrecisionPolicy()
    output = None if keeps_outputs else torch.float32
    reduced = dtype if low_gradients else torch.float32
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, output_dtype=output, cast_forward_inputs=casts)


def computed_dtype(precision: str) -> torch.dtype | None:
    """In which gathered parameters are computed with; None: in their own."""
    return LOW_PRECISION.get(precision)


def _names_here(module: nn.Module, layout: Layout) -> dict[nn.Parameter, list[str]]:
    """The parameters on this rank, with all names of each."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if layout.is_here(name):
            found.setdefault(parameter, []).append(name)
    return found


def _separate(module: nn.Module, blocks: Sequence[str], here: dict[nn.Parameter, list[str]]) -> list[nn.Module]:
    """The blocks that can be separate FSDP groups: with parameters on this rank, none of them tied to one outside.

    Deepest first, as torch needs for nested groups. A tied parameter must be in one group with all modules that use it.
    """
    holders = _holders(module)
    found = []
    for path in sorted(blocks, key=lambda path: -path.count(".")):
        block = module.get_submodule(path)
        inside = _holders(block)
        if any(p in here for p in inside) and all(holders[p] == times for p, times in inside.items()):
            found.append(block)
    return found


def _holders(module: nn.Module) -> Counter[nn.Parameter]:
    """In how many places each parameter is."""
    return Counter(p for _, p in module.named_parameters(remove_duplicate=False))


def _record_rows(module: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
    """Record the rows of this rank; of the replicas of a shard, one stores each parameter, chosen by its name."""
    copies, copy = (mesh.size(0), mesh.get_local_rank(0)) if mesh.ndim == 2 else (1, 0)
    for parameter, names in _names_here(module, layout).items():
        assert isinstance(parameter, DTensor), f"{names[0]} was not sharded"
        rows = rows_here(parameter)
        assert local(parameter).shape[0] == rows[1] - rows[0], f"{names[0]} was sharded otherwise than by rows"
        for name in names:
            stores = layout.shard(name, parameter).stores  # another axis may have chosen another rank
            layout.shard_rows(name, rows)
            layout.set_stores(name, stores and zlib.crc32(names[0].encode()) % copies == copy)


def _follow(module: nn.Module, before: dict[str, nn.Parameter], here: dict[nn.Parameter, list[str]]) -> None:
    """If the roots are not the whole model, put the sharded parameters into its other modules too."""
    now = dict(module.named_parameters(remove_duplicate=False))
    for names in here.values():
        sharded = next((now[name] for name in names if isinstance(now[name], DTensor)), None)
        for name in names:
            if sharded is not None and now[name] is before[name]:
                path, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(path), attribute, sharded)


def _refuse(here: dict[nn.Parameter, list[str]], roots: Sequence[nn.Module]) -> None:
    scalars = [names[0] for parameter, names in here.items() if parameter.ndim == 0]
    if scalars:
        raise PlanError(
            f"parameters without a dimension cannot be sharded: {', '.join(scalars)}",
            why="fully sharded data parallelism cuts the first dimension of each parameter",
            do="make them tensors of shape (1,), or train with zero_stage=1",
        )
    empty = [names[0] for parameter, names in here.items() if parameter.requires_grad and not parameter.numel()]
    if empty:
        raise PlanError(
            f"parameters without elements cannot be sharded: {', '.join(empty)}",
            why="fully sharded data parallelism reduces the gradients of a block as one tensor, without empty parts",
            do="leave them out of the model, or train with zero_stage=1",
        )
    uses = Counter(parameter for root in roots for parameter in root.parameters())
    shared = [" = ".join(names) for parameter, names in here.items() if uses[parameter] > 1]
    if shared:
        raise PlanError(
            f"parameters that two stages of a pipeline share cannot be sharded: {', '.join(shared)}",
            why="each stage gathers its own parameters when it runs",
            do="untie them, have one stage on each rank, or train with zero_stage=1",
        )


def _refuse_types(group: dict[nn.Parameter, list[str]]) -> None:
    """Trained parameters that are gathered and reduced together."""
    kinds = {parameter.dtype: names[0] for parameter, names in reversed(group.items())}
    if len(kinds) > 1:
        found = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in kinds.items())
        raise PlanError(
            f"parameters of several types cannot be sharded together: {found}",
            why="fully sharded data parallelism reduces the gradients of a block as one tensor of one type",
            do="make them of one type, for example with model.float(), or train with zero_stage=1",
        )
