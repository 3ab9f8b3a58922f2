"""Preparation of a model on any mesh: memory, initial values, and recomputation and compilation of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import nn

from distributed.core.env import inherited_environ
from distributed.core.plan import Plan
from distributed.runtime.session import Session
from distributed.runtime.torch_module_compat import compiled_call, set_compiled_call
from distributed.strategies.model.compilation import compile_blocks, compile_cache, undo_compile
from distributed.strategies.model.lora import init_lora, is_adapter
from distributed.strategies.model.materialize import materialize
from distributed.strategies.model.recompute import recompute, undo_recompute
from distributed.strategies.placement import Layout

_ONLINE = "TORCHINDUCTOR_ONLINE_SOFTMAX"  # a user's choice of how a compiled softmax sums


def make(module: nn.Module, plan: Plan, session: Session, layout: Layout | None = None) -> None:
    """Allocate and initialise a model on the meta device, with the same values on any mesh."""
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
    """Set up recomputation and compilation of the blocks; returns the function that undoes it."""
    memory, wanted = plan.memory, plan.shard.blocks
    compiled: list[str] = []
    own = compiled_call(module)  # of a user who has compiled it
    if memory.recompute:
        recompute(module, memory.recompute, memory.recompute_every, wanted)
    if memory.compile:
        if memory.compile_whole:
            module.compile(options=_whole_options(plan.device, inherited_environ()))
        else:
            compiled = compile_blocks(module, wanted, memory.compile_mode or None, is_alike=plan.mesh.tp > 1)
    cache = ExitStack()
    cache.enter_context(compile_cache(plan))  # blocks are compiled when they are first called

    def undo() -> None:
        cache.close()
        if memory.compile_whole:
            set_compiled_call(module, own)
        undo_compile(module, compiled)
        undo_recompute(module)

    return undo


def _whole_options(device: str, environ: Mapping[str, str]) -> dict[str, bool] | None:
    """Options of the compiler. On a GPU, a softmax over a vocabulary is faster with two reads of the logits than with
    the corrected sum of one pass: measured for GPT-2 on an H200, by a profile of its kernels."""
    return {"online_softmax": False} if device == "cuda" and _ONLINE not in environ else None
