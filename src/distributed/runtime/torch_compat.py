"""What of torch is private and used all the same: each name once, so that a new torch is tried in one place.

Torch 2.11 and 2.13 have every name below, unless its function says otherwise; the tests run with 2.13 on a CPU. What a
function says of a torch without its name is advice that was not needed yet. The rest of the package calls this file and
`torch_module_compat.py`; tests/unit/test_private_names.py lists what stays elsewhere, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as _c10d

# Instead: tensors on the device "meta", which do not know where they would be.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

# Instead: the public classes that derive from them, in a tuple.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase  # noqa: F401
from torch.nn.modules.batchnorm import _NormBase as NormBase  # noqa: F401
from torch.nn.modules.conv import _ConvNd as ConvBase  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

# Instead: the package optree, of which it is torch's own copy.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.checkpoint import _CachingTorchDispatchMode

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]
_state = dist.distributed_c10d

# ---- process groups


def default_store() -> dist.Store:
    """Of the group that a script has made. Instead: a store of our own at another port."""
    return _state._get_default_store()


def default_group() -> Any:
    """Instead: `dist.group.WORLD`."""
    return _state._get_default_group()


def default_backends() -> str:
    """Which backends the default group has, as in "cpu:gloo,cuda:nccl". Instead: `dist.get_backend_config`."""
    return str(_state._world.pg_backend_config[_state._get_default_group()])


def reduce_scatter_flat(into: torch.Tensor, rows: torch.Tensor, *, op: Any, group: Any) -> Any:
    """Started, under the name that this torch has for it: 2.11 knows the older one only, and 2.13 warns of that."""
    start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return start(into, rows, op=op, group=group, async_op=True)


def all_gather_flat(into: torch.Tensor, own: torch.Tensor, *, group: Any) -> Any:
    """The same for an all-gather."""
    start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return start(into, own, group=group, async_op=True)


def known_groups() -> list[Any]:
    """All groups that this process is in. Instead: keep those that we make; a script's own would be missed."""
    return list(_state._world.pg_map)


def ranks_of_groups() -> dict[str, list[int]]:
    """The ranks of each group by its name. Without it, ranks that wait in a later world are not named."""
    world = _state._world
    return {str(name): sorted(world.pg_group_ranks.get(group, ())) for group, name in world.pg_names.items()}


def backend_of(group: Any, device: str) -> Any:
    """What a group's tensors of a device are sent by. Without it a rank that survives NCCL has to be restarted."""
    backend = group._get_backend(torch.device(device))
    return getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL, it is in one that knows less


def set_timeout(seconds: float, group: Any = None) -> None:
    """Of gloo's collectives from now on. Instead: give `init_process_group` the longer one, also to connect."""
    backend_of(group or default_group(), "cpu")._set_default_timeout(timedelta(seconds=seconds))


def timeout_of(group: Any, device: str) -> float:
    """Seconds that a group's collectives of a device may take. Instead: keep what we gave; a script's own is missed."""
    options = getattr(
        backend_of(group, device), "options", None
    )  # of what TORCH_DISTRIBUTED_DEBUG wraps there are none
    timeout = dist.default_pg_timeout if options is None else options._timeout
    return float(timeout.total_seconds())


def forget_groups() -> None:
    """What `destroy_process_group` does after it has shut groups down. Without it a rank has to be restarted."""
    world = _state._world
    _state._update_default_pg(None)
    for known in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        known.clear()
    _state._unregister_all_process_groups()
    reset_group_count()


def reset_group_count() -> None:
    """Torch names groups by it, also one that broke while it was made. Instead: give `new_group` names of our own."""
    _state._world.group_count = 0


def dump_nccl_trace(**how: bool) -> bytes | None:
    """The flight recorder of NCCL, pickled; None where this build has none, and then a stuck rank names no call."""
    dump = getattr(_c10d, "_dump_nccl_trace", None)
    return None if dump is None else bytes(dump(includeCollectives=True, **how))


