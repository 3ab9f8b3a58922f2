"""Fully sharded data parallelism (FSDP2): every data rank keeps some rows of each parameter, gradient and state."""

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
from distributed.strategies.gradient_sums import local
from distributed.strategies.layout import Layout

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shard(
    module: nn.Module,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    blocks: Sequence[str],
    reshard_after_forward: bool,
    precision: str,
    cpu_offload: bool,
    device: torch.device,
    roots: Sequence[nn.Module] = (),
) -> None:
    """Shard a model's blocks, each by itself, and then what is left of it; the layout is told who keeps what.

    `mesh` has the axis dp_shard, or dp_replicate and dp_shard. `roots` are what is called in place of the whole model:
    the stages of a pipeline. Gradients come out as the mean over all ranks of the mesh.
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
    for block in _separate(module, blocks, here):
        _shard_one(block, here, reshard_after_forward=reshard_after_forward, mp_policy=_mixed(precision), **shared)
    mixed = _mixed(precision, keeps_outputs=bool(roots))
    reshards = None if reshard_after_forward else False  # None: not a root's, which are needed again at once
    for root in roots or (module,):
        _shard_one(root, here, reshard_after_forward=reshards, mp_policy=mixed, **shared)
    _follow(module, before, here)
    _tell(module, layout, mesh)


def accumulate(roots: Iterable[nn.Module], synchronizes: bool) -> None:
    """Whether the next backward pass reduces gradients, or leaves that to a later one and only adds them up.

    Until then each rank holds the whole gradient of every parameter. It is for sharding that has whole parameters in a
    step anyway (grad_op), and saves their messages; with full sharding it would need the memory that sharding saves.
    """
    for root in roots:
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(synchronizes)


def rows_of(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows that a rank keeps, as `torch.chunk` cuts them: the last ranks may have fewer, or none.

    >>> [rows_of(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-length // ranks)
    return min(rank * size, length), min((rank + 1) * size, length)


def rows_here(parameter: DTensor) -> tuple[int, int]:
    """The rows of a sharded parameter that this rank keeps."""
    mesh = parameter.device_mesh
    axis = mesh.ndim - 1
    return rows_of(parameter.shape[0], mesh.get_local_rank(axis), mesh.size(axis))


def _shard_one(module: nn.Module, here: dict[nn.Parameter, list[str]], **options: Any) -> None:
    """Shard one group, and free the whole parameters, which others, such as a user's optimizer, may still refer to."""
    whole = [p for p in module.parameters() if p in here]
    _refuse_types({p: here[p] for p in whole if p.requires_grad})
    fully_shard(module, **options)
    for parameter in whole:
        parameter.data = parameter.data.new_empty(0)


def _mixed(precision: str, keeps_outputs: bool = True) -> MixedPrecisionPolicy:
    """Gradients are added up in fp32; what the whole model returns is fp32 too, so that a loss of it is exact."""
    dtype = _DTYPES.get(precision)
    if dtype is None:
        return MixedPrecisionPolicy()
    output = None if keeps_outputs else torch.float32
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=output)


def _names_here(module: nn.Module, layout: Layout) -> dict[nn.Parameter, list[str]]:
    """The parameters that this rank has, with all the names that each goes by."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if layout.is_here(name):
            found.setdefault(parameter, []).append(name)
    return found


def _separate(module: nn.Module, blocks: Sequence[str], here: dict[nn.Parameter, list[str]]) -> list[nn.Module]:
    """The blocks that can be a group of their own: with parameters here, none of them tied to one outside of it.

    Deepest first, as torch wants nested groups. A tied parameter has to be in one group with all that use it.
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


def _tell(module: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
    """Replicas of a shard hold the same rows; by its name each parameter is stored by one of them."""
    copies, copy = (mesh.size(0), mesh.get_local_rank(0)) if mesh.ndim == 2 else (1, 0)
    for parameter, names in _names_here(module, layout).items():
        assert isinstance(parameter, DTensor), f"{names[0]} was not sharded"
        rows = rows_here(parameter)
        assert local(parameter).shape[0] == rows[1] - rows[0], f"{names[0]} was sharded otherwise than by rows"
        for name in names:
            stores = layout.portion(name, parameter).stores  # other axes may have said that another rank does
            layout.shard_rows(name, rows)
            layout.set_stores(name, stores and zlib.crc32(names[0].encode()) % copies == copy)


def _follow(module: nn.Module, before: dict[str, nn.Parameter], here: dict[nn.Parameter, list[str]]) -> None:
    """Where the roots are not the whole model, let its other parts have the sharded parameters too."""
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
            why="fully sharded data parallelism adds up the gradients of a block as one tensor, with no empty part",
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
            why="fully sharded data parallelism adds up the gradients of a block as one tensor of one type",
            do="make them of one type, for example with model.float(), or train with zero_stage=1",
        )
