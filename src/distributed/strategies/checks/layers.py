"""Layers that several ranks cannot train as one process would, each reported by name before the start."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from distributed.core.engines.engine import ENGINES
from distributed.core.errors import Problem, TaskError, first_of
from distributed.core.plan import Plan
from distributed.runtime.torch_compat import BatchNormBase
from distributed.strategies.checks.parameter_hooks import hooked_parameters
from distributed.strategies.checks.plain_modules import normalizes_by_function
from distributed.strategies.checks.sharded_models import refuse_parts


def check_layers(model: nn.Module, plan: Plan) -> None:
    """Raise all problems of this model under this plan."""
    refuse_parts(model)
    problems = [*_of_tables(model, plan), *_of_hooks(model, plan)]
    is_shared = plan.mesh.data_ranks > 1 and not plan.is_bitwise
    if is_shared or plan.batch.leaves > 1 or plan.batch.parts > 1:
        problems += _of_frequencies(model)
    if is_shared and plan.replicate.sync_batchnorm:
        problems += _of_norms(model)
    if problems:
        raise TaskError(problems)


def _of_norms(model: nn.Module) -> Iterator[Problem]:
    """Problems of BatchNorm layers whose statistics cannot be taken over all ranks."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            if _scripts_batchnorm(module):
                yield Problem(
                    f"{path or 'the model'} is a TorchScript module with a BatchNorm layer",
                    why="the layer takes statistics over one rank's share of the batch, and its code cannot be changed",
                    do="use the module as it was before torch.jit, which torch.compile makes as fast, or set "
                    "sync_batchnorm=False",
                )
                return
        elif isinstance(module, BatchNormBase) and not normalizes_by_function(module):
            yield Problem(
                f"{path or 'the model'} ({type(module).__name__}) is a BatchNorm layer with statistics of its own",
                why="the layer's forward calls neither its base class's forward nor torch.nn.functional.batch_norm, "
                "which are computed over all ranks; its statistics would be over one rank's share of the batch",
                do="let its forward call super().forward(x) or torch.nn.functional.batch_norm, or set "
                "sync_batchnorm=False",
            )


def _scripts_batchnorm(module: torch.jit.ScriptModule) -> bool:
    graph = getattr(module, "inlined_graph", None)
    return graph is not None and "aten::batch_norm(" in str(graph)


def _of_frequencies(model: nn.Module) -> Iterator[Problem]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
            yield Problem(
                f"{path or 'the model'} has scale_grad_by_freq=True, with several shares of a batch",
                why="the layer divides gradients by how often a row occurs in the batch, which is computed in shares: "
                "of ranks, of virtual ranks, or of a pipeline's micro-batches",
                do=f"make {path or 'it'} with scale_grad_by_freq=False, or train with one rank and one micro-batch",
            )


def _of_tables(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Problems of embeddings with max_norm, where the shortened rows would be lost or differ between ranks."""
    if not (reason := _why_no_change(plan)):
        return
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            yield Problem(
                f"{path or 'the model'} has max_norm={module.max_norm:g}: its weight changes in every forward pass",
                why=reason,
                do="use backend='pytorch-ddp', or leave max_norm out and shorten what was looked up: "
                "rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1)",
            )


def _why_no_change(plan: Plan) -> str:
    """Why a forward pass may not change a parameter; empty if every rank can make the same change."""
    if plan.shard.is_fsdp and (plan.mesh.dp_shard > 1 or plan.shard.cpu_offload):
        return "fully sharded parameters are gathered for a forward pass and then dropped, with the change"
    if ENGINES.entries[plan.strategy].owns_state:
        return f"the master weights of backend={plan.strategy!r} lack the change, and overwrite it in the next step"
    if plan.mesh.pp > 1:
        return "a pipeline's stages and micro-batches run forward at different times, and all must make the same change"
    if plan.is_bitwise:
        return "reproducible='bitwise' runs a batch in parts, each of which would see the changes of those before it"
    if plan.speed.parameters != "fp32":
        return "with bf16_parameters the optimizer's own values lack the change, and overwrite it"
    return ""


def _of_hooks(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Problems of hooks on gradients that cannot be called with the gradient of one process."""
    if plan.is_bitwise or plan.world_size == 1 or not (names := hooked_parameters(model)):
        return
    is_cut = plan.shard.is_fsdp or plan.mesh.tp > 1 or plan.mesh.pp > 1 or ENGINES.entries[plan.strategy].owns_state
    if is_cut:
        yield Problem(
            f"{first_of(names, 1)} has a hook on its gradient, and no rank would have the whole gradient",
            why="a hook is called with the gradient of the whole parameter, which is cut or sharded over ranks here",
            do="let the model's forward do what the hook does (a mask: on the weight), or use backend='pytorch-ddp'",
        )
    elif plan.batch.most_accumulated > 1:
        setting = f"gradient_accumulation_steps={plan.batch.most_accumulated}"
        yield Problem(
            f"{first_of(names, 1)} has a hook on its gradient, with {setting}",
            why="one process calls the hook with the gradient of each micro-batch, and ranks reduce their gradients "
            "once per step",
            do="set gradient_accumulation_steps=1, or let the model's forward do what the hook does (a mask: on the "
            "weight)",
        )