def dump_trace_json() -> str | None:
    """The flight recorder of gloo, as JSON; None where this build has none."""
    dump = getattr(_c10d, "_dump_fr_trace_json", None)
    return None if dump is None else dump(includeCollectives=True, onlyActive=False)


def broadcast_coalesced(group: Any, tensors: Sequence[torch.Tensor], bucket_bytes: int, source: int) -> None:
    """As DDP sends buffers. Instead: `dist.broadcast` of each."""
    dist._broadcast_coalesced(group, list(tensors), bucket_bytes, source)


def ddp_buckets(tensors: Sequence[torch.Tensor], limit_bytes: int) -> list[list[int]]:
    """DDP's layout of gradients. Instead: write down its rule, or three ranks add in another order than under DDP."""
    indices = list(range(len(tensors)))
    sparse = [False] * len(indices)
    buckets, _ = dist._compute_bucket_assignment_by_size(list(tensors), [limit_bytes], sparse, indices)
    return buckets


def reduction_finished(replicated: nn.parallel.DistributedDataParallel) -> Callable[[], None]:
    """It raises where DDP has not reduced every gradient. Without it, the next forward says so, a step late."""
    return replicated.reducer._check_reducer_finalized


_NEVER = 2**30  # backward passes between two that are timed, besides the first ten of a module


def time_reduction(replicated: nn.parallel.DistributedDataParallel, wanted: bool) -> None:
    """Whether DDP notes when its coming pass begins and ends to reduce. Instead: a hook, at a cost in each step."""
    replicated._set_ddp_runtime_logging_sample_rate(1 if wanted else _NEVER)


def reduction_times(replicated: nn.parallel.DistributedDataParallel) -> Mapping[str, Any]:
    """What DDP has noted of its last timed pass, in nanoseconds. Waits for the device."""
    assert replicated.logger is not None, "it was released"
    replicated.logger.set_runtime_stats_and_log()
    found: Mapping[str, Any] = replicated._get_ddp_logging_data()
    return found


def gradient_order(replicated: nn.parallel.DistributedDataParallel) -> list[int]:
    """Trained parameters by their numbers, as the last pass came to their gradients. Instead: assume the reverse."""
    spent = replicated.reducer.get_backward_stats()  # until then
    return sorted(range(len(spent)), key=lambda index: (spent[index], -index))


def fake_store() -> dist.Store:
    """Of the backend "fake", which this import registers. Instead: `run_ranks` with real processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forget_composable_state(module: nn.Module) -> None:
    """What `fully_shard` notes of a module beside it. Without it a model that was sharded is not sharded again."""
    from torch.distributed import _composable_state

    _composable_state._module_state_mapping.pop(module, None)


def fsdp_groups(sharded: Any) -> list[Any]:
    """What FSDP gathers and reduces together. Without it, unused parameters break the reduction."""
    state = sharded._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:  # torch 2.11 has one at most
        found = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(found)


UNSHARDED = "_unsharded_param"  # an FSDP parameter has it once its block has run; a name, for loops over parameters


def step_microbatches(schedule: Any, count: int) -> None:
    """A pipeline's step whose stages find their inputs. Instead: `step`, which cuts one tensor into equal ones."""
    schedule._step_microbatches([()] * count, [{}] * count, [None] * count, [], return_outputs=False)


# ---- many tensors at once: of each, the loop over its tensors does the same, slower


def foreach_lerp_(into: Tensors, values: Tensors, share: float) -> None:
    torch._foreach_lerp_(into, values, share)


def foreach_copy_(into: Tensors, values: Tensors) -> None:
    torch._foreach_copy_(into, values)


def foreach_zero_(tensors: Tensors) -> None:
    torch._foreach_zero_(tensors)


def foreach_add_(tensors: Tensors, values: Any) -> None:
    torch._foreach_add_(tensors, values)


def foreach_mul_(tensors: Tensors, factor: Any) -> None:
    torch._foreach_mul_(tensors, factor)


def foreach_addcmul_(tensors: Tensors, left: Tensors, right: Tensors, factor: float) -> None:
    torch._foreach_addcmul_(tensors, left, right, factor)


