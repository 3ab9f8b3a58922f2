"""How a task steps (several optimizers, a manual step, a closure), and the settings with which that cannot be exact."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from distributed.core.engines.engine import ENGINES
from distributed.core.errors import Problem, TaskError
from distributed.core.plan import Plan
from distributed.strategies.base import StepTask
from distributed.strategies.checks.elementwise import needs_closure
from distributed.strategies.joint_optimizer import JointOptimizer, members_of

_WHOLE = "backend='pytorch-ddp' without sharding"


def check_stepping(task: StepTask, plan: Plan) -> None:
    """Raise what stands against the way in which this task steps, before anything is started."""
    problems: list[Problem] = []
    if task.is_manual:
        problems += _of_manual(plan)
    elif task.has_phases:
        problems += _of_several(plan)
    if needs_closure(task.optimizer):
        problems += _of_closure(type(task.optimizer).__name__, plan)
    if problems:
        raise TaskError(problems)


def check_made(optimizer: torch.optim.Optimizer, plan: Plan, *, is_manual: bool) -> None:
    """The same of an optimizer that a function of the user's has made."""
    problems: list[Problem] = []
    several = isinstance(optimizer, JointOptimizer)
    if several and not is_manual:
        problems += _of_several(plan)
    for member in members_of(optimizer):
        name = type(member).__name__
        if needs_closure(member) and (several or is_manual):
            problems.append(
                Problem(
                    f"the optimizer {name} " + ("in a manual step" if is_manual else "as one of several"),
                    why="its step needs a closure, which calls the model for one loss, and the only optimizer's",
                    do="use an optimizer that steps by gradients, such as AdamW or SGD",
                )
            )
        elif needs_closure(member):
            problems += _of_closure(name, plan)
    if problems:
        raise TaskError(problems)


def _of_manual(plan: Plan) -> Iterator[Problem]:
    what = "manual_optimization"
    yield from _of_engine("manual", what, plan)
    yield from _of_parts(what, "its calls reduce the gradients of replicas, and know nothing of parts", plan)
    accumulation = plan.batch.most_accumulated
    if accumulation > 1:
        yield Problem(
            f"{what} with gradient_accumulation_steps={accumulation}",
            why="the task itself decides in each batch when an optimizer steps, and a step has one batch",
            do="set gradient_accumulation_steps=1; several calls of self.backward before self.step add up",
        )
    if plan.precision.kind == "fp16":
        yield Problem(
            f"{what} with mixed_precision='fp16'",
            why="the loss scale is one for all optimizers of a step, and a manual step may step them in any order",
            do="use mixed_precision='bf16'",
        )
    if plan.replicate.static_graph:
        yield Problem(
            f"{what} with static_graph=True",
            why="the setting is DDP's, which it does without",
            do="leave static_graph out",
        )
    if plan.loss_weighting == "targets":
        yield Problem(
            f"{what} with loss_weighting='targets'",
            why="what a loss is a mean over is not found out in a manual step",
            do="pass it: self.backward(loss, weight)",
        )


def _of_several(plan: Plan) -> Iterator[Problem]:
    what = "several optimizers"
    yield from _of_engine("several_optimizers", what, plan)
    is_fsdp = plan.shard.is_fsdp and plan.mesh.tp == plan.mesh.pp == plan.mesh.cp == 1
    if not is_fsdp:
        yield from _of_parts(what, "each phase trains other parameters, and these are cut for a step of all", plan)
    elif plan.speed.parameters != "fp32":
        yield _low(what)


def _of_closure(name: str, plan: Plan) -> Iterator[Problem]:
    what = f"the optimizer {name}, which calls the model by a closure,"
    yield from _of_engine("closure", what, plan)
    yield from _of_parts(what, "its step looks at all parameters together, several times", plan)
    if plan.precision.kind == "fp16":
        yield Problem(
            f"{what} with mixed_precision='fp16'",
            why="whether a scaled loss overflows is known after the closure, and its step would go on",
            do="use mixed_precision='bf16'",
        )
    limits = {"gradient_clipping": plan.optimizer.clip_norm, "gradient_clip_value": plan.optimizer.clip_value}
    for setting, limit in limits.items():
        if limit is not None:
            yield Problem(
                f"{what} with {setting}={limit:g}",
                why="a line search compares losses with slopes, and a clipped gradient is not the slope",
                do=f"leave {setting} out",
            )


def _of_engine(feature: str, what: str, plan: Plan) -> Iterator[Problem]:
    if feature not in ENGINES.entries[plan.strategy].can:
        able = [repr(name) for name, engine in ENGINES.entries.items() if feature in engine.can]
        yield Problem(
            f"{what} with backend={plan.strategy!r}",
            why="this engine does not support it",
            do=f"set backend={' or '.join(able)}",
        )


def _of_parts(what: str, why: str, plan: Plan) -> Iterator[Problem]:
    """Settings under which no rank steps the whole model by itself."""
    mesh = plan.mesh
    found = {
        f"tensor_parallel={mesh.tp}": mesh.tp > 1,
        f"pipeline_parallel={mesh.pp}": mesh.pp > 1,
        f"context_parallel={mesh.cp}": mesh.cp > 1,
        "zero_stage=1": plan.shard.kind == "optimizer",
        "sharded parameters (FSDP)": plan.shard.is_fsdp,
    }
    for setting, is_on in found.items():
        if is_on:
            yield Problem(f"{what} with {setting}", why=why, do=f"use {_WHOLE}")
    if plan.is_bitwise:
        added = "gradients of virtual ranks are added in one order for one backward pass and one step of a batch"
        yield Problem(f"{what} with reproducible='bitwise'", why=added, do="set reproducible='off'")
    if plan.speed.parameters != "fp32":
        yield _low(what)


def _low(what: str) -> Problem:
    return Problem(
        f"{what} with bf16_parameters",
        why="the parameters that are computed with are copies, written after the step of one optimizer",
        do="leave bf16_parameters out, or set mixed_precision='bf16'",
    )
