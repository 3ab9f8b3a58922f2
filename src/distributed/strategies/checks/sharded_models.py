"""Checks for a model that is sharded over ranks, and the mark on a model that an earlier fit has sharded."""

from __future__ import annotations

import torch
from torch import nn

from distributed.core.errors import Problem, TaskError
from distributed.core.plan import Plan
from distributed.runtime.torch_compat import forget_composable_state
from distributed.strategies.checks.elementwise import Cut, refuse_step_hooks, refuse_uncuttable

_MARK = "_distributed_in_parts"


def mark_parts(module: nn.Module) -> None:
    module.__dict__[_MARK] = True


def unmark_parts(module: nn.Module) -> None:
    module.__dict__.pop(_MARK, None)


def is_in_parts(module: nn.Module) -> bool:
    return bool(module.__dict__.get(_MARK))


def forget_parts(module: nn.Module) -> None:
    """Let torch shard a module again that was sharded before and is whole now."""
    forget_composable_state(module)


def refuse_parts(module: nn.Module) -> None:
    if is_in_parts(module):
        raise TaskError(
            "an earlier fit has sharded this model",
            why="each rank holds a part of the model only, and a run must begin with all of it",
            do="make a new model, and resume it from the checkpoint of that fit",
        )


def refuse_extra_state(module: nn.Module) -> None:
    """Raise if a checkpoint of the shards would not hold all of the model."""
    problems = extra_state(module)
    if problems:
        raise TaskError(problems)


def extra_state(module: nn.Module) -> list[Problem]:
    plain = nn.Module.get_extra_state
    found = [path or type(m).__name__ for path, m in module.named_modules() if type(m).get_extra_state is not plain]
    if not found:
        return []
    return [
        Problem(
            f"{found[0]} has an extra state (get_extra_state)",
            why="a checkpoint of a sharded model holds tensors only, and a resume would lose the extra state",
            do="keep it in a buffer: self.register_buffer(…); or train with ranks that hold the whole model",
        )
    ]


def check_cuts(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuse an optimizer whose step on shards differs from that on the whole."""
    mesh, shard = plan.mesh, plan.shard
    cuts: dict[str, tuple[Cut, ...]] = {
        f"pipeline_parallel={mesh.pp}": ("parameters",) if mesh.pp > 1 else (),
        "zero_stage=1": ("parameters",) if shard.kind == "optimizer" and mesh.dp_replicate > 1 else (),
        "sharded parameters (FSDP)": ("rows",) if shard.is_fsdp and (mesh.dp_shard > 1 or shard.cpu_offload) else (),
        f"tensor_parallel={mesh.tp}": ("rows", "columns") if mesh.tp > 1 else (),
    }
    for setting, wanted in cuts.items():
        refuse_uncuttable(optimizer, wanted, setting)
    if mesh.tp > 1 or mesh.pp > 1:  # FSDP's shards are DTensors, and ZeRO-1 calls hooks with whole parameters
        refuse_step_hooks(optimizer, f"tensor_parallel={mesh.tp}" if mesh.tp > 1 else f"pipeline_parallel={mesh.pp}")
    if type(optimizer) is torch.optim.Rprop and shard.is_fsdp:
        raise TaskError(
            "Rprop cannot be trained with sharded parameters (FSDP)",
            why="torch's Rprop uses boolean masks, which sharded tensors do not support",
            do="use another optimizer, or backend='pytorch-ddp'",
        )
