"""What of a task DeepSpeed cannot train, each said with its name before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from distributed.core.errors import Problem, TaskError
from distributed.core.plan import Plan
from distributed.runtime.torch_compat import BatchNormBase
from distributed.strategies.base import StepTask
from distributed.strategies.checks.elementwise import INSTEAD, OF_STEP_HOOKS, has_step_hooks, why_not_cut
from distributed.strategies.checks.sharded_models import extra_state

# Of torch's own: those whose step of one element depends on others of its tensor. ZeRO steps parts of flat tensors that
# hold many parameters.
_UNFIT = {
    "LBFGS": "it calls the model several times in a step, and works on all parameters as one vector",
    "SparseAdam": "it takes sparse gradients, and DeepSpeed's buffers are dense",
    "Adafactor": "its state goes by rows and columns, which ZeRO's flat tensors do not have",
    "Muon": "its steps are of whole matrices, which ZeRO's flat tensors do not have",
}

_FIT = ("FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "FusedLion", "DeepSpeedCPULion")  # DeepSpeed's own


def check_task(task: StepTask, plan: Plan) -> None:
    """Raise everything that stands in the way of this model and optimizer."""
    problems = [*_of_stage(plan), *_of_model(task.model, plan), *extra_state(task.model)]
    if isinstance(task.optimizer, torch.optim.Optimizer) and "optimizer" not in plan.engine["config"]:
        problems += _of_optimizer(task.optimizer)
    if "optimizer" in plan.engine["config"] and task.optimizer is not None:
        problems.append(
            Problem(
                "there are two optimizers: the one that was passed, and that of the DeepSpeed configuration",
                why="only one of them can be stepped",
                do="take the section 'optimizer' out of the configuration, or pass no optimizer",
            )
        )
    if problems:
        raise TaskError(problems)


def _of_stage(plan: Plan) -> Iterator[Problem]:
    config = plan.engine["config"]
    zero = config["zero_optimization"]
    if zero.get("stage") not in (1, 2, 3):
        yield Problem(
            f"DeepSpeed without ZeRO (stage {zero.get('stage')})",
            why="every rank would hold everything, as it does under DDP",
            do="set zero_stage=1, 2 or 3, or backend='pytorch-ddp'",
        )
    accumulates = (config.get("data_types") or {}).get("grad_accum_dtype")
    if plan.precision.kind == "bf16" and zero.get("stage") == 1 and accumulates in ("fp32", "float32", "torch.float32"):
        yield Problem(
            "ZeRO-1 in bf16 with data_types.grad_accum_dtype='fp32'",
            why="DeepSpeed has another optimizer for that, whose state is not stored here",
            do="set zero_stage=2, or leave grad_accum_dtype out",
        )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """The same of one that was just made."""
    problems = list(_of_optimizer(optimizer))
    if problems:
        raise TaskError(problems)


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[Problem]:
    name = type(optimizer).__name__
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    is_deepspeeds = type(optimizer).__module__.startswith("deepspeed.ops.") and name in _FIT
    unfit = name in _UNFIT and is_torchs
    why = "" if is_deepspeeds or unfit else why_not_cut(optimizer, ("flat", "parameters"))
    if why:
        yield Problem(
            f"{name} cannot be trained under DeepSpeed's ZeRO",
            why=why,
            do="use AdamW, SGD or another optimizer that steps each element by itself, or backend='pytorch-ddp'; one "
            "of your own that does so can say it: steps_elementwise = True in its class",
        )
    if unfit:
        yield Problem(
            f"DeepSpeed's ZeRO cannot hold the state of {name}",
            why=_UNFIT[name],
            do="use AdamW, SGD or another optimizer that steps each element by itself, or backend='pytorch-ddp'",
        )
    if has_step_hooks(optimizer):
        yield Problem(f"{name} has step hooks, with backend='deepspeed'", why=OF_STEP_HOOKS, do=INSTEAD)
    if isinstance(optimizer, torch.optim.Adagrad) and len(optimizer.param_groups) > 1:
        yield Problem(
            "Adagrad with several parameter groups cannot be trained by DeepSpeed",
            why="DeepSpeed replaces it by one with a single group",
            do="put the parameters into one group, or use another optimizer",
        )


def _of_model(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    odd = next(((name, p) for name, p in model.named_parameters() if p.dtype != torch.float32), None)
    scalar = next((name for name, p in model.named_parameters() if not p.dim()), None)
    if scalar is not None and plan.world_size > 1:
        yield Problem(
            f"the parameter {scalar} is a single number without a dimension",
            why="DeepSpeed cannot send such a tensor to the other ranks",
            do="make it a tensor of one element: nn.Parameter(torch.tensor([1.0]))",
        )
    empty = next((name for name, p in model.named_parameters() if not p.numel()), None)
    if empty is not None:
        yield Problem(
            f"the parameter {empty} has no elements",
            why="ZeRO has no part of it for any rank, and no state of it for a checkpoint",
            do="leave it out of the model, or use backend='fsdp'",
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        yield Problem(
            "the model is on the meta device, and DeepSpeed begins with values",
            why="tensors on the meta device have no memory yet",
            do="make the model on the CPU, or use backend='fsdp'",
        )
    elif odd is not None:
        yield Problem(
            f"the parameter {odd[0]} is {str(odd[1].dtype).removeprefix('torch.')}",
            why="DeepSpeed's master values are float32, and so must be those that they begin with",
            do="model.float(); mixed_precision says what is computed in",
        )
    sparse = next((name for name, module in model.named_modules() if getattr(module, "sparse", False) is True), None)
    if sparse is not None:
        yield Problem(
            f"{sparse} has sparse gradients", why="DeepSpeed's buffers are dense", do=f"make {sparse} with sparse=False"
        )
    norm = next((name for name, module in model.named_modules() if isinstance(module, BatchNormBase)), None)
    if norm is not None and plan.precision.kind != "fp32":
        yield Problem(
            f"{norm} is a BatchNorm layer, and mixed_precision={plan.precision.kind!r}",
            why="DeepSpeed holds its parameters in that precision, beside statistics in fp32: torch does not take both",
            do="use backend='pytorch-ddp' or mixed_precision='no'",
        )
