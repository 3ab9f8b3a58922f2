"""Models that are wrapped for several ranks already: the trainer does that itself, so it must get what is inside."""

from __future__ import annotations

from torch import nn

from distributed.core.errors import Problem, TaskError
from distributed.strategies.checks.sharded_models import is_in_parts

_WRAPPERS = {  # by the first words of their module: what the trainer does in their place
    ("torch.nn.parallel", "DistributedDataParallel"): "num_gpus=2 is enough: the ranks are started and kept alike",
    ("torch.nn.parallel", "DataParallel"): "num_gpus=2 is enough: each device has a process of its own",
    ("torch.distributed", "FullyShardedDataParallel"): "backend='fsdp' shards it",
    ("torch.distributed", "FSDPModule"): "backend='fsdp' shards it",
    ("deepspeed", "DeepSpeedEngine"): "backend='deepspeed' makes the engine",
}


def refuse_wrapped(model: nn.Module) -> None:
    """Raise for DDP, DataParallel, FSDP or an engine around the model or a part of it, unless a fit has left it so."""
    if is_in_parts(model):
        return
    problems: list[Problem] = []
    for path, module in model.named_modules():
        found = _wrapper_of(module)
        if found is not None:
            name, instead = found
            where = f"the model is a {name}" if not path else f"{path} of the model is a {name}"
            inner = "model.module" if hasattr(module, "module") else "the model as it was made"
            problems.append(
                Problem(
                    where,
                    why="the trainer prepares the model for the ranks itself, and would wrap it a second time",
                    do=f"pass {inner}; {instead}",
                )
            )
    if problems:
        raise TaskError(problems)


def _wrapper_of(module: nn.Module) -> tuple[str, str] | None:
    for kind in type(module).__mro__:
        for (package, name), instead in _WRAPPERS.items():
            if kind.__name__ == name and kind.__module__.startswith(package):
                return name, instead
    return None
