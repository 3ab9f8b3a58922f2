"""What is private in torch's modules, optimizers and loss scaler, and used all the same, as in `torch_compat.py`.

Torch 2.11 and 2.13 have every name below; the tests run with 2.13.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

Hooks = Mapping[int, Any]

# ---- hooks, which nothing public lists


class StepHooks(NamedTuple):
    before: Hooks
    after: Hooks


# An optimizer's own, by attribute. Without these, a hook is lost on the way to the ranks.
OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def step_hooks(optimizer: torch.optim.Optimizer) -> StepHooks:
    """Without them, a hook that sees shards where it expects whole parameters goes unnoticed."""
    return StepHooks(optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)


def set_step_hooks(optimizer: torch.optim.Optimizer, hooks: StepHooks) -> None:
    """Without it, ZeRO-1 has to refuse optimizers with hooks on their step."""
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks  # type: ignore[assignment]


def has_global_step_hooks() -> bool:
    """Whether a script hooks into every optimizer's step. Instead: ask users, who rarely do."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # its own


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """A scope in which calling a module calls none of its own hooks. Without it, DDP's set-up calls the user's."""
    kept = {name: module.__dict__[name] for name in MODULE_HOOKS}
    module.__dict__.update({name: OrderedDict() for name in MODULE_HOOKS})
    try:
        yield
    finally:
        module.__dict__.update(kept)


def gradient_hooks(tensor: torch.Tensor) -> tuple[Hooks | None, Hooks | None]:
    """On a gradient, and after its accumulation. Without them, a hook gets the gradient of one rank, unnoticed."""
    return tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    return any(gradient_hooks(tensor))


def set_gradient_hooks(parameter: Any, before: Hooks | None, after: Hooks | None) -> None:
    """Without it, hooks on gradients have to be refused wherever ranks reduce them."""
    parameter._backward_hooks = before
    if after is not None:  # torch does not call these here
        parameter._post_accumulate_grad_hooks = after


# ---- a loss scale: without these three, fp16 has to be refused, or needs a scaler of our own


def loss_scale_tensors(scaler: torch.amp.GradScaler) -> list[torch.Tensor]:
    """Its state on the device; empty before its first step. `state_dict` reads them, and waits for the device."""
    return [tensor for tensor in (scaler._scale, scaler._growth_tracker) if tensor is not None]


def found_overflows(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
    """Whether a gradient overflowed, by device, in tensors that the ranks reduce."""
    return scaler._found_inf_per_device(optimizer)


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Its progress within a step that was interrupted; it refuses to unscale twice."""
    scaler._per_optimizer_states.clear()


# ---- modules


def compiled_call(module: nn.Module) -> Any:
    """What `module.compile()` calls; None: it is eager. Instead: keep what `torch.compile(module)` returns."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Without it, a compiled model cannot run eagerly for a while, and a pipeline cannot call its blocks."""
    module._compiled_call_impl = call


def forget_compiled_call(module: nn.Module) -> None:
    """As if `module.compile()` had not been called."""
    module.__dict__.pop("_compiled_call_impl", None)


def without_compile_wrapper(module: nn.Module) -> nn.Module:
    """The model inside of what `torch.compile(model)` returns. Instead: refuse it, or save all names with a prefix."""
    inner = module._modules.get("_orig_mod")
    return inner if type(module).__name__ == "OptimizedModule" and inner is not None else module


def call_of(module: nn.Module) -> Callable[..., Any]:
    """What calling a module runs, with its hooks. Without it, a pipeline's blocks lose theirs."""
    return module._compiled_call_impl or module._call_impl


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of its own. Instead: those of `named_buffers` that `state_dict` does not have, for each module."""
    return module._non_persistent_buffers_set


def forget_flat_weights(module: nn.RNNBase) -> None:
    """Weak references, with which a tensor cannot be swapped. Without it, an RNN cannot be made on a device."""
    module._flat_weight_refs.clear()


def find_flat_weights(module: nn.RNNBase) -> None:
    """Once its tensors are others. Instead: `flatten_parameters`, which finds them on a GPU alone."""
    module._init_flat_weights()


def has_one_projection(module: nn.MultiheadAttention) -> bool:
    """Whether queries, keys and values have one weight. Instead: whether `in_proj_weight` is a tensor."""
    return module._qkv_same_embed_dim


def parametrize_again(module: nn.Module, names: Iterable[str]) -> None:
    """The class that parametrized modules have. Without it, they do not reach ranks that fit starts."""
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