def foreach_div_(tensors: Tensors, divisors: Any) -> None:
    torch._foreach_div_(tensors, divisors)


def foreach_sqrt(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    return tuple(torch._foreach_sqrt(tensors))


def foreach_clamp_(tensors: Tensors, least: float, most: float) -> None:
    torch._foreach_clamp_min_(tensors, least)
    torch._foreach_clamp_max_(tensors, most)


def foreach_sub(tensors: Tensors, values: Tensors) -> tuple[torch.Tensor, ...]:
    return tuple(torch._foreach_sub(tensors, values))


def foreach_norm(tensors: Tensors, order: int = 2, **how: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch._foreach_norm(tensors, order, **how))


# ---- single tensors and kernels


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place. Instead: compare digests."""
    return tensor._version


def preserved_versions(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """What is written inside does not count as a change. Instead: a copy of each tensor for every pass."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def view_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """What it is a view of, if of anything. Without it, standardized weights are taken for data."""
    return tensor._base


def is_view(tensor: torch.Tensor) -> bool:
    """Instead: copy what a stage sends in any case, because torch's schedules detach it in place."""
    return tensor._is_view()


def storage_id(tensor: torch.Tensor) -> int:
    """The same for views of one tensor, also on the meta device. Instead: `data_ptr`, which is 0 there."""
    return tensor.untyped_storage()._cdata


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """As `nn.Parameter(tensor)`, which leaves a weak reference, with which a tensor cannot be swapped."""
    tensor._is_param = True  # type: ignore[attr-defined]


def parameter_of_class(kind: type, value: torch.Tensor, requires_grad: bool) -> Any:
    """A parameter of a user's own class, without calling it. Instead: `copy.copy` of one that is there."""
    return torch.Tensor._make_subclass(kind, value, requires_grad)


def scaled_mm(*operands: Any, **how: Any) -> torch.Tensor:
    """The product of two fp8 matrices. Instead: `torch.nn.functional.scaled_mm`, which torch 2.13 has."""
    return torch._scaled_mm(*operands, **how)


def flash_attention() -> Any:
    """With the logarithm of its sums, for parts that are merged. Instead: `torch.nn.attention.flex_attention`."""
    return torch.ops.aten._scaled_dot_product_flash_attention


def arguments_of(operator: Any) -> Any:
    """Of an operator, with which of them it writes to. Without it, unset tensors of a model are not found."""
    return operator._schema.arguments


def is_operator(value: object) -> bool:
    """Whether it is one overload of an operator, as selective checkpointing shows it."""
    return isinstance(value, torch._ops.OpOverload)


def saved_tensor_hooks() -> Any:
    """Those in force, by which a part of a forward pass keeps less than its activations; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_recorded() -> bool:
    """Whether selective checkpointing records what is computed now. Without it, a trial in a recomputed block fails."""
    return any(isinstance(mode, _CachingTorchDispatchMode) for mode in _get_current_dispatch_mode_stack())


def without_modes() -> AbstractContextManager[Any]:
    """No mode records or replaces what is computed inside."""
    return _disable_current_modes()


def set_allocator(options: str) -> None:
    """Settings of the CUDA allocator; torch 2.13 has a new name for it and warns of the old one.

    Instead: PYTORCH_ALLOC_CONF, before torch is imported.
    """
    known = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (known or torch.cuda.memory._set_allocator_settings)(options)


# ---- the compiler, which is imported when it is first needed: that takes seconds


def default_compile_cache() -> str:
    """The folder that inductor takes by itself. Instead: leave every folder in the environment alone."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return str(default_cache_dir())


def inductor_options(mode: str) -> dict[str, Any]:
    """The options that a mode of `torch.compile` stands for. Instead: write them down."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def compiled_graphs() -> int:
    """How many torch has compiled in this process. Instead: count by a backend of our own."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def let_compiler_find_functions(modules: Mapping[str, Any]) -> None:
    """It finds torch's functions by name, once: called before some are replaced for a while."""
    if "torch._dynamo" in modules:
        modules["torch._dynamo"].trace_rules.get_torch_obj_rule_map()
