"""Layers that several ranks cannot train as one process would, each said by name before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distributed.core.errors import Problem, TaskError
from distributed.core.plan import Plan
from distributed.strategies.in_parts import refuse_parts
from distributed.strategies.parameter_hooks import hooked_parameters
from distributed.strategies.plain_modules import normalizes_by_function


def check_layers(model: nn.Module, plan: Plan) -> None:
    """Raise everything that stands in the way of this model under this plan."""
    refuse_parts(model)
    problems = [*_of_tables(model, plan), *_of_hooks(model, plan)]
    if plan.mesh.data_ranks > 1 and not plan.is_bitwise:
        problems += _of_frequencies(model)
        if plan.replicate.sync_batchnorm:
            problems += _of_norms(model)
    if problems:
        raise TaskError(problems)


def _of_norms(model: nn.Module) -> Iterator[Problem]:
    """BatchNorm layers whose statistics cannot be taken over all ranks."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            if _scripts_batchnorm(module):
                yield Problem(
                    f"{path or 'the model'} is a TorchScript module with a BatchNorm layer",
                    why="its statistics are taken over one rank's share of the batch, and nothing can come between",
                    do="use the module as it was before torch.jit, which torch.compile makes as fast, or set "
                    "sync_batchnorm=False",
                )
                return
        elif isinstance(module, _BatchNorm) and not normalizes_by_function(module):
            yield Problem(
                f"{path or 'the model'} ({type(module).__name__}) is a BatchNorm layer with statistics of its own",
                why="its forward calls neither that of its base class nor torch.nn.functional.batch_norm, which are "
                "computed over all ranks; what it computes would be over one rank's share of the batch",
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
                why="it divides gradients by how often a row occurs in the batch, of which a rank sees its share only",
                do=f"make {path or 'it'} with scale_grad_by_freq=False, or train with one rank",
            )


def _of_tables(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Embeddings that shorten their rows when these are looked up, where the change would be lost or seen by some."""
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
    """Why a forward pass may not change a parameter; empty if it may, where every rank changes it alike."""
    if plan.shard.is_fsdp and (plan.mesh.dp_shard > 1 or plan.shard.cpu_offload):
        return "fully sharded parameters are gathered for a forward pass and then dropped, and the change with them"
    if plan.strategy == "deepspeed":
        return "DeepSpeed's master values do not see the change, and write over it in the next step"
    if plan.mesh.pp > 1:
        return "a pipeline's stages and micro-batches do not meet in the forward pass, where all must change it alike"
    if plan.is_bitwise:
        return "reproducible='bitwise' runs a batch in parts, each of which would see the changes of those before it"
    if plan.speed.parameters != "fp32":
        return "with bf16_parameters the optimizer's own values do not see the change, and write over it"
    return ""


def _of_hooks(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Hooks on the gradients of parameters, where they cannot be given what they would see in one process."""
    if plan.is_bitwise or plan.world_size == 1 or not (names := hooked_parameters(model)):
        return
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    is_cut = plan.shard.is_fsdp or plan.mesh.tp > 1 or plan.mesh.pp > 1 or plan.strategy == "deepspeed"
    if is_cut:
        yield Problem(
            f"{names[0]}{more} has a hook on its gradient, and no rank would have the whole of it",
            why="a hook is called with the gradient of the whole parameter, which is cut or sharded over ranks here",
            do="let the model's forward do what the hook does (a mask: on the weight), or use backend='pytorch-ddp'",
        )
    elif plan.batch.accumulation > 1:
        yield Problem(
            f"{names[0]}{more} has a hook on its gradient, with gradient_accumulation_steps={plan.batch.accumulation}",
            why="one process calls it with the gradient of each micro-batch of all samples, and ranks add up their "
            "gradients once a step",
            do="set gradient_accumulation_steps=1, or let the model's forward do what the hook does (a mask: on the "
            "weight)",
        )
